// The head of a federation: where it stands, the one thing to do next, and what else can be done with the whole of it.

import { Acts, announce, ask, fill, h, say } from "./dom.js";
import { ago, bytes, clock, counted, duration, edges, gain, measure, percent } from "./format.js";
import { badge } from "./list.js";
import { secondsLeft } from "./times.js";

export const ENDED = ["finished", "failed", "cancelled"];
const STEPS = ["Invite", "Start", "Running", "Result"];
const VERBS = { start: ["enrolling"], pause: ["running"], resume: ["paused"], download: ["finished"], cancel: ["enrolling", "running", "paused"], delete: ["finished", "failed", "cancelled"] };
const QUESTIONS = {
  cancel: { title: "Cancel this federation?", text: "It ends for good. Its rounds so far, their prompts and metrics stay.", keep: "Keep it", act: "Cancel it for good" },
  delete: { title: "Delete this federation?", text: "Its states, updates, reports and tokens are gone for good; the audit log keeps that it was. Clients that still take part are refused.", keep: "Keep it", act: "Delete it for good" },
};
const REASONS = { quorum_missed: "Too few clients answered, twice. Resume asks those who failed once more and allows one more extension." };

export class Status {
  /** `steer(verb)` and `download()` do what the buttons say. */
  constructor({ steer, download, failed }) {
    Object.assign(this, { steer, download, view: null });
    this.heading = h("h1", { tabindex: "-1" });
    this.badge = h("span");
    this.what = h("p", { class: "what" });
    this.steps = h("ol", { class: "steps", "aria-label": "From invitations to the result" });
    this.reason = h("p", { class: "reason", hidden: true });
    this.why = h("p", { class: "remark", id: "why", hidden: true });
    this.buttons = Object.fromEntries(Object.keys(VERBS).map((verb) => [verb, this.#button(verb)]));
    this.links = { onward: h("a", { class: "button" }, "Continue from it"), again: h("a", { class: "button" }, "New with these settings"), compare: h("a", { class: "button" }, "Compare") };
    const { cancel, delete: remove, ...forward } = this.buttons;
    this.acts = new Acts(failed, Object.values(forward), this.links.again, this.links.onward, this.links.compare, cancel, remove);
    this.acts.element.append(this.why);
    this.acts.row.setAttribute("role", "group");
    this.acts.row.setAttribute("aria-label", "Steer this federation");
    const back = h("p", { class: "back" }, h("a", { href: "#/" }, "← All federations"));
    this.element = h("section", { class: "panel status", "aria-label": "Where it stands" }, back, h("div", { class: "title" }, h("div", {}, h("div", { class: "row" }, this.heading, this.badge), this.what), this.acts.element), this.reason, this.steps);
  }

  update({ view }) {
    const moved = this.view?.state !== view.state;
    this.view = view;
    say(this.heading, view.name);
    if (moved) fill(this.badge, badge(view.state));
    const { trainers, evaluators } = view.clients;
    const who = [counted(trainers, "trainer"), evaluators ? counted(evaluators, "evaluator") : ""].filter(Boolean).map((text) => text.replace(" ", "\u00a0"));
    say(this.what, [view.spec.method.name, view.spec.backbone.model, ...who].join(" · "));
    const told = view.reason && (REASONS[view.reason] ?? view.reason);
    this.reason.hidden = !told;
    say(this.reason, told);
    const missing = hindrance(view);
    this.why.hidden = missing === null;
    say(this.why, missing);
    const at = view.state === "enrolling" ? (missing === null ? 1 : 0) : ENDED.includes(view.state) ? 3 : 2;
    const last = view.state === "failed" || view.state === "cancelled" ? badge(view.state).textContent : STEPS[3];
    fill(this.steps, [...STEPS.slice(0, 3), last].map((title, place) => h("li", { "aria-current": place === at ? "step" : null, class: place < at ? "done" : null }, title[0].toUpperCase() + title.slice(1))));
    this.#showButtons(missing);
  }

  #button(verb) {
    const act = () => (verb in QUESTIONS ? this.#ask(verb) : this.#act(verb));
    const title = verb === "download" ? "Download the result" : verb[0].toUpperCase() + verb.slice(1);
    return h("button", { type: "button", class: verb in QUESTIONS ? "danger" : "primary", hidden: true, "data-open": verb === "download", on: { click: act } }, title); // until the state is known
  }

  async #act(verb) {
    this.buttons[verb].disabled = true;
    await this.acts.run(() => (verb === "download" ? this.download() : this.steer(verb)));
    this.#showButtons(hindrance(this.view));
    // The button that was pressed may be gone: the keyboard goes on at what can be done next.
    if (document.activeElement === document.body) (Object.values(this.buttons).find((one) => !one.hidden && !one.disabled) ?? this.heading).focus();
  }

  async #ask(verb) {
    if (await ask(this.element, QUESTIONS[verb])) await this.#act(verb);
    else announce(verb === "cancel" ? "Not cancelled" : "Not deleted");
  }

  #showButtons(missing) {
    const { state, id, state_hash: hash } = this.view;
    for (const [verb, button] of Object.entries(this.buttons)) {
      button.hidden = !VERBS[verb].includes(state) || (verb === "download" && hash === null);
      button.disabled = button.hidden || (verb === "start" && missing !== null);
    }
    this.buttons.start.setAttribute("aria-describedby", "why");
    const links = { onward: [state === "finished" && hash !== null, `#/continue/${id}`], again: [ENDED.includes(state), `#/new/${id}`], compare: [ENDED.includes(state), `#/compare/${id}`] };
    this.links.again.classList.toggle("primary", state === "cancelled" || state === "failed");
    for (const [name, [there, address]] of Object.entries(links)) {
      this.links[name].hidden = !there;
      this.links[name].setAttribute("href", address);
    }
  }
}

