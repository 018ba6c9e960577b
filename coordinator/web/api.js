// The coordinator's API. The token lives in this object, and travels in a header: never in an address.

const PATIENCE = 30_000; // ms for an answer; the stream of events has no end
const AGAIN = 1_000; // ms until one of several coordinators behind this address is asked again, where one waits
const TRIES = 20;

/** A refusal, in the coordinator's own words; `errors` are what is wrong by path, where it says so. */
export class Refused extends Error {
  constructor(status, detail, errors = []) {
    super(detail);
    this.status = status;
    this.errors = errors;
  }
}

export class Api {
  #token;
  #kept = new Map();

  constructor(token) {
    this.#token = token;
  }

  get(path) {
    return this.#send("GET", path);
  }

  post(path, body) {
    return this.#send("POST", path, body === undefined ? undefined : JSON.stringify(body));
  }

  /** The answer to tensors, which go as they are. */
  put(path, blob) {
    return this.#send("PUT", path, blob, "application/octet-stream");
  }

  delete(path) {
    return this.#send("DELETE", path);
  }

  /** What never changes while the page is open: asked for once. */
  once(path) {
    if (!this.#kept.has(path)) {
      const answer = this.get(path);
      answer.catch(() => this.#kept.delete(path));
      this.#kept.set(path, answer);
    }
    return this.#kept.get(path);
  }

  /** A body as it is, and its headers: `{blob, headers}`. */
  async file(path, accept = "*/*") {
    const answer = await this.#fetch(path, { headers: { Accept: accept }, signal: AbortSignal.timeout(10 * PATIENCE) });
    return { blob: await answer.blob(), headers: answer.headers };
  }

  /** The state after a round as safetensors, under its hash: `{blob, hash}`. */
  async prompts(id, round) {
    const { blob, headers } = await this.file(`/v1/federations/${id}/prompts?round=${round}`, "application/octet-stream");
    return { blob, hash: headers.get("ETag").replaceAll('"', "") };
  }

  /** Everything on the pages of a list; `each` is called with what a page adds while more pages follow. */
  async all(path, key, after = null, limit = 100, each = () => {}) {
    const found = [];
    let next = after;
    do {
      const query = new URLSearchParams({ limit, ...(next === null ? {} : { after: next }) });
      const page = await this.get(`${path}?${query}`);
      found.push(...page[key]);
      next = page.next;
      if (next !== null) each(page[key]);
    } while (next !== null);
    return found;
  }

  async #send(method, path, body, type = "application/json") {
    const sent = body === undefined ? {} : { body, headers: { "Content-Type": type } };
    const answer = await this.#fetch(path, { method, signal: AbortSignal.timeout(PATIENCE), ...sent });
    return answer.status === 204 ? null : answer.json();
  }

  async #fetch(path, options = {}) {
    const headers = { ...options.headers, Authorization: `Bearer ${this.#token}` };
    let answer;
    try {
      for (let tries = 0; tries < TRIES; tries += 1) {
        answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store", redirect: "error" });
        if (answer.status !== 503 || !(await answer.clone().json().catch(() => ({}))).type?.endsWith("/waiting")) break;
        await new Promise((resolve) => setTimeout(resolve, AGAIN));
      }
    } catch (error) {
      if (options.signal?.aborted && error.name === "AbortError") throw error;
      throw new Refused(0, "The coordinator does not answer. Is it running?");
    }
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }

  /**
   * Server-sent events after `last`, each handed to `take({id, kind, data})`, until the stream ends or `signal` aborts;
   * `opened()` is called once the coordinator answers.
   * Browsers' own EventSource can send no header, so the stream is read by hand.
   */
  async stream(path, last, { opened, take, signal }) {
    const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
    const answer = await this.#fetch(path, { headers, signal });
    opened();
    await this.#read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), take);
  }

  async #read(reader, take) {
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parsed(block);
        if (event !== null) take(event);
      }
    }
  }
}

function parsed(block) {
  const event = { id: null, kind: "message", data: "" };
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at <= 0) continue; // a comment, which keeps the connection alive
    const value = line.slice(at + 1).replace(/^ /, "");
    const field = line.slice(0, at);
    if (field === "id") event.id = value;
    if (field === "event") event.kind = value;
    if (field === "data") event.data += value;
  }
  return event.data === "" ? null : { ...event, data: JSON.parse(event.data) };
}

async function refusal(answer) {
  try {
    const problem = await answer.json();
    const where = problem.coordinator ? `: open its page at ${problem.coordinator}` : "";
    return new Refused(answer.status, (problem.detail ?? problem.title ?? answer.statusText) + where, problem.errors ?? []);
  } catch {
    return new Refused(answer.status, answer.statusText || `status ${answer.status}`);
  }
}
