// Where a federation stands, what it waits for and until when; and what an operator can do with the whole of it.

import { ask } from "./dialog.js";
import { announce, fill, h, say } from "./dom.js";
import { bytes, clock, counted, duration, gain, measure, percent } from "./format.js";
import { badge } from "./list.js";
import { secondsLeft } from "./times.js";

const ALL = ["enrolling", "running", "paused", "finished", "failed", "cancelled"];
const VERBS = { start: ["enrolling"], pause: ["running"], resume: ["paused"], cancel: ["enrolling", "running", "paused"], delete: ALL };
const QUESTIONS = {
  cancel: { title: "Cancel this federation?", text: "It ends for good. Its rounds so far, their prompts and metrics stay.", keep: "Keep it", act: "Cancel it for good" },
  delete: { title: "Delete this federation?", text: "Its states, updates, reports and tokens are gone for good; the audit log keeps that it was. Clients that still take part are refused.", keep: "Keep it", act: "Delete it for good" },
};
const REASONS = {
  quorum_missed: "Too few clients answered, twice. Resume asks those who failed once more and allows one more extension.",
};

export class Status {
  constructor(steer) {
    this.steer = steer;
    this.view = null;
    this.heading = h("h1", { tabindex: "-1" });
    this.badge = h("span");
    this.what = h("p", { class: "what" });
    this.reason = h("p", { class: "reason", hidden: true });
    this.buttons = Object.fromEntries(Object.keys(VERBS).map((verb) => [verb, this.#button(verb)]));
    this.compare = h("a", { class: "button", hidden: true }, "Compare");
    this.figures = h("dl", { class: "figures" });
    this.rounds = h("progress", { class: "rounds", "aria-label": "rounds completed" });
    this.phase = h("p", { class: "phase" });
    this.left = h("span", { class: "left" });
    this.roll = h("ul", { class: "roll", tabindex: "0", "aria-label": "Clients asked" });
    this.element = h(
      "section",
      { class: "panel status", "aria-label": "Where it stands" },
      h("p", { class: "back" }, h("a", { href: "#/" }, "← All federations")),
      h(
        "div",
        { class: "title" },
        h("div", {}, h("div", { class: "named" }, this.heading, this.badge), this.what),
        h("div", { class: "steer", role: "group", "aria-label": "Steer this federation" }, Object.values(this.buttons), this.compare),
      ),
      this.reason,
      this.figures,
      this.rounds,
      h("div", { class: "now" }, h("p", { class: "phase-line" }, this.phase, this.left), this.roll),
    );
  }

  update({ view, rounds }) {
    const moved = this.view?.state !== view.state;
    this.view = view;
    say(this.heading, view.name);
    if (moved) fill(this.badge, badge(view.state));
    say(this.what, [view.spec.method.name, view.spec.backbone.model, counted(view.clients.trainers, "trainer"), counted(view.clients.evaluators, "evaluator")].join(" · "));
    const told = view.reason && (REASONS[view.reason] ?? view.reason);
    this.reason.hidden = !told;
    say(this.reason, told);
    this.#showButtons();
    this.compare.hidden = false;
    this.compare.setAttribute("href", `#/compare/${view.id}`);
    this.reports = [...rounds.values()];
    this.#showFigures(this.reports);
    this.rounds.hidden = evaluates(view);
    this.rounds.max = Math.max(1, view.spec.rounds);
    this.rounds.value = completed(view);
    this.#showNow();
  }

  /** Once a second: what is left of the deadline. */
  tick() {
    const stage = this.view?.stage;
    if (!stage || stage.seconds_left === null || !stage.deadline) {
      say(this.left, "");
      return;
    }
    const left = (Date.parse(stage.deadline) - Date.now()) / 1000;
    const until = `awaited until ${clock(stage.deadline)}${stage.extended ? " (extended once)" : ""}`;
    say(this.left, left > 0 ? `${until}, ${duration(left)} left` : "deadline reached");
  }

  #button(verb) {
    const act = () => (verb in QUESTIONS ? this.#ask(verb) : this.#act(verb));
    const title = verb[0].toUpperCase() + verb.slice(1);
    const kind = verb in QUESTIONS ? "danger" : "primary";
    return h("button", { type: "button", class: kind, hidden: true, on: { click: act } }, title); // until the state is known
  }

  async #act(verb) {
    this.buttons[verb].disabled = true;
    await this.steer(verb);
    this.#showButtons();
    // The button that was pressed may be gone: the keyboard goes on at what can be done next.
    if (document.activeElement === document.body) (this.#possible()[0] ?? this.heading).focus();
  }

  async #ask(verb) {
    if (await ask(this.element, QUESTIONS[verb])) await this.#act(verb);
    else announce(verb === "cancel" ? "Not cancelled" : "Not deleted");
  }

  #possible() {
    return Object.keys(VERBS).filter((verb) => VERBS[verb].includes(this.view.state)).map((verb) => this.buttons[verb]);
  }

  #showButtons() {
    const possible = this.#possible();
    for (const button of Object.values(this.buttons)) {
      button.hidden = !possible.includes(button);
      button.disabled = button.hidden;
    }
    const { clients, spec, state } = this.view;
    const [there, who] = evaluates(this.view) ? [clients.trainers + clients.evaluators, "client"] : [clients.trainers, "trainer"];
    const short = state === "enrolling" && there < spec.participation.min_clients;
    this.buttons.start.title = short ? `${counted(spec.participation.min_clients, who)} needed` : "";
  }

