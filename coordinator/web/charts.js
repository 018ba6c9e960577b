// Charts by Chart.js, in the page's own colours, light or dark; each has its legend as buttons that keyboards reach.

import { fill, h } from "./dom.js";

const SHAPES = ["circle", "rect", "triangle", "rectRot", "star", "crossRot", "cross", "rectRounded"];
const MANY = SHAPES.length;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const still = window.matchMedia("(prefers-reduced-motion: reduce)");
const all = new Set();

dark.addEventListener("change", () => {
  for (const one of all) one.recolour();
});

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** What leaves the page takes its charts with it. */
export function destroyAll() {
  for (const one of all) one.chart.destroy();
  all.clear();
}

/**
 * A chart of series `{label, place, data: [{x, y}], dashed, thin, hidden}`; `place` chooses colour and marker, so that
 * one client has the same ones in every chart.
 */
export class Plot {
  constructor(kind, label, options = {}) {
    Object.assign(this, { kind, options, series: [], off: new Set(), chart: null });
    this.canvas = h("canvas", { role: "img", "aria-label": label });
    this.legend = h("ul", { class: "legend", "aria-label": `Series of: ${label}` });
    this.element = h("div", { class: "plot" }, h("div", { class: `canvas ${options.class ?? ""}` }, this.canvas), this.legend);
  }

  /** Draw these series; whatever was switched off stays off. */
  update(series, described = "") {
    this.series = series;
    if (described) this.canvas.setAttribute("aria-label", described);
    if (this.chart === null) {
      if (!this.canvas.isConnected) {
        queueMicrotask(() => this.canvas.isConnected && this.chart === null && this.update(this.series));
        return;
      }
      this.chart = new window.Chart(this.canvas, this.#configuration());
      all.add(this);
    }
    this.chart.data.datasets = series.map((one) => this.#dataset(one));
    this.chart.update(still.matches ? "none" : undefined);
    this.#showLegend();
  }

  recolour() {
    Object.assign(this.chart.options, this.#configuration().options);
    this.update(this.series);
  }

  #dataset(one) {
    const ink = variable(`--series-${(one.place % MANY) + 1}`);
    const bar = this.kind === "bar";
    return {
      label: one.label,
      data: one.data,
      hidden: this.off.has(one.label),
      borderColor: ink,
      ...(bar ? { backgroundColor: ink, borderWidth: 0, borderRadius: 2, maxBarThickness: 28, stack: "all" } : { backgroundColor: variable("--surface"), borderWidth: one.thin ? 1.25 : 2 }),
      borderDash: one.thin ? [2, 3] : one.dashed ? [7, 4] : [],
      pointStyle: SHAPES[one.place % MANY],
      pointRadius: one.thin || one.data.length > 30 ? 0 : 3,
      pointHoverRadius: one.thin ? 0 : 6,
      pointBorderWidth: 1.75,
      pointBackgroundColor: variable("--surface"),
    };
  }

  #configuration() {
    const [ink, bar] = [variable("--muted"), this.kind === "bar"];
    const { x, format, tick = format, zero = false } = this.options;
    const ticks = { color: ink, padding: 8, font: { size: 11 }, maxRotation: 0, autoSkipPadding: 18 };
    const axis = { border: { display: false }, stacked: bar };
    const round = (value) => (Number.isInteger(value) && value >= 0 ? value : ""); // the axis of one round begins before it
    const scales = {
      x: { ...axis, type: "linear", offset: bar, title: { display: true, text: x, color: ink, font: { size: 11 } }, grid: { display: false }, ticks: { ...ticks, precision: 0, callback: round } },
      y: { ...axis, beginAtZero: zero, grid: { color: variable("--line"), drawTicks: false }, ticks: { ...ticks, maxTicksLimit: 6, callback: (value, _, all) => tick(value, all.at(-1).value) } },
    };
    const interaction = { mode: "index", intersect: false, axis: "x" };
    const plugins = { legend: { display: false }, tooltip: this.#tooltip(format) };
    return { type: this.kind, data: { datasets: [] }, options: { responsive: true, maintainAspectRatio: false, animation: still.matches ? false : { duration: 250 }, interaction, scales, plugins, font: { family: variable("--font") } } };
  }

  #tooltip(format) {
    const [ink, surface] = [variable("--ink"), variable("--surface")];
    const callbacks = { title: (items) => (items.length ? `${this.options.x} ${items[0].parsed.x}` : ""), label: (item) => ` ${item.dataset.label}: ${format(item.parsed.y)}` };
    return { backgroundColor: ink, titleColor: surface, bodyColor: surface, padding: 10, cornerRadius: 6, usePointStyle: true, filter: (item) => !this.series[item.datasetIndex]?.thin, callbacks };
  }

  #showLegend() {
    const shown = this.series.filter((one) => !one.thin);
    const known = [...this.legend.querySelectorAll("button")].map((button) => button.textContent).join("\n");
    if (known === shown.map((one) => one.label).join("\n")) return;
    fill(this.legend, shown.map((one) => h("li", {}, this.#legendButton(one))));
  }

  #legendButton(one) {
    const kind = `swatch${one.dashed ? " dashed" : ""}${this.kind === "line" ? "" : " dot"}`;
    const mark = h("span", { class: kind, "aria-hidden": "true", style: { "--swatch": `var(--series-${(one.place % MANY) + 1})` } });
    const toggle = (event) => {
      const on = this.off.has(one.label);
      if (on) this.off.delete(one.label);
      else this.off.add(one.label);
      event.currentTarget.setAttribute("aria-pressed", String(on));
      this.update(this.series);
    };
    return h("button", { type: "button", "aria-pressed": String(!this.off.has(one.label)), title: `Show or hide ${one.label}`, on: { click: toggle } }, mark, one.label);
  }
}
