// Two or more federations side by side: their curves over each other, their figures, and where their settings differ.

import { Plot } from "./charts.js";
import { fill, h, panel, table } from "./dom.js";
import { bytes, counted, duration, figure, gain, margin, measure, percent, percentTick } from "./format.js";
import { badge, progress } from "./list.js";
import { PINNED, resolvedFields, settingsOf } from "./schema.js";
import { elapsed } from "./times.js";
import { nameOf, told } from "./words.js";

export class Compare {
  constructor(api, ids, hooks) {
    Object.assign(this, { api, hooks, chosen: ids, loaded: new Map(), gone: false });
    this.problem = h("p", { class: "error", role: "alert" });
    this.search = h("input", { type: "search", id: "which", autocomplete: "off", on: { input: () => this.#offer() } });
    this.choices = h("ul", { class: "choices-list" });
    this.accuracy = new Plot("line", "Mean accuracy by round", { x: "round", format: percent, tick: percentTick });
    this.loss = new Plot("line", "Mean training loss by round", { x: "round", format: (value) => figure(value, 3) });
    this.figures = h("div");
    this.settings = h("div");
    this.empty = h("p", { class: "remark" }, "Choose two or more federations above.");
    this.results = [
      panel("Accuracy", {}, this.accuracy.element, h("p", { class: "remark" }, "Mean over clients, each counting once. Dashed: unseen domains. Dotted: zero-shot.")),
      panel("Figures", {}, this.figures),
      panel("Training loss", {}, this.loss.element),
      panel("Settings that differ", {}, this.settings),
    ];
    this.heading = h("h1", { tabindex: "-1" }, "Compare federations");
    const choice = [h("p", { class: "choice" }, h("label", { for: "which" }, "Search "), this.search), h("fieldset", {}, h("legend", { class: "unseen" }, "Federations"), this.choices)];
    this.element = h("article", { class: "stack" }, this.problem, h("section", { class: "panel", "aria-label": "Which ones" }, h("p", { class: "back" }, h("a", { href: "#/" }, "← All federations")), this.heading, choice), this.empty, this.results);
  }

  async begin() {
    this.heading.focus();
    try {
      this.all = await this.api.all("/v1/federations", "federations");
      this.#offer();
      await this.#load();
    } catch (error) {
      this.#tell(error);
    }
  }

  end() {
    this.gone = true;
  }

  #tell(error) {
    if (!this.gone && !this.hooks.failed(error)) fill(this.problem, error.message);
  }

  #offer() {
    const wanted = this.search.value.trim().toLowerCase();
    const shown = [...this.all].reverse().filter((one) => `${one.name} ${one.spec.method.name} ${one.state}`.toLowerCase().includes(wanted));
    const item = (one) => {
      const box = h("input", { type: "checkbox", id: `take-${one.id}`, checked: this.#has(one), on: { change: (event) => this.#choose(one, event.currentTarget.checked) } });
      return h("li", {}, box, h("label", { for: box.id }, h("b", {}, one.name), " ", h("small", {}, `${one.spec.method.name}, ${progress(one)}`)), badge(one.state));
    };
    fill(this.choices, shown.length ? shown.map(item) : h("li", { class: "remark" }, "No federation is like that."));
  }

  #has(one) {
    return this.chosen.includes(one.id) || this.chosen.includes(one.name);
  }

  async #choose(one, on) {
    this.chosen = this.chosen.filter((id) => id !== one.id && id !== one.name).concat(on ? [one.id] : []);
    window.history.replaceState(null, "", `#/compare/${this.chosen.join(",")}`);
    await this.#load();
  }

  async #load() {
    try {
      const wanted = this.all.filter((one) => this.#has(one));
      await Promise.all(wanted.filter((one) => !this.loaded.has(one.id)).map(async (one) => this.loaded.set(one.id, await this.api.all(`/v1/federations/${one.id}/rounds`, "rounds"))));
      fill(this.problem);
      if (!this.gone) this.#draw();
    } catch (error) {
      this.#tell(error);
    }
  }

  #draw() {
    const some = this.all.filter((one) => this.#has(one)).map((view) => ({ view, reports: this.loaded.get(view.id) ?? [] }));
    this.empty.hidden = some.length > 1;
    for (const one of this.results) one.hidden = some.length < 2;
    if (some.length < 2) return;
    const curves = some.flatMap(({ view, reports }, place) => [
      { label: view.name, place, data: points(reports, (one) => one.evaluation?.mean.trainer?.accuracy) },
      { label: `${view.name}, unseen`, place, dashed: true, data: points(reports, (one) => one.evaluation?.mean.evaluator?.accuracy) },
      { label: `${view.name}, zero-shot`, place, thin: true, data: points(reports, (one) => one.evaluation?.mean.trainer?.zero_shot) },
    ]);
    const drawn = curves.filter((one) => one.data.length);
    const last = drawn.filter((one) => !one.thin).map((one) => `${one.label} ${percent(one.data.at(-1).y)}`).join(", ");
    const measured = measures(some);
    this.results[0].querySelector("h2").textContent = measured;
    this.accuracy.update(drawn, `Mean ${measured.toLowerCase().replace(/^mean /, "")} by round; last: ${last}`);
    const losses = some.map(({ view, reports }, place) => ({ label: view.name, place, data: points(reports, lossOf) })).filter((one) => one.data.length);
    this.loss.update(losses, `Mean training loss by round; last: ${losses.map((one) => `${one.label} ${figure(one.data.at(-1).y, 3)}`).join(", ")}`);
    fill(this.figures, figuresTable(some));
    this.#compareSettings(some.map(({ view }) => view));
  }

  async #compareSettings(views) {
    const fields = await Promise.all(views.map(({ spec }) => resolvedFields(this.api, spec)));
    const wanted = this.all.filter((one) => this.#has(one)).map((one) => one.id);
    if (!this.gone && String(wanted) === String(views.map((one) => one.id))) fill(this.settings, differences(views, fields));
  }
}

function points(reports, value) {
  return reports.map((one) => ({ x: one.round, y: value(one) })).filter((one) => one.y !== undefined && one.y !== null);
}

function lossOf(report) {
  return report.phases.map((phase) => phase.metrics.loss).filter((loss) => loss !== undefined).at(-1);
}

/** What the federations measure: "Accuracy", "Mean average precision", or both. */
function measures(some) {
  return [...new Set(some.map(({ view }) => measure(view.spec.task)))].join(" or ");
}

/** A row for each figure, a column for each federation. */
function figuresTable(some) {
  const last = ({ reports }) => reports.filter((one) => one.evaluation && Object.keys(one.evaluation.mean).length).at(-1)?.evaluation;
  const total = (reports, key) => bytes(reports.reduce((sum, one) => sum + one[key], 0));
  const against = (role) => (one) => {
    const evaluation = last(one);
    const mean = evaluation?.mean[role];
    return mean ? [percent(mean.accuracy), h("small", { class: "under" }, gain(mean.zero_shot, mean.accuracy) + margin(evaluation.bounds?.[role]?.test))] : "–";
  };
  const rows = [
    ["method", ({ view }) => view.spec.method.name],
    ["state", ({ view }) => view.state],
    ["rounds", ({ view }) => `${view.round} of ${view.spec.rounds}`],
    ["trainers", ({ view }) => String(view.clients.trainers)],
    [`${measures(some).toLowerCase()}, gain`, against("trainer")],
    ["unseen, gain", against("evaluator")],
    ["training loss", ({ reports }) => figure(points(reports, lossOf).at(-1)?.y, 3)],
    ["elapsed", ({ view }) => (elapsed(view) === null ? "–" : duration(elapsed(view)))],
    ["sent up", ({ reports }) => total(reports, "bytes_up")],
    ["taken down", ({ reports }) => total(reports, "bytes_down")],
  ];
  const columns = ["", ...some.map(({ view }) => ({ title: view.name, class: "number" }))];
  return table("Figures of the federations", columns, rows.map(([name, value]) => [name, ...some.map(value)]));
}

/** Rows for the settings that differ once each method's defaults are filled in; `fields` are those of each view. */
function differences(views, fields) {
  const flats = views.map((view, at) => Object.fromEntries(settingsOf(view.spec, fields[at]).map(({ path, value }) => [path, value])));
  // A backbone with and without its fingerprint is the same one: only two different fingerprints are two backbones.
  const values = (path) => flats.map((one) => one[path]).filter((value) => !PINNED.test(path) || (value !== null && value !== undefined));
  const paths = [...new Set(flats.flatMap((one) => Object.keys(one)))].filter((path) => path !== "name" && new Set(values(path).map(told)).size > 1);
  if (!paths.length) return h("p", { class: "remark" }, `${counted(views.length, "federation")} with the same settings.`);
  const about = (path) => fields.flat().find((one) => one.path === path)?.about;
  return table("Settings that differ, by federation", ["setting", ...views.map((view) => view.name)], paths.map((path) => [nameOf(path, about(path)), ...flats.map((one) => told(one[path]))]));
}
