// Rounds in which clients are not all asked alike: who was chosen and why.

import { fill, h, panel, table } from "./dom.js";

const RECENT = 5; // rounds whose clients are shown

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
