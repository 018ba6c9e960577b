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
    const ink = variable("--muted");
    const grid = variable("--line");
    const { x, format, tick = format, zero = false } = this.options;
    const axis = (text) => ({
      title: { display: text !== "", text, color: ink, font: { size: 11 } },
      grid: { color: grid, drawTicks: false },
      border: { display: false },
      ticks: { color: ink, padding: 8, font: { size: 11 }, maxRotation: 0, autoSkipPadding: 18 },
    });
    const across = axis(x);
    const up = { ...axis(""), beginAtZero: zero, stacked: this.kind === "bar" };
    up.ticks = { ...up.ticks, callback: (value, _, all) => tick(value, all.at(-1).value), maxTicksLimit: 6 };
    across.ticks.callback = (value) => (Number.isInteger(value) && value >= 0 ? value : ""); // the axis of one round begins before it
    if (this.kind === "bar") across.stacked = true;
    return {
      type: this.kind,
      data: { datasets: [] },
      options: {
        responsive: true,
        maintainAspectRatio: false,
        animation: still.matches ? false : { duration: 250 },
        parsing: true,
        interaction: { mode: "index", intersect: false, axis: "x" },
        scales: {
          x: { type: "linear", ...across, ticks: { ...across.ticks, precision: 0 }, grid: { ...across.grid, display: false }, offset: this.kind === "bar" },
          y: up,
        },
        plugins: { legend: { display: false }, tooltip: this.#tooltip(format) },
        font: { family: variable("--font") },
      },
    };
  }

  #tooltip(format) {
    return {
      backgroundColor: variable("--ink"),
      titleColor: variable("--surface"),
      bodyColor: variable("--surface"),
      padding: 10,
      cornerRadius: 6,
      usePointStyle: true,
      filter: (item) => !this.series[item.datasetIndex]?.thin,
      callbacks: {
        title: (items) => (items.length ? `round ${items[0].parsed.x}` : ""),
        label: (item) => ` ${item.dataset.label}: ${format(item.parsed.y)}`,
      },
    };
  }

  #showLegend() {
    const shown = this.series.filter((one) => !one.thin);
    const known = [...this.legend.querySelectorAll("button")].map((button) => button.textContent).join("\n");
    if (known === shown.map((one) => one.label).join("\n")) return;
    fill(this.legend, shown.map((one) => h("li", {}, this.#legendButton(one))));
  }

  #legendButton(one) {
    const mark = h("span", { class: "swatch", "aria-hidden": "true" });
    paint(mark, one, this.kind);
    const toggle = (event) => {
      const on = this.off.has(one.label);
      if (on) this.off.delete(one.label);
      else this.off.add(one.label);
      event.currentTarget.setAttribute("aria-pressed", String(on));
      this.update(this.series);
    };
    const pressed = String(!this.off.has(one.label));
    return h("button", { type: "button", "aria-pressed": pressed, title: `Show or hide ${one.label}`, on: { click: toggle } }, mark, one.label);
  }
}

function paint(mark, one, kind) {
  mark.style.setProperty("--swatch", `var(--series-${(one.place % MANY) + 1})`);
  mark.classList.toggle("dashed", Boolean(one.dashed));
  mark.classList.toggle("dot", kind !== "line");
}
