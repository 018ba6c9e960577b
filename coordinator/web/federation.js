// One federation: loads what there is, follows the stream of events, and hands a fresh model to what its tabs show.

import { Accuracy } from "./accuracy.js";
import { Clients } from "./clients.js";
import { announce, fill, h, inWords, panel } from "./dom.js";
import { clock, names } from "./format.js";
import { Insights } from "./insights.js";
import { Invite } from "./invite.js";
import { Losses } from "./losses.js";
import { Privacy, Sums } from "./privacy.js";
import { Result } from "./result.js";
import { Settings } from "./settings.js";
import { ENDED, Running, Status } from "./status.js";
import { Times, Traffic } from "./times.js";

const SHOWN = 60; // events, the newest ones
const SETTLE = 200; // ms in which events are gathered before one look at the API
const LOOK_AGAIN = 4000; // refusals and last-seen times are told by no event
const AGAIN_AFTER = [500, 1000, 2000, 5000];

export class Federation {
  constructor(api, id, hooks) {
    Object.assign(this, { api, hooks, path: `/v1/federations/${encodeURIComponent(id)}`, last: null, failures: 0, abort: new AbortController() });
    this.model = { view: null, clients: [], rounds: new Map(), events: [], places: new Map() };
    const parts = {
      accuracy: new Accuracy(), activity: new Activity(), clients: new Clients(api, this.path, hooks.failed, () => this.#soon()), insights: new Insights(), losses: new Losses(),
      invite: new Invite(api, this.path, hooks.failed, hooks.planned(id)), privacy: new Privacy(), result: new Result(api, this.path, hooks.failed), running: new Running(), settings: new Settings(api),
      sums: new Sums(), times: new Times(), traffic: new Traffic(),
    };
    this.parts = parts;
    this.status = new Status({ steer: (verb) => this.steer(verb), download: () => parts.result.download(), failed: hooks.failed });
    this.shown = [this.status, ...Object.values(parts)];
    this.problem = h("p", { class: "error", role: "alert" });
    this.remarks = h("ul", { class: "remarks", "aria-label": "Remarks" });
    this.looksWrong = panel("Remarks", { hidden: true }, this.remarks);
    const of = (...some) => some.map((one) => parts[one].element);
    this.tabs = new Tabs({
      Overview: [...of("invite", "running", "result"), this.looksWrong, ...of("accuracy", "losses", "insights")],
      Clients: of("clients"), Privacy: of("privacy", "sums"), Traffic: of("traffic", "times"), Settings: of("settings"), Activity: of("activity"),
    });
    this.body = h("div", { class: "stack", hidden: true }, this.status.element, this.tabs.element); // hidden until there is something to show
    this.back = h("p", { class: "back" }, h("a", { href: "#/" }, "← All federations"));
    this.element = h("article", { class: "stack" }, this.back, this.problem, this.body);
  }

  async begin() {
    this.clock = setInterval(() => this.parts.running.tick(), 1000);
    this.poll = setInterval(() => !this.#over() && !document.hidden && this.#soon(), LOOK_AGAIN);
    await this.#refresh();
    if (this.model.view !== null) this.#follow();
  }

  end() {
    clearInterval(this.clock);
    clearInterval(this.poll);
    clearTimeout(this.pending);
    this.abort.abort();
  }

  /** Raises what the coordinator refuses, which is said beside the button. */
  async steer(verb) {
    const { name } = this.model.view;
    if (verb === "delete") {
      await this.api.delete(this.path);
      this.end();
      announce(`${name} is deleted`);
      await this.hooks.changed();
      window.location.hash = "#/";
      return;
    }
    this.model.view = await this.api.post(`${this.path}/${verb}`);
    announce(`${name} is ${this.model.view.state}`);
    this.#draw();
    this.hooks.changed();
    this.#soon();
  }

  #over() {
    return this.model.view !== null && ENDED.includes(this.model.view.state);
  }

  #tell(error) {
    if (error.name === "AbortError" || this.abort.signal.aborted) return;
    if (!this.hooks.failed(error)) fill(this.problem, error.message);
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
      if (this.situation !== this.#situation()) this.status.acts.clear(); // what was refused may work now
      this.situation = this.#situation();
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
    const first = this.body.hidden;
    this.body.hidden = false;
    this.back.hidden = true; // the body has one
    document.title = `${this.model.view.name} · ${this.model.view.state} · promptfed`;
    for (const one of this.shown) one.update(this.model);
    // Once it runs invitations do not come first, and neither does what can be taken before there is a result.
    const { state } = this.model.view;
    if (state !== "enrolling") comesLast(this.parts.clients.element, this.parts.invite.element);
    if (state !== "finished") comesLast(this.tabs.panels[0], this.parts.result.element);
    else if (this.moved) this.parts.running.element.after(this.parts.result.element);
    this.moved = state !== "finished";
    this.tabs.update();
    if (first && document.activeElement === document.body) this.status.heading.focus(); // what was clicked is gone
  }

  // Events

  async #follow() {
    while (!this.abort.signal.aborted) {
      try {
        await this.api.stream(`${this.path}/events?newest=${SHOWN}`, this.last, {
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
    this.model.events = [...this.model.events, { ...event.data, id: event.id, kind: event.kind }].slice(-SHOWN);
    const fresh = Date.now() - Date.parse(event.data.at) < 10_000;
    if (fresh && event.kind === "phase-opened" && event.data.kind === "train") announce(`Round ${event.data.round}, ${event.data.phase}`);
    if (fresh && event.kind === "federation-state") announce(`${this.model.view.name} is ${event.data.state}`);
    if (this.pending !== undefined) this.again = true;
    this.#soon();
  }
}

/** Move it there, unless it is: whoever types in it would lose the place. */
function comesLast(place, element) {
  if (place.lastChild !== element) place.append(element);
}

/** Groups of panels, one of which is seen; a group of which nothing is shown has no tab. */
class Tabs {
  constructor(groups) {
    const button = (title, at) => h("button", { type: "button", role: "tab", id: `tab-${at}`, "aria-controls": `tabpanel-${at}`, on: { click: () => this.#open(at), keydown: (event) => this.#key(event, at) } }, title);
    this.buttons = Object.keys(groups).map(button);
    this.panels = Object.values(groups).map((some, at) => h("div", { class: "stack", role: "tabpanel", id: `tabpanel-${at}`, "aria-labelledby": `tab-${at}` }, some));
    this.list = h("div", { class: "tabs", role: "tablist", "aria-label": "Of this federation" }, this.buttons);
    this.element = h("div", { class: "stack" }, this.list, this.panels);
    this.#open(0);
  }

  update() {
    for (const [at, panel] of this.panels.entries()) this.buttons[at].hidden = at > 0 && [...panel.children].every((one) => one.hidden);
    if (this.buttons[this.at].hidden) this.#open(0);
  }

  #open(at) {
    this.at = at;
    for (const [other, panel] of this.panels.entries()) {
      panel.hidden = other !== at;
      this.buttons[other].setAttribute("aria-selected", String(other === at));
      this.buttons[other].setAttribute("tabindex", other === at ? "0" : "-1");
    }
  }

  #key(event, at) {
    const there = this.buttons.filter((one) => !one.hidden);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = there.at((there.indexOf(this.buttons[at]) + step) % there.length);
    this.#open(this.buttons.indexOf(next));
    next.focus();
  }
}

/** What has happened, newest first. */
class Activity {
  constructor() {
    this.list = h("ol", { class: "activity", tabindex: "0", "aria-label": "Activity, newest first" });
    this.element = panel("Activity", {}, this.list);
  }

  update({ events }) {
    this.element.hidden = events.length === 0;
    if (events.at(-1)?.id === this.shown) return;
    this.shown = events.at(-1)?.id;
    fill(this.list, [...events].reverse().map((one) => h("li", {}, h("time", { datetime: one.at }, clock(one.at)), h("span", {}, sentence(one)))));
  }
}

function sentence(one) {
  const where = `round ${one.round}, ${one.phase}`;
  switch (one.kind) {
    case "federation-created": return "created";
    case "federation-state": return `the federation is ${one.state}${one.reason ? `: ${one.reason}` : ""}`;
    case "token-minted": return `an invitation for ${one.uses > 1 ? `${one.uses} sites` : one.token} was made`;
    case "token-revoked": return `the invitation for ${one.token} was revoked`;
    case "client-enrolled": return `${one.client} joined`;
    case "enrolment-refused": return `${one.client} cannot join: ${one.detail}`;
    case "phase-opened": return `${where}: ${names(one.asked)} asked`;
    case "clients-asked": return `${where}: ${names(one.asked)} asked too`;
    case "phase-extended": return `${where}: too few answered, extended once`;
    case "task-settled": return `${where}: ${one.client} ${one.status}`;
    case "phase-closed": return `${where}: closed, ${one.counted.length} counted`;
    case "phase-completed": return `${where}: completed`;
    case "attempt-failed": return `${where}: did not come to its end, tried again`;
    case "clients-joined": return `${names(one.clients)} take${one.clients.length === 1 ? "s" : ""} part from now on`;
    case "client-withdrawn": return `${one.client} was withdrawn`;
    case "client-reset": return `the name ${one.client} was reset`;
    case "client-forgotten": return `what the prompts had of ${one.client} alone was removed`;
    case "updates-deleted": return `what ${one.client} had sent was deleted`;
    case "state-committed": return `the prompts after round ${one.round} are kept`;
    case "initial-state-supplied": return "prompts to begin with were given";
    default: return one.kind.replaceAll("-", " ");
  }
}