/** Why it cannot start yet, in words; null where it can, or has. */
function hindrance(view) {
  if (view.state !== "enrolling") return null;
  const there = evaluates(view) ? view.clients.trainers + view.clients.evaluators : view.clients.trainers;
  const needed = view.spec.participation.min_clients;
  if (there < needed) return `It can start once ${counted(needed, "site")} ${evaluates(view) || needed === 1 ? "" : "that train "}${needed === 1 ? "has" : "have"} joined; ${there || "none"} ${there === 1 ? "has" : "have"} so far.`;
  return view.class_differences ? `It cannot start: ${view.class_differences}. Those sites have to give their classes the same names.` : null;
}

/** What runs: the round, whom it waits for and since when they are silent, and how accurate it is. */
export class Running {
  constructor() {
    this.figures = h("dl", { class: "figures" });
    this.rounds = h("progress", { class: "rounds", "aria-label": "rounds completed" });
    this.phase = h("p", { class: "phase" });
    this.left = h("span", { class: "left remark" });
    this.roll = h("ul", { class: "roll", tabindex: "0", "aria-label": "Clients asked" });
    this.element = h("section", { class: "panel", "aria-label": "Progress" }, this.figures, this.rounds, h("div", { class: "between" }, this.phase, this.left), this.roll);
  }

  update({ view, clients, rounds }) {
    this.view = view;
    this.element.hidden = ["enrolling", "finished"].includes(view.state) || (ENDED.includes(view.state) && view.round === 0 && view.spec.rounds > 0);
    const reports = [...rounds.values()];
    this.#showFigures(reports);
    this.rounds.hidden = evaluates(view);
    this.rounds.max = Math.max(1, view.spec.rounds);
    this.rounds.value = view.state === "finished" ? view.spec.rounds : Math.max(0, view.round - (view.stage?.kind === "evaluate" ? 0 : 1));
    say(this.phase, sentence(view));
    this.#showRoll(new Map(clients.map((one) => [one.name, one.last_seen])));
    this.tick();
  }

  /** Once a second: what is left of the deadline. */
  tick() {
    const stage = this.view?.stage;
    if (!stage || stage.seconds_left === null || !stage.deadline) return say(this.left, "");
    const left = (Date.parse(stage.deadline) - Date.now()) / 1000;
    return say(this.left, left > 0 ? `awaited until ${clock(stage.deadline)}${stage.extended ? " (extended once)" : ""}, ${duration(left)} left` : "deadline reached");
  }

