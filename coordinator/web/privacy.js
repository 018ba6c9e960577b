// Privacy: what differential privacy has cost each client, secure sums, and what is not known because of them.

import { Plot } from "./charts.js";
import { fill, h, panel, table } from "./dom.js";
import { counted, figure } from "./format.js";

const SERIES = 8;
const RECENT = 5; // rounds whose sums are shown
export const HIDDEN = "Clients mask their changes, and only the sum is known. Norms, directions and verdicts of single clients are unknown, and clients send no number that they measured in training.";
const LEVELS = { sample: "Each client trains with differential privacy; ε is what this federation has cost it, by the noise and the numbers of records that it has declared. What its ledger holds, over all its federations, is its own word.", client: "Whole clients are protected by noise in the mean; ε is the federation's, which this coordinator computes itself." };

export class Privacy {
  constructor() {
    this.plot = new Plot("line", "ε of the clients by release", { x: "release", format: (value) => figure(value, 2), zero: true });
    this.facts = h("p");
    this.clients = h("div");
    this.warnings = h("ul", { class: "error" });
    this.element = panel("Privacy", { hidden: true }, this.facts, this.warnings, this.plot.element, this.clients, h("p", { class: "remark" }, "ε covers the tensors, not numbers of images, class names, who took part and when, what many records share, or one person at two sites. It compares data sets of which one unit contributes nothing (zero-out); if a unit is replaced by another (replace-one), ε is larger."));
  }

  update({ privacy, places, view }) {
    this.element.hidden = !privacy;
    if (!privacy) return;
    fill(this.facts, [`${LEVELS[privacy.level]} ${asked(view.spec.privacy, privacy)}`, view.privacy && central(view.privacy)].filter(Boolean).join(" "));
    fill(this.warnings, [...privacy.warnings, ...Object.entries(privacy.failures).map(([kind, count]) => `${counted(count, "task")} refused: ${kind}`)].map((one) => h("li", {}, one)));
    this.warnings.hidden = !this.warnings.childElementCount;
    const spending = privacy.clients.filter((one) => one.spent.length);
    this.plot.element.hidden = spending.length === 0;
    if (spending.length) {
      const series = spending.slice(0, SERIES).map((one) => ({ label: one.client, place: places.get(one.client) ?? 0, data: one.spent.map((value, at) => ({ x: at + 1, y: value })) }));
      this.plot.update(series, `ε of the clients by release; now: ${spending.slice(0, SERIES).map((one) => `${one.client} ${figure(one.last.epsilon, 2)}`).join(", ")}`);
    }
    fill(this.clients, privacy.clients.length ? clientTable(privacy.clients) : null);
  }
}

/** What the spec asks for, in words. */
function asked({ level, unit, clip, noise_multiplier: noise, epsilon, delta, evaluation }, { withheld, smallest_sum: sum }) {
  const parts = [`Level ${level}`, level === "sample" && `one ${unit} is protected`, clip !== null && `clip ${clip}`, noise !== null && `noise ${noise} times the clip`, epsilon !== null && `ε of at most ${epsilon}`, delta !== null && `δ = ${delta}`, `accuracies: ${evaluation ?? "withheld"}${withheld ? `, ${counted(withheld, "evaluation")} withheld` : ""}`, sum !== null && `smallest sum: ${counted(sum, "client")}`];
  return `${parts.filter(Boolean).join("; ")}.`;
}

/** Of whole clients: what all states so far have cost, and how long the noise is. */
function central({ epsilon, epsilon_planned: planned, epsilon_planned_replace_one: one, epsilon_planned_if_secret: secret, delta, ratio, after_rounds: all, sampling, budget_rounds: end }) {
  const parts = [`So far ε = ${figure(epsilon, 2)} of ${figure(planned, 2)} planned, at δ = ${delta}`, `all rounds for replace-one neighbours: ε = ${figure(one, 2)}`, `${sampling} sampling`, secret !== null && `all rounds against those who learn nothing of who took part: ε = ${figure(secret, 2)}`, ratio !== null && `the noise is r = ${figure(ratio, 2)} times as long as the longest mean change, over all rounds ρ = ${figure(all, 2)}`, end !== null && `the budget ends it after round ${end}`];
  return `${parts.filter(Boolean).join("; ")}.`;
}

function clientTable(clients) {
  const number = (title) => ({ title, class: "number" });
  const shown = (value, digits = 2) => (value === null || value === undefined ? "–" : figure(value, digits));
  const rows = clients.map((one) => [one.client, shown(one.last?.epsilon), shown(one.last?.epsilon_replace_one), shown(one.last?.ledger_epsilon), shown(one.planned?.epsilon_planned), String(one.spent.length), shown((one.last ?? one.planned)?.noise_multiplier), (one.last ?? one.planned)?.delta ?? "–", one.last?.noise === "seeded" ? h("strong", {}, "seeded: no guarantee") : (one.last?.noise ?? "–")]);
  return table("What clients have spent", ["client", number("ε spent here"), number("replace-one"), number("ε of its ledger"), number("ε planned"), number("releases"), number("noise z"), number("δ"), "noise"], rows);
}

export class Sums {
  constructor() {
    this.sums = h("div");
    this.element = panel("Secure aggregation", { hidden: true }, this.sums, h("p", { class: "remark" }, HIDDEN));
  }

  update({ view, rounds }) {
    this.element.hidden = !view.spec.secure_aggregation;
    if (this.element.hidden) return;
    const attempts = [...rounds.values()].slice(-RECENT).flatMap((one) => one.phases.filter((phase) => phase.secure).map((phase) => [one.round, phase])).reverse();
    const least = view.spec.secure_aggregation.minimum;
    fill(this.sums, attempts.map(([round, phase]) => [h("h3", {}, `Round ${round}, ${phase.phase}`), h("p", {}, told(phase, least))]));
  }
}

/** The result of an attempt, in words. */
function told({ secure }, least) {
  if (secure.sum_clients === null) return `Attempt ${secure.attempt}: no sum yet; one of at least ${counted(least, "client")} is opened.`;
  return `Attempt ${secure.attempt}: the sum of ${counted(secure.sum_clients, "client")}, weight ${secure.sum_weight.toLocaleString("en")}; the mean change has the norm ${figure(secure.mean_norm, 3)}.`;
}
