// One federation: loads what there is, follows the stream of events, and hands a fresh model to the panels.

import { Accuracy } from "./accuracy.js";
import { Activity, SHOWN } from "./activity.js";
import { Refused } from "./api.js";
import { Clients } from "./clients.js";
import { announce, fill, h, inWords, panel } from "./dom.js";
import { Downloads } from "./downloads.js";
import { Insights } from "./insights.js";
import { Losses } from "./losses.js";
import { Privacy } from "./privacy.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";
import { Sums } from "./sums.js";
import { Times } from "./times.js";
import { Tokens } from "./tokens.js";
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
    this.model = { view: null, clients: [], rounds: new Map(), events: [], places: new Map() };
    const tell = (error) => this.#refused(error);
    this.status = new Status((verb) => this.steer(verb));
    this.times = new Times();
    const [sums, privacy] = [new Sums(), new Privacy()];
    const clients = new Clients(api, this.path, tell, () => this.#soon());
    const [accuracy, losses, insights, traffic] = [new Accuracy(), new Losses(), new Insights(), new Traffic()];
    const [activity, tokens, settings, downloads] = [new Activity(), new Tokens(api, this.path, tell), new Settings(api), new Downloads(api, this.path, tell)];
    this.panels = [this.status, accuracy, losses, this.times, sums, privacy, clients, insights, traffic, activity, tokens, settings, downloads];
    this.problem = h("p", { class: "error", role: "alert" });
    this.refusal = h("p", { class: "error", role: "alert" });
    this.remarks = h("ul", { class: "remarks", "aria-label": "Remarks" });
    this.looksWrong = panel("Remarks", { hidden: true }, this.remarks);
    const pair = (...some) => h("div", { class: "pair" }, some.map((one) => one.element));
    this.body = h("div", { class: "federation", hidden: true }, this.status.element, this.looksWrong, accuracy.element, pair(losses, this.times), sums.element, privacy.element, settings.element, insights.element, clients.element, tokens.element, pair(traffic, activity), downloads.element); // hidden until there is something to show
    this.back = h("p", { class: "back" }, h("a", { href: "#/" }, "← All federations"));
    this.element = h("article", { class: "federation" }, this.back, this.problem, this.refusal, this.body);
    this.abort = new AbortController();
    this.last = null;
    this.failures = 0;
  }

  async begin() {
    this.clock = setInterval(() => this.#tick(), 1000);
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

  #tick() {
    this.status.tick();
    this.times.tick();
  }

  async steer(verb) {
    this.#refused(null);
    if (verb === "delete") {
      await this.#delete();
      return;
    }
    try {
      this.model.view = await this.api.post(`${this.path}/${verb}`);
      announce(`${this.model.view.name} is ${this.model.view.state}`);
      this.#draw();
      this.hooks.changed();
      this.#soon();
    } catch (error) {
      this.#refused(error);
    }
  }

  async #delete() {
    const { name } = this.model.view;
    try {
      await this.api.delete(this.path);
    } catch (error) {
      this.#refused(error);
      return;
    }
    this.end();
    announce(`${name} is deleted`);
    this.hooks.changed();
    window.location.hash = "#/";
  }

  #over() {
    return this.model.view !== null && ENDED.includes(this.model.view.state);
  }

  #tell(error) {
    if (error.name === "AbortError" || this.abort.signal.aborted) return;
    if (!this.hooks.failed(error)) fill(this.problem, error.message);
  }

  /** A refusal stays until the next attempt, or until the federation is no longer as it was then: no role changes by that. */
  #refused(error) {
    this.refusedAt = error?.status === 403 ? null : this.#situation();
    if (error === null || !this.hooks.failed(error)) fill(this.refusal, error?.message);
  }

  #situation() {
    return `${this.model.view?.state} ${this.model.clients.map((one) => `${one.name} ${one.status}`)}`;
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
      const [view, clients] = await Promise.all([this.api.get(this.path), this.api.all(`${this.path}/clients`, "clients", null, 1000)]);
      if (this.abort.signal.aborted) return;
      const before = model.view?.state;
      model.view = view;
      model.clients = clients;
      for (const [place, name] of clients.map((one) => one.name).entries()) model.places.set(name, place);
      const take = (some) => some.forEach((one) => model.rounds.set(one.round, one));
      const show = (some) => {
        take(some);
        this.#draw();
      };
      const rounds = await this.api.all(`${this.path}/rounds`, "rounds", known, 100, show);
      if (this.abort.signal.aborted) return;
      take(rounds);
      fill(this.problem);
      if (this.refusedAt !== null && this.refusedAt !== this.#situation()) fill(this.refusal);
      this.#draw();
      if (before !== undefined && before !== view.state) this.hooks.changed();
      await this.#askPrivacy(rounds);
      await this.#remark();
    } catch (error) {
      this.#tell(error);
    }
  }

  /** What protection has cost, where something of a round is new. */
  async #askPrivacy(rounds) {
    const { model } = this;
    if ((model.view.spec.privacy?.level ?? "none") === "none") return; // specs leave out what is not asked for
    const wanted = JSON.stringify(rounds.map((one) => one.phases.map((phase) => [phase.updates.length, phase.completed_at, phase.failed.length])));
    if (model.privacy && wanted === this.privacyOf) return;
    model.privacy = await this.api.get(`${this.path}/privacy`);
    this.privacyOf = wanted;
    this.#draw();
  }

  /** What looks wrong, once after the end. */
  async #remark() {
    if (!this.#over() || this.remarked) return;
    this.remarked = true;
    const { remarks } = await this.api.get(`${this.path}/remarks`);
    fill(this.remarks, remarks.map((text) => h("li", {}, inWords(text))));
    this.looksWrong.hidden = remarks.length === 0;
  }

  #draw() {
    if (this.abort.signal.aborted) return;
    this.body.hidden = false;
    this.back.hidden = true; // the body has one
    document.title = `${this.model.view.name} · ${this.model.view.state} · promptfed`;
    for (const one of this.panels) one.update(this.model);
  }

  // Events

  async #follow() {
    while (!this.abort.signal.aborted) {
      try {
        await this.api.stream(`${this.path}/events?newest=${SHOWN}`, this.last, {
          opened: () => this.hooks.connection("live", this.api.elsewhere ? `live from ${this.api.elsewhere}` : "live"),
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
    this.model.events = [...this.model.events, { ...event.data, id: event.id, kind: event.kind }].slice(-SHOWN);
    const fresh = Date.now() - Date.parse(event.data.at) < 10_000;
    if (fresh && event.kind === "phase-opened" && event.data.kind === "train") announce(`Round ${event.data.round}, ${event.data.phase}`);
    // In the words of `steer`: whichever comes last says the same.
    if (fresh && event.kind === "federation-state") announce(`${this.model.view.name} is ${event.data.state}`);
    if (this.pending !== undefined) this.again = true;
    this.#soon();
  }
}
