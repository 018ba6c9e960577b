// What clients measured while they trained, by round: the loss first, and every other number that a method sends.

import { Plot } from "./charts.js";
import { fill, h, offer, panel } from "./dom.js";
import { counted, figure } from "./format.js";
import { drawn, MANY, mean } from "./series.js";
import { HIDDEN } from "./privacy.js";

const OF_TIMES = ["train_seconds", "trained_parameters"];

export class Losses {
  constructor() {
    this.plot = new Plot("line", "Training loss by round", { x: "round", format: (value) => figure(value, 3) });
    this.select = h("select", { id: "measured", on: { change: () => this.#draw() } });
    this.choice = h("p", { class: "choice", hidden: true }, h("label", { for: "measured" }, "Number "), this.select);
    this.remark = h("p", { class: "remark" });
    this.hidden = h("p", { class: "remark" }, HIDDEN);
    this.element = panel("Training", {}, this.choice, this.hidden, this.plot.element, this.remark);
  }

  update(model) {
    this.model = model;
    this.found = measured([...model.rounds.values()]);
    const names = [...this.found.keys()].sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
    offer(this.select, names);
    this.choice.hidden = names.length < 2;
    this.#draw();
  }

  #draw() {
    const clients = [...(this.found.get(this.select.value)?.values() ?? [])];
    const there = clients.length > 0;
    this.hidden.hidden = there || !this.model.view.spec.secure_aggregation;
    this.element.hidden = !there && this.hidden.hidden;
    this.plot.element.hidden = this.remark.hidden = !there;
    if (!there) return;
    const name = this.select.value;
    const series = drawn(clients, this.model.places).filter((one) => one.data.length);
    const last = Math.max(...clients.map((one) => one.points.at(-1).x));
    const now = mean(clients.map((one) => one.points.at(-1)).filter((point) => point.x === last).map((point) => point.y));
    this.plot.update(series, `Training ${name} by round; in round ${last} the clients' mean is ${figure(now, 3)}`);
    const several = clients.length > MANY ? `Mean, lowest and highest of ${counted(clients.length, "client")}` : "Each client's own";
    fill(this.remark, `${several}, over its training images, at the end of its local training. Mean in round ${last}: ${figure(now, 3)}.`);
  }
}

/** Numbers by name (with the phase, where two phases send it), each a map from client to its series. */
function measured(reports) {
  const phases = new Map();
  for (const report of reports) for (const phase of report.phases) for (const one of phase.updates) for (const name of Object.keys(one.metrics)) phases.set(name, (phases.get(name) ?? new Set()).add(phase.phase));
  const found = new Map();
  for (const report of reports) {
    for (const phase of report.phases) {
      for (const one of phase.updates) {
        for (const [name, y] of Object.entries(one.metrics)) {
          if (OF_TIMES.includes(name) || !Number.isFinite(y)) continue;
          const label = phases.get(name).size > 1 ? `${name} (${phase.phase})` : name;
          if (!found.has(label)) found.set(label, new Map());
          const clients = found.get(label);
          if (!clients.has(one.client)) clients.set(one.client, { name: one.client, label: one.client, role: "trainer", points: [], zero: [] });
          clients.get(one.client).points.push({ x: report.round, y });
        }
      }
    }
  }
  return found;
}

function rank(name) {
  return name.startsWith("loss") ? 0 : name.includes("loss") ? 1 : 2;
}
