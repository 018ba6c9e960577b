// Which coordinator of a group to ask: the one that this page comes from, or another one where that does not answer.

const QUIET = 3_000; // ms without an answer, after which /readyz is asked
const GONE = 5_000; // ms without an answer and without one of /readyz, after which another coordinator is asked
const TAKEOVER = 20_000; // ms for which a request is sent again
const AGAIN = 500;
const MOVING = ["federation-moving", "store-away", "not-ready"]; // reasons that another coordinator may not have
const TOLD = "Promptfed-Coordinators";

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Group {
  #own = window.location.origin;
  #all = [this.#own];
  #current = this.#own;
  #silent = new Map(); // until when others come first
  #gone = new Map(); // what ends the requests to one that is gone

  get several() {
    return this.#all.length > 1;
  }

  /** The address in use where it is not the page's own, else null. */
  get elsewhere() {
    return this.#current === this.#own ? null : this.#current;
  }

  /** The answer to a request; in a group the others are asked where one is gone. Raises what `fetch` does. */
  async send(path, options) {
    const until = Date.now() + TAKEOVER;
    const reads = (options.method ?? "GET") === "GET";
    for (;;) {
      const base = this.#current;
      const last = !this.several || Date.now() > until;
      try {
        if (!reads && this.several && !(await this.#isThere(base))) throw new Unsent();
        const answer = await this.#ask(base, path, options);
        this.#learn(answer.headers.get(TOLD));
        if (last || !(await this.#leads(answer, base))) return answer;
      } catch (error) {
        if (last || options.signal?.aborted || !(reads || error instanceof Unsent)) throw error;
        this.#left(base);
      }
      await pause(AGAIN);
    }
  }

  /** Looks every few seconds whether the coordinator in use is there, until `signal` aborts. */
  async watch(signal) {
    while (!signal.aborted) {
      const base = this.#current;
      if (this.several && !(await this.#isThere(base))) this.#left(base);
      await pause(QUIET);
    }
  }

  /** Whether the request is to be sent again, since another coordinator answers it. */
  async #leads(answer, base) {
    if (answer.status !== 421 && answer.status !== 503) return false;
    const problem = await answer.clone().json().catch(() => ({}));
    if (answer.status === 503) {
      const moving = MOVING.includes(String(problem.type).split("/").at(-1));
      if (moving) this.#moveOn(base);
      return moving;
    }
    const known = this.#all.includes(problem.coordinator);
    if (known && !this.#isSilent(problem.coordinator)) this.#current = problem.coordinator;
    else this.#moveOn(base);
    return known || base !== this.#current;
  }

  async #ask(base, path, options) {
    const signals = [this.#goneOf(base).signal, ...(options.signal ? [options.signal] : [])];
    let waits = this.several;
    const watching = async () => {
      for (await pause(QUIET); waits; await pause(QUIET)) {
        if (!(await this.#isThere(base)) && waits) this.#left(base);
      }
    };
    if (waits) watching();
    try {
      return await fetch(base + path, { ...options, signal: AbortSignal.any(signals) });
    } finally {
      waits = false;
    }
  }

  async #isThere(base) {
    try {
      return (await fetch(`${base}/readyz`, { credentials: "omit", cache: "no-store", signal: AbortSignal.timeout(GONE - QUIET) })).ok;
    } catch {
      return false;
    }
  }

  #learn(header) {
    const told = (header ?? "").split(",").map((address) => address.trim());
    if (told[0] === "") return;
    // As well protected as the page's own; which of them may be asked at all, the page's policy says.
    const allowed = told.filter((address) => URL.canParse(address) && ["https:", window.location.protocol].includes(new URL(address).protocol));
    this.#all = [...new Set([this.#own, ...allowed])].slice(0, 16);
  }

  #goneOf(base) {
    if (!this.#gone.has(base)) this.#gone.set(base, new AbortController());
    return this.#gone.get(base);
  }

  /** One that is gone: what still waits for it ends, and another one comes next. */
  #left(base) {
    this.#silent.set(base, Date.now() + GONE);
    this.#goneOf(base).abort();
    this.#gone.delete(base);
    this.#moveOn(base);
  }

  #isSilent(base) {
    return Date.now() < (this.#silent.get(base) ?? 0);
  }

  #moveOn(base) {
    if (base !== this.#current) return; // another request has done so
    const at = this.#all.indexOf(this.#current);
    const following = [...this.#all.slice(at + 1), ...this.#all.slice(0, at + 1)];
    this.#current = following.find((base) => !this.#isSilent(base)) ?? following[0];
  }
}

class Unsent extends Error {}
