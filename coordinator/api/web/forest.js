// A validation: each site's figures with intervals, and their random-effects means, as a forest plot.

import { announce, fill, h, panel } from "./dom.js";
import { counted, percent } from "./format.js";
import { save } from "./save.js";

const TITLES = { accuracy: "accuracy", auroc: "AUROC", average_precision: "average precision", sensitivity: "sensitivity", specificity: "specificity" };
const EVERYTHING = "accuracy and AUROC of all images";

export class Forest {
  constructor(api, path, tell) {
    this.api = api;
    this.path = path;
    this.tell = tell;
    const button = (title, make) => h("button", { type: "button", on: { click: () => this.#take(make) } }, title);
    this.choice = h("select", { on: { change: () => this.#draw() } });
    this.remark = h("p", { class: "remark" });
    this.plots = h("div", { class: "forest" });
    const files = [button("Figures (CSV)", () => this.#csv()), button("Signed report (JSON)", () => this.#json())];
    this.element = panel("Validation", { hidden: true }, this.remark, h("label", {}, "Show ", this.choice), this.plots, h("div", { class: "buttons" }, files));
  }

  update({ validation, view }) {
    this.element.hidden = !validation;
    if (!validation || this.shown === validation) return;
    [this.shown, this.name] = [validation, view.name];
    const { report } = validation;
    const kept = Object.entries(report.sites).filter(([, figures]) => figures === null).map(([site]) => site);
    const told = counted(Object.keys(report.sites).length - kept.length, "site");
    const silent = kept.length ? ` ${kept.join(", ")} keeps its figures.` : "";
    fill(this.remark, `${told} tested the state ${report.state.slice(0, 19)}…; squares are sites with 95 % intervals, the diamond is their mean, the line where a further site may lie.${silent}`);
    const before = this.choice.value;
    this.groups = new Map([[EVERYTHING, report.figures.filter((one) => one.column === null && ["accuracy", "auroc"].includes(one.figure))]]);
    for (const one of report.figures) {
      const name = [one.column === null ? "all images" : `${one.column} ${one.value}`, one.class_name].filter(Boolean).join(": ");
      this.groups.set(name, [...(this.groups.get(name) ?? []), one]);
    }
    fill(this.choice, [...this.groups.keys()].map((name) => h("option", { value: name }, name)));
    this.choice.value = this.groups.has(before) ? before : EVERYTHING;
    this.#draw();
  }

  #draw() {
    const figures = this.groups.get(this.choice.value) ?? [];
    fill(this.plots, figures.length ? figures.map(plot) : h("p", {}, "No site has told a figure: all have too few images, or none has answered yet."));
  }

  async #take(make) {
    this.tell(null);
    try {
      const [name, blob] = await make();
      save(blob, name);
      announce(`${name} is downloaded`);
    } catch (error) {
      this.tell(error);
    }
  }

  async #csv() {
    const { blob } = await this.api.file(`${this.path}/validation?format=csv`);
    return [`${this.name}.csv`, blob];
  }

  async #json() {
    const { blob } = await this.api.file(`${this.path}/validation`, "application/json"); // as it was signed
    return [`${this.name}.json`, blob];
  }
}

function plot({ figure, class_name: name, sites, pooled }) {
  const title = [TITLES[figure] ?? figure, name].filter(Boolean).join(" of ");
  const rows = Object.entries(sites).map(([site, one]) => row("site", site, one.value, one.low, one.high, null));
  if (pooled) rows.push(row("mean", `mean, I² ${percent(pooled.i2)}`, pooled.mean, pooled.low, pooled.high, pooled.prediction));
  return h("table", {}, h("caption", {}, title), h("tbody", {}, rows));
}

/** A row: its name, a line from `low` to `high` with a mark at `value`, and the numbers. */
function row(kind, name, value, low, high, ahead) {
  const place = { "--low": low, "--high": high, "--value": value, "--from": ahead?.[0] ?? value, "--to": ahead?.[1] ?? value };
  const next = ahead && h("i", { class: "next" });
  const text = `${figureOf(value)} [${figureOf(low)}, ${figureOf(high)}]`;
  const line = h("div", { class: "track", style: place, "aria-hidden": "true" }, next, h("i", { class: "interval" }), h("i", { class: "mark" }));
  return h("tr", { class: kind }, h("th", { scope: "row" }, name), h("td", { class: "line" }, line), h("td", { class: "number" }, text));
}

function figureOf(fraction) {
  return (100 * fraction).toFixed(1);
}