  #showFigures(reports) {
    const { view } = this;
    const last = reports.filter((one) => one.evaluation && Object.keys(one.evaluation.mean).length).at(-1);
    const mean = (role) => {
      const found = last?.evaluation.mean[role];
      return found && [percent(found.accuracy), [found.zero_shot === undefined ? null : `${gain(found.zero_shot, found.accuracy)} against zero-shot`, images(last, role)].filter(Boolean).join("; ")];
    };
    const left = secondsLeft(view, reports);
    const shown = [
      ["Round", evaluates(view) ? null : [`${view.round} of ${view.spec.rounds}`]],
      ["Left, about", left === null ? null : [duration(left)]],
      ["Best round", view.selection && [String(view.selection.round), `of ${view.selection.compared}, ${percent(view.selection.value)} on held-out images`]],
      [`Clients' ${measure(view.spec.task).toLowerCase()}`, mean("trainer")],
      ["Unseen domains", mean("evaluator")],
      ["Sent", sent(reports)],
    ];
    fill(this.figures, shown.filter(([, told]) => told).map(shownFigure));
  }

  #showRoll(seen) {
    const { view } = this;
    const waiting = new Map(view.awaited.map((one) => [one.name, one.progress]));
    const since = (name) => (seen.get(name) ? `, seen ${ago(seen.get(name))}` : "");
    const marked = (name) => {
      if (view.answered.includes(name)) return ["answered", "✓", "answered"];
      if (view.failed.includes(name)) return ["failed", "✕", "failed"];
      if (!waiting.has(name)) return ["gone", "–", "no longer awaited"];
      return ["awaited", "…", `awaited${waiting.get(name) == null ? "" : `, ${Math.round(100 * waiting.get(name))} % done`}${since(name)}`];
    };
    const order = ["awaited", "failed", "answered", "gone"];
    const asked = (ENDED.includes(view.state) ? [] : view.asked).map((name) => [name, ...marked(name)]);
    asked.sort(([, one], [, other]) => order.indexOf(one) - order.indexOf(other));
    this.roll.hidden = asked.length === 0;
    fill(this.roll, asked.map(([name, state, mark, text]) => h("li", { "data-state": state }, h("span", { "aria-hidden": "true" }, mark), h("b", {}, name), h("small", {}, text))));
  }
}

/** On how many test images a role's mean accuracy stands, and its interval, which takes one label an image and no noise. */
function images(report, role) {
  const own = Object.values(report.evaluation.clients).filter((one) => one.role === role && one.splits.test);
  const total = own.reduce((sum, one) => sum + one.splits.test.num_samples, 0);
  if (!total) return null;
  const bounds = report.evaluation.bounds?.[role]?.test;
  return `${counted(total, "test image")}${bounds ? `, 95 %: ${edges(bounds)}` : ""}`;
}

/** `[name, [value, remark]]` as it stands among figures. */
export function shownFigure([name, [value, remark]]) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value, remark ? h("small", {}, remark) : null));
}

/** What has travelled, and what has not. */
export function sent(reports) {
  const [up, down] = ["bytes_up", "bytes_down"].map((key) => bytes(reports.reduce((total, one) => total + one[key], 0)));
  return [`${up} up`, `${down} down, and not one image`];
}

function sentence(view) {
  const { stage, state } = view;
  if (ENDED.includes(state)) return `${state[0].toUpperCase()}${state.slice(1)}${evaluates(view) ? "" : ` after round ${view.round}`}`;
  if (!stage) return state === "paused" ? "Paused" : `Round ${view.round}: opening`;
  const phase = stage.kind === "evaluate" ? "evaluation" : stage.phase;
  if (stage.closing) return `Round ${stage.round}, ${phase}: aggregating`;
  return `Round ${stage.round}, ${phase}: ${view.answered.length} of ${view.asked.length} answered${state === "paused" ? " (paused)" : ""}`;
}

/** Whether sites evaluate an export, and nobody trains. */
function evaluates(view) {
  return view.spec.rounds === 0;
}
