// Rounds in which clients are not all asked alike: who was chosen and why, and the arrivals of asynchronous rounds.

import { Plot } from "./charts.js";
import { fill, h, panel, table } from "./dom.js";
import { clock, figure } from "./format.js";
import { mean } from "./series.js";

const RECENT = 5; // rounds whose clients are shown
const FACTORS = {
  polynomial: "1/√(1 + τ)",
  constant: "1, whatever τ is",
  hinge: "1 up to τ = 4, and 1/(1 + 10·(τ − 4)) beyond",
};
const number = (title) => ({ title, class: "number" });

/** The clients that each round has chosen, with the recorded reasons. */
export class Choices {
  constructor() {
    this.rounds = h("div");
    this.element = panel("Who was chosen, and why", { hidden: true }, this.rounds);
  }

  update({ rounds }) {
    const chosen = [...rounds.values()].flatMap((one) => one.phases.filter((phase) => Object.keys(phase.choice ?? {}).length).map((phase) => [one.round, phase]));
    this.element.hidden = chosen.length === 0;
    fill(this.rounds, chosen.slice(-RECENT).reverse().map(([round, phase]) => [h("h3", {}, `Round ${round}, ${phase.phase}`), choiceTable(round, phase)]));
  }
}

function choiceTable(round, phase) {
  const rows = Object.entries(phase.choice).map(([name, reason]) => [name, reason, outcome(name, phase)]);
  return table(`Clients of round ${round}, ${phase.phase}`, ["client", "chosen because", "outcome"], rows);
}

function outcome(name, phase) {
  if (phase.counted.some((one) => one.client === name)) return "counted";
  if (phase.failed.some((one) => one.client === name)) return "failed";
  if (phase.withdrawn.includes(name)) return "withdrawn";
  if (phase.answered.includes(name)) return "answered";
  return phase.expired.includes(name) ? "no answer in time" : "no answer yet";
}

/** The changes that made each state of an asynchronous federation. */
export class Arrivals {
  constructor() {
    this.plot = new Plot("line", "Staleness by state", { x: "state", format: (value) => figure(value, 1), zero: true });
    this.states = h("div");
    this.empty = h("p", { class: "empty" }, "No change has arrived yet.");
    this.remark = h("p", { class: "remark" });
    this.element = panel("Arrivals", { hidden: true }, this.empty, this.plot.element, this.remark, this.states);
  }

  update({ view, rounds }) {
    const { schedule } = view.spec;
    this.element.hidden = !schedule;
    if (!schedule) return;
    const phases = [...rounds.values()].flatMap((one) => one.phases.filter((phase) => phase.updates.length).map((phase) => [one.round, phase.updates]));
    this.empty.hidden = phases.length > 0;
    this.plot.element.hidden = this.remark.hidden = phases.length === 0;
    fill(this.remark, `Staleness τ: the states that were made while a client trained. Its change counts with its weight times ${FACTORS[schedule.staleness ?? "polynomial"]}.`);
    fill(this.states, phases.slice(-RECENT).reverse().map(([round, updates]) => [h("h3", {}, `State ${round}`), arrivalTable(round, updates)]));
    if (!phases.length) return;
    const over = (combine) => phases.map(([x, updates]) => ({ x, y: combine(updates.map((one) => one.staleness)) }));
    const [round, updates] = phases.at(-1);
    const series = [
      { label: "mean", place: 0, data: over(mean) },
      { label: "highest", place: 2, data: over((values) => Math.max(...values)) },
    ];
    this.plot.update(series, `Staleness by state; of state ${round} the mean is ${figure(mean(updates.map((one) => one.staleness)), 1)}`);
  }

  end() {
    this.plot.destroy();
  }
}

function arrivalTable(round, updates) {
  const arrived = [...updates].sort((one, other) => Date.parse(one.received_at) - Date.parse(other.received_at));
  const rows = arrived.map((one) => [one.client, String(round - 1 - one.staleness), String(one.staleness), one.weight === null ? "–" : figure(one.weight, 3), clock(one.received_at)]);
  return table(`Changes of state ${round}`, ["client", number("trained from state"), number("staleness"), number("weight"), "arrived"], rows);
}
