// One federation: loads what there is, follows the stream of events, and hands a fresh model to the panels.

import { Accuracy } from "./accuracy.js";
import { Activity } from "./activity.js";
import { Refused } from "./api.js";
import { Clients } from "./clients.js";
import { announce, fill, h } from "./dom.js";
import { Insights } from "./insights.js";
import { Status } from "./status.js";
import { Traffic } from "./traffic.js";

const SETTLE = 200; // ms in which events are gathered before one look at the API
const LOOK_AGAIN = 4000; // refusals and last-seen times are told by no event
const AGAIN_AFTER = [500, 1000, 2000, 5000];
export const ENDED = ["finished", "failed", "cancelled"];

export class Federation {
  constructor(api, id, hooks) {
    this.api = api;
    this.path = `/v1/federations/${encodeURIComponent(id)}`;
    this.hooks = hooks;
    this.model = { view: null, clients: [], rounds: new Map(), insights: null, insightsWhy: "", events: [], places: new Map() };
    this.status = new Status((verb) => this.steer(verb));
    this.panels = [this.status, new Accuracy(), new Clients(), new Insights(), new Traffic(), new Activity()];
    const [status, accuracy, clients, insights, ...below] = this.panels.map((one) => one.element);
    this.problem = h("p", { class: "error", role: "alert" });
    this.element = h("article", { class: "federation" }, this.problem, status, accuracy, insights, clients, h("div", { class: "pair" }, below));
    this.abort = new AbortController();
    this.last = null;
    this.failures = 0;
    this.insightsOf = "";
  }

  async begin() {
    this.clock = setInterval(() => this.status.tick(), 1000);
    this.poll = setInterval(() => !this.#over() && !document.hidden && this.#soon(), LOOK_AGAIN);
    await this.#refresh();
    if (this.model.view !== null) this.#follow();
  }

  end() {
    clearInterval(this.clock);
    clearInterval(this.poll);
    clearTimeout(this.pending);
    this.abort.abort();
    for (const one of this.panels) one.end?.();
  }

  async steer(verb) {
    fill(this.problem);
    try {
      this.model.view = await this.api.post(`${this.path}/${verb}`);
      announce(`${this.model.view.name} is ${this.model.view.state}`);
      this.#draw();
      this.hooks.changed();
      this.#soon();
    } catch (error) {
      this.#tell(error);
    }
  }

  #over() {
    return this.model.view !== null && ENDED.includes(this.model.view.state);
  }

  #tell(error) {
    if (error.name === "AbortError" || this.abort.signal.aborted) return;
    if (!this.hooks.failed(error)) fill(this.problem, error.message);
  }

  #soon() {
    if (this.pending !== undefined) return;
    this.pending = setTimeout(async () => {
      await this.#refresh();
      this.pending = undefined;
      if (this.again) {
        this.again = false;
        this.#soon();
      }
    }, SETTLE);
  }

  async #refresh() {
    const { model } = this;
    try {
      const whole = [...model.rounds.values()].filter((one) => one.ended_at !== null).map((one) => one.round);
      const known = whole.length ? String(Math.max(...whole)) : null;
      const [view, clients, rounds] = await Promise.all([
        this.api.get(this.path),
        this.api.all(`${this.path}/clients`, "clients", null, 1000),
        this.api.all(`${this.path}/rounds`, "rounds", known),
      ]);
      if (this.abort.signal.aborted) return;
      const before = model.view?.state;
      model.view = view;
      model.clients = clients;
      for (const one of rounds) model.rounds.set(one.round, one);
      for (const [place, name] of clients.map((one) => one.name).entries()) model.places.set(name, place);
      fill(this.problem);
      this.#draw();
      if (before !== undefined && before !== view.state) this.hooks.changed();
      await this.#look();
    } catch (error) {
      this.#tell(error);
    }
  }

  /** What the tensors tell, where there is a new state (or lexicon) to tell of. */
  async #look() {
    const { model } = this;
    const newest = [...model.rounds.values()].filter((one) => one.state_hash !== null).at(-1);
    const wanted = newest ? `${newest.round} ${newest.state_hash} ${this.lexicon ?? ""}` : "";
    if (wanted === "" || wanted === this.insightsOf) return;
    try {
      model.insights = await this.api.get(`${this.path}/insights?round=${newest.round}`);
      this.insightsOf = wanted;
      if (!this.abort.signal.aborted) this.#draw();
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 404) throw error;
    }
  }

  #draw() {
    if (this.abort.signal.aborted) return;
    document.title = `${this.model.view.name} · ${this.model.view.state} · promptfed`;
    for (const one of this.panels) one.update(this.model);
  }

  // Events

  async #follow() {
    while (!this.abort.signal.aborted) {
      try {
        await this.api.stream(`${this.path}/events`, this.last, {
          opened: () => this.hooks.connection("live", "live"),
          take: (event) => this.#take(event),
          signal: this.abort.signal,
        });
        if (this.abort.signal.aborted) return;
        if (this.#over() || (await this.#ended())) {
          this.hooks.connection("over", this.model.view.state);
          return;
        }
      } catch (error) {
        if (this.abort.signal.aborted || this.hooks.failed(error)) return;
        if (error.status === 404) {
          this.#tell(error);
          this.hooks.connection("lost", "gone");
          return;
        }
      }
      this.hooks.connection("lost", "reconnecting…");
      const wait = AGAIN_AFTER[Math.min(this.failures, AGAIN_AFTER.length - 1)];
      this.failures += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  async #ended() {
    await this.#refresh();
    return this.#over();
  }

  #take(event) {
    this.failures = 0;
    this.last = event.id ?? this.last;
    this.model.events.push({ ...event.data, kind: event.kind });
    if (event.kind === "lexicon-supplied") this.lexicon = event.id;
    const fresh = Date.now() - Date.parse(event.data.at) < 10_000;
    if (fresh && event.kind === "phase-opened" && event.data.kind === "train") announce(`Round ${event.data.round}, ${event.data.phase}`);
    // In the words of `steer`: whichever comes last says the same.
    if (fresh && event.kind === "federation-state") announce(`${this.model.view.name} is ${event.data.state}`);
    if (this.pending !== undefined) this.again = true;
    this.#soon();
  }
}