  #showFigures(rounds) {
    const { view } = this;
    const up = rounds.reduce((sum, one) => sum + one.bytes_up, 0);
    const down = rounds.reduce((sum, one) => sum + one.bytes_down, 0);
    const evaluated = rounds.filter((one) => one.evaluation && Object.keys(one.evaluation.mean).length).at(-1);
    const mean = evaluated?.evaluation.mean ?? {};
    const shown = [
      ["Round", `${view.round} of ${view.spec.rounds}`, null],
      [`Clients' ${measure(view.spec.task).toLowerCase()}`, percent(mean.trainer?.accuracy), againstZeroShot(mean.trainer)],
      ["Unseen domains", percent(mean.evaluator?.accuracy), againstZeroShot(mean.evaluator)],
      ["Sent up", bytes(up), "and not one image"],
      ["Taken down", bytes(down), null],
    ];
    // What a round costs beside the accuracy that it buys: the last one that has trained.
    const last = rounds.filter((one) => one.bytes_up > 0).at(-1);
    if (last) shown.push(["A round costs", bytes(last.bytes_up + last.bytes_down), `round ${last.round}: ${bytes(last.bytes_up)} up, ${bytes(last.bytes_down)} down`]);
    if (view.selection) shown.splice(1, 0, ["Best round", String(view.selection.round), `of ${view.selection.compared}, ${percent(view.selection.value)} on held-out images`]);
    if (evaluates(view)) shown.splice(0, 3);
    const left = secondsLeft(view, rounds);
    if (left !== null) shown.splice(1, 0, ["Left, about", duration(left), null]);
    fill(this.figures, shown.map(([name, value, remark]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, remark ? h("small", {}, remark) : null))));
  }

  #showNow() {
    const { view } = this;
    say(this.phase, sentence(view));
    this.tick();
    const waiting = new Map(view.awaited.map((one) => [one.name, one.progress]));
    const marked = (name) => {
      if (view.answered.includes(name)) return ["answered", "✓", "answered"];
      if (view.failed.includes(name)) return ["failed", "✕", "failed"];
      if (waiting.has(name)) return ["awaited", "…", waiting.get(name) == null ? "awaited" : `awaited, ${Math.round(100 * waiting.get(name))} % done`];
      return ["gone", "–", "no longer awaited"];
    };
    const over = ["finished", "failed", "cancelled"].includes(view.state);
    const order = ["awaited", "failed", "answered", "gone"];
    const asked = (over ? [] : view.asked).map((name) => [name, ...marked(name)]);
    asked.sort(([, one], [, other]) => order.indexOf(one) - order.indexOf(other));
    this.roll.hidden = asked.length === 0;
    fill(
      this.roll,
      asked.map(([name, state, mark, text]) => h("li", { "data-state": state }, h("span", { "aria-hidden": "true" }, mark), h("b", {}, name), h("small", {}, text))),
    );
  }
}

function completed(view) {
  if (view.state === "finished") return view.spec.rounds;
  return Math.max(0, view.round - (view.stage?.kind === "evaluate" ? 0 : 1));
}

function againstZeroShot(mean) {
  return mean?.zero_shot === undefined ? null : `${gain(mean.zero_shot, mean.accuracy)} against zero-shot`;
}

function sentence(view) {
  const { stage, state, spec } = view;
  if (state === "enrolling") {
    const needed = spec.participation.min_clients;
    const more = Math.max(0, needed - view.clients.trainers);
    return more ? `Enrolling: ${counted(more, "more trainer")} needed before the start` : "Enrolling: ready to start";
  }
  if (["finished", "failed", "cancelled"].includes(state)) return `${state[0].toUpperCase()}${state.slice(1)}${evaluates(view) ? "" : ` after round ${view.round}`}`;
  if (!stage) return state === "paused" ? "Paused" : `Round ${view.round}: opening`;
  const phase = stage.kind === "evaluate" ? "evaluation" : stage.phase;
  if (stage.closing) return `Round ${stage.round}, ${phase}: aggregating`;
  const answered = `${view.answered.length} of ${view.asked.length} answered`;
  return `Round ${stage.round}, ${phase}: ${answered}${state === "paused" ? " (paused)" : ""}`;
}

/** Whether sites evaluate an export, and nobody trains. */
function evaluates(view) {
  return view.spec.rounds === 0;
}
