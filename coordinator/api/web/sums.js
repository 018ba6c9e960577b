// Secure aggregation: the five steps of each attempt, their result, and what is not known because of it.

import { fill, h, panel, table } from "./dom.js";
import { counted, figure } from "./format.js";

const RECENT = 5; // rounds whose steps are shown
const STEPS = { train: "keys", share: "shares", mask: "masked changes", confirm: "signatures", unmask: "shares revealed" };
export const HIDDEN = "Clients mask their changes, and only the sum is known. Norms, directions and verdicts of single clients are unknown, and clients send no number that they measured in training.";

export class Sums {
  constructor() {
    this.empty = h("p", { class: "empty" }, "No sum has begun yet.");
    this.steps = h("div");
    this.element = panel("Secure aggregation", { hidden: true }, this.empty, this.steps, h("p", { class: "remark" }, HIDDEN));
  }

  update({ view, rounds }) {
    this.element.hidden = !view.spec.secure_aggregation;
    if (this.element.hidden) return;
    const attempts = [...rounds.values()].slice(-RECENT).flatMap((one) => one.phases.filter((phase) => phase.secure).map((phase) => [one.round, phase])).reverse();
    this.empty.hidden = attempts.length > 0;
    const least = view.spec.secure_aggregation.minimum;
    fill(this.steps, attempts.map(([round, phase]) => [h("h3", {}, `Round ${round}, ${phase.phase}`), h("p", {}, told(phase, least)), stepTable(round, phase)]));
  }
}

/** The result of an attempt, in words. */
function told({ secure }, least) {
  if (secure.sum_clients === null) return `Attempt ${secure.attempt}: no sum yet; one of at least ${counted(least, "client")} is opened.`;
  return `Attempt ${secure.attempt}: the sum of ${counted(secure.sum_clients, "client")}, weight ${secure.sum_weight.toLocaleString("en")}; the mean change has the norm ${figure(secure.mean_norm, 3)}.`;
}

function stepTable(round, { phase, secure }) {
  const number = (title) => ({ title, class: "number" });
  const rows = secure.steps.map((one, at) => [`U${at + 1}`, h("span", {}, one.kind, h("small", { class: "under" }, STEPS[one.kind])), String(one.asked), String(one.answered), one.seconds === null ? "–" : `${figure(one.seconds, 1)} s`]);
  return table(`Steps of round ${round}, ${phase}, attempt ${secure.attempt}`, ["", "step", number("asked"), number("answered"), number("took")], rows);
}
