// Accuracy by round, each client against its zero-shot; many clients are drawn as mean, lowest and highest.

import { Plot } from "./charts.js";
import { fill, h, offer, panel, table } from "./dom.js";
import { counted, edges, gain, margin, measure, percent, percentTick } from "./format.js";
import { drawn, MANY } from "./series.js";

export class Accuracy {
  constructor() {
    this.plot = new Plot("line", "Accuracy by round", { x: "round", format: percent, tick: percentTick });
    this.select = h("select", { id: "split", on: { change: () => this.#draw() } });
    this.choice = h("p", { class: "choice", hidden: true }, h("label", { for: "split" }, "Test set "), this.select);
    this.remark = h("p", { class: "remark" });
    this.table = h("div");
    this.withheld = h("p", { class: "remark" });
    this.chart = h("div", {}, this.plot.element);
    this.element = panel("Accuracy", {}, this.choice, this.withheld, h("div", { class: "beside" }, this.chart, this.table), this.remark);
  }

  update(model) {
    this.model = model;
    this.measure = measure(model.view?.spec.task);
    this.element.querySelector("h2").textContent = this.measure;
    this.evaluated = [...model.rounds.values()].filter((one) => one.evaluation && Object.keys(one.evaluation.clients).length);
    const splits = [...new Set(this.evaluated.flatMap((one) => Object.values(one.evaluation.clients).flatMap((found) => Object.keys(found.splits))))];
    splits.sort((one, other) => (one === "test" ? -1 : other === "test" ? 1 : one.localeCompare(other)));
    offer(this.select, splits, (split) => (split === "test" ? "own test images" : split));
    this.choice.hidden = splits.length < 2;
    this.#draw();
  }

  #draw() {
    const last = Object.values(this.evaluated.at(-1)?.evaluation.clients ?? {});
    const silent = last.filter((one) => one.withheld).length;
    const there = this.evaluated.length > 0 && silent < last.length;
    fill(this.withheld, silent ? `Withheld: ${counted(silent, "site")} keep their accuracies. An evaluator whose policy permits plain accuracies would show the progress.` : null);
    this.withheld.hidden = silent === 0;
    this.element.hidden = !there && !silent;
    this.chart.hidden = this.table.hidden = this.remark.hidden = !there;
    if (!there) return;
    const split = this.select.value;
    const clients = seriesByClient(this.evaluated, split);
    const several = clients.length > MANY;
    const series = drawn(clients, this.model.places);
    this.plot.update(series.filter((one) => one.data.length), `${this.measure} by round on ${split}; the table beside it has the last values`);
    fill(this.remark, several ? `Mean, lowest and highest of ${counted(clients.filter((one) => one.role === "trainer").length, "client")}. Dashed: unseen domains. Dotted: zero-shot.` : "Dotted: zero-shot, which only has the template. Dashed: unseen domains, on which nobody trains.");
    fill(this.table, resultTable(this.evaluated.at(-1), split, this.measure));
  }
}

/** One series a client: `{name, role, domain, points, zero}`. */
function seriesByClient(evaluated, split) {
  const found = new Map();
  for (const report of evaluated) {
    for (const [name, one] of Object.entries(report.evaluation.clients)) {
      if (!one.splits[split]) continue;
      if (!found.has(name)) found.set(name, { name, role: one.role, label: one.role === "evaluator" ? `unseen: ${one.domain ?? name}` : name, points: [], zero: [] });
      found.get(name).points.push({ x: report.round, y: one.splits[split].accuracy });
      const zero = one.zero_shot[split] ?? one.zero_shot[split.split("@")[0]];
      if (zero) found.get(name).zero.push({ x: report.round, y: zero.accuracy });
    }
  }
  return [...found.values()].sort((one, other) => byRole(one, other) || one.name.localeCompare(other.name));
}

function byRole(one, other) {
  return Number(one.role === "evaluator") - Number(other.role === "evaluator");
}

/** A row for each client with its images and the interval of its gain, which takes one label an image and no noise. */
function resultTable(report, split, title) {
  const { evaluation } = report;
  const clients = Object.entries(evaluation.clients).filter(([, one]) => one.splits[split]);
  clients.sort(([a, one], [b, other]) => byRole(one, other) || a.localeCompare(b));
  const base = split.split("@")[0];
  const told = clients.some(([, one]) => one.splits[split].ece !== undefined); // clients of an earlier version tell accuracies alone
  const two = (first, second) => [percent(first), h("small", { class: "under" }, percent(second))];
  const further = (found) => (told ? [two(found.auroc, found.majority), two(found.macro_f1, found.ece)] : []);
  const cells = (name, domain, zero, found, bounds) => [[name, h("small", { class: "under" }, [domain, found.num_samples && counted(found.num_samples, "image")].filter(Boolean).join(" · "))], percent(zero), [percent(found.accuracy), h("small", { class: "under" }, edges(bounds))], [gain(zero, found.accuracy), h("small", { class: "under" }, margin(bounds))], ...further(found)];
  const rows = clients.map(([name, one]) => {
    const zero = (one.zero_shot[split] ?? one.zero_shot[base])?.accuracy;
    return cells(name, one.role === "evaluator" ? `${one.domain ?? ""} (unseen)` : one.domain, zero, one.splits[split], one.bounds?.[split]);
  });
  for (const [role, label] of [["trainer", "mean of clients"], ["evaluator", "mean of unseen"]]) {
    const mean = evaluation.by_split[role]?.[split];
    const zero = mean?.zero_shot ?? evaluation.by_split[role]?.[base]?.zero_shot;
    const own = clients.filter(([, one]) => one.role === role);
    if (mean && own.length > 1) rows.push(cells(label, "", zero, mean, evaluation.bounds?.[role]?.[split]));
  }
  const columns = ["client", ...["zero-shot", `round ${report.round}`, "gain", ...(told ? ["AUROC, majority", "macro-F1, ECE"] : [])].map((title) => ({ title, class: "number" }))];
  return table(`${title} after round ${report.round}`, columns, rows, { class: "results" });
}
