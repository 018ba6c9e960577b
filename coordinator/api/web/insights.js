// What only prompt learning can show: how far prompts drift, whether clients agree, words, shares, planes, mixtures.

import { Plot } from "./charts.js";
import { fill, h, inWords, panel, table } from "./dom.js";
import { counted, figure, percent } from "./format.js";
import { matrix } from "./matrix.js";

const SERIES = 8;
const SHARE = "domain_share:";

export class Insights {
  constructor() {
    const times = (value) => figure(value, 2);
    this.drift = new Plot("line", "Drift of the prompts from their start", { x: "round", format: times, zero: true });
    this.way = h("select", { id: "way", on: { change: () => this.#showDrift() } }, h("option", { value: "step" }, "in each round"), h("option", { value: "whole" }, "from the start"));
    this.ways = h("p", { class: "choice" }, h("label", { for: "way" }, "Moved "), this.way);
    this.plane = new Plot("scatter", "Clients in the plane", { x: "first component", y: "second", format: times, square: true, class: "square" });
    this.mixture = h("div", { class: "mixtures" });
    this.similarity = h("div");
    this.shares = h("div");
    this.words = h("div");
    this.context = 0;
    this.picked = h("select", { id: "context", on: { change: () => this.#showWords() } });
    this.choice = h("p", { class: "choice" }, h("label", { for: "context" }, "Context "), this.picked);
    this.remarks = { drift: remark(), similarity: remark(), words: remark(), plane: remark(), shares: remark() };
    this.parts = {
      drift: panel("Drift of the prompts", {}, this.ways, this.drift.element, this.remarks.drift),
      similarity: panel("Agreement of the clients", {}, this.similarity, this.remarks.similarity),
      words: panel("Nearest words", {}, this.choice, this.words, this.remarks.words),
      shares: panel("Attention shares γ", {}, this.shares, this.remarks.shares),
      plane: panel("Clients in the plane", {}, this.plane.element, this.remarks.plane),
      mixture: panel("Domain mixture", {}, this.mixture, h("p", { class: "remark" }, "Mean share of each domain over a client's test images, from the domain classifier. A client's own page shows it for one image.")),
    };
    this.element = h("div", { class: "insights" });
  }

  update({ insights, rounds, places }) {
    this.found = insights;
    this.missing = Object.fromEntries((insights?.missing ?? []).map((one) => [one.what, one.why]));
    const reports = [...rounds.values()];
    this.#showDrift();
    this.#showSimilarity();
    this.#offerContexts();
    this.#showShares(reports);
    this.#showPlane(places);
    this.#showMixture(reports);
    const shown = Object.values(this.parts).filter((one) => !one.hidden);
    if (shown.length !== this.element.childElementCount || shown.some((one) => one.parentElement !== this.element)) {
      fill(this.element, shown);
      this.#showDrift();
      this.#showPlane(places);
    }
    this.element.hidden = shown.length === 0;
  }

  end() {
    this.drift.destroy();
    this.plane.destroy();
  }

  #showDrift() {
    const points = this.found?.drift ?? [];
    const last = points.at(-1)?.tensors ?? {};
    // What starts at zero has no length of its own to be measured in: it is left out beside tensors that have one.
    const measured = Object.keys(last).filter((label) => last[label].relative !== null);
    const steps = this.way.value === "step" && points.some((one) => Object.values(one.tensors).some((tensor) => tensor.step !== null && tensor.step !== undefined));
    const unit = measured.length ? (steps ? "relative_step" : "relative") : steps ? "step" : "distance";
    const labels = measured.length ? measured : Object.keys(last);
    const there = points.length > 1 && labels.length > 0;
    this.parts.drift.hidden = !there && !this.missing.drift;
    this.drift.element.hidden = this.ways.hidden = !there;
    if (there) {
      const series = driftSeries(steps ? points.slice(1) : points, labels, unit);
      const told = series.map((one) => `${one.label} ${figure(one.data.at(-1).y)}`).join(", ");
      this.drift.update(series, `Drift of the prompts ${steps ? "in each round" : "from their start"}; after round ${points.at(-1).round}: ${told}`);
    }
    const from = steps ? "How far the prompts moved since the round before" : "Distance from round 0";
    const described = measured.length ? `${from}, in multiples of the start's own length.` : steps ? `${from}.` : "Distance from round 0, which is zero.";
    fill(this.remarks.drift, this.missing.drift ?? described, labels.length > SERIES ? ` The ${SERIES} that moved most of ${labels.length} tensors.` : "");
  }

  #showSimilarity() {
    const found = (this.found?.similarity ?? []).filter((one) => one.clients.length > 1);
    this.parts.similarity.hidden = found.length === 0 && !this.missing.similarity;
    const scale = { low: -1, middle: 0, high: 1 };
    fill(
      this.similarity,
      found.map((one) => [
        found.length > 1 ? h("h3", {}, one.phase) : null,
        matrix(`Cosine between clients' updates, ${one.phase}`, one.clients, one.clients, one.cosines, scale),
        one.omitted ? h("p", { class: "remark" }, `${one.omitted} more clients are not shown.`) : null,
      ]),
    );
    fill(this.remarks.similarity, this.missing.similarity ?? `Cosine between what the clients changed in round ${this.found?.round}: 1 the same way, 0 unrelated, −1 against each other.`);
  }

  // Words

  #offerContexts() {
    const contexts = this.found?.words?.contexts ?? [];
    this.parts.words.hidden = contexts.length === 0 && !this.missing.words;
    const known = [...this.picked.options].map((option) => option.textContent).join("\n");
    if (known !== contexts.map((one) => one.label).join("\n")) {
      const chosen = this.picked.selectedIndex;
      fill(this.picked, contexts.map((one, at) => h("option", { value: at }, one.label)));
      if (chosen > 0 && chosen < contexts.length) this.picked.selectedIndex = chosen;
    }
    this.choice.hidden = contexts.length < 2;
    this.#showWords();
  }

  #showWords() {
    const words = this.found?.words;
    const context = words?.contexts[Math.max(0, this.picked.selectedIndex)];
    if (!context) {
      fill(this.words);
      fill(this.remarks.words, inWords(this.missing.words ?? ""));
      return;
    }
    const near = (one) => [h("b", {}, one.word), " ", h("small", {}, figure(one.distance, 3))];
    const rows = context.vectors.map((row, at) => [String(at + 1), ...row.map(near)]);
    const columns = ["vector", "nearest", "second", "third"].slice(0, 1 + (context.vectors[0]?.length ?? 0));
    // A vector that is farther from its nearest word than words are from each other says nothing by it: it is folded away.
    const says = (at) => words.spacing === null || context.vectors[at][0]?.distance <= words.spacing;
    const [telling, silent] = [true, false].map((wanted) => rows.filter((_, at) => says(at) === wanted));
    const open = this.words.querySelector("details")?.open ?? false;
    const folded = telling.length ? `${silent.length} more of ${counted(rows.length, "vector")} are near no word` : `None of the ${counted(rows.length, "vector")} is near a word`;
    fill(
      this.words,
      telling.length ? table(`Nearest words of ${context.label}`, columns, telling, { class: "words" }) : null,
      silent.length ? h("details", { open }, h("summary", {}, folded), table(`Nearest words of ${context.label}, far from any`, columns, silent, { class: "words" })) : null,
    );
    const spacing = words.spacing === null ? "" : ` Words are typically ${figure(words.spacing, 3)} apart: a vector much farther from its nearest word is no word.`;
    fill(this.remarks.words, `With the Euclidean distance of the word's embedding.${spacing}`);
  }

  // Shares, planes, mixtures

  #showShares(reports) {
    const last = reports.flatMap((one) => one.phases.map((phase) => [one.round, phase])).filter(([, phase]) => Object.keys(phase.measured.clients).length).at(-1);
    this.parts.shares.hidden = last === undefined;
    if (last === undefined) return;
    const [round, phase] = last;
    const clients = Object.keys(phase.measured.clients).sort();
    fill(
      this.shares,
      families(phase.measured.clients[clients[0]]).map(([family, blocks]) => {
        const values = blocks.map((block) => clients.map((name) => phase.measured.clients[name][`${family}_${block}`] ?? null));
        const even = 1 / clients.length;
        const far = Math.max(0.02, ...values.flat().map((value) => Math.abs(value - even)));
        const scale = { low: even - far, middle: even, high: even + far, digits: 3, rowTitle: "block" };
        return [h("h3", {}, family.replace("gamma_", "")), matrix(`${family} by block and client`, blocks.map((block) => String(block + 1)), clients, values, scale)];
      }),
    );
    fill(this.remarks.shares, `Share of each client in each block's aggregate, round ${round}. Even shares would be ${figure(1 / clients.length, 3)}: differences of a few thousandths say little.`);
  }

  #showPlane(places) {
    const plane = this.found?.plane;
    this.parts.plane.hidden = !plane;
    if (!plane) return;
    const spread = plane.explained[0] > 0;
    this.plane.element.hidden = !spread;
    if (!spread) {
      fill(this.remarks.plane, plane.of === "contexts" ? "The generator makes the same context for every client: all have the same class names." : "All clients are at the same point.");
      return;
    }
    const chosen = plane.points.slice(0, 40);
    const told = chosen.map((one) => `${one.client} ${figure(one.x)}, ${figure(one.y)}`).join("; ");
    const point = (one) => ({ label: one.client, place: places.get(one.client) ?? 0, data: [{ x: one.x, y: one.y }] });
    this.plane.update(chosen.map(point), `Clients in the plane: ${told}`);
    const what = plane.of === "contexts" ? "The contexts that the generator makes for each client's classes" : "The descriptors that the coordinator keeps of its clients";
    fill(this.remarks.plane, `${what}, on their first two principal components, which hold ${percent(plane.explained[0])} and ${percent(plane.explained[1])} of their variance.`);
  }

  #showMixture(reports) {
    const last = reports.filter((one) => one.evaluation && Object.values(one.evaluation.clients).some((found) => domainsOf(found).length)).at(-1);
    this.parts.mixture.hidden = last === undefined;
    if (last === undefined) return;
    const clients = Object.entries(last.evaluation.clients).filter(([, found]) => domainsOf(found).length);
    const domains = [...new Set(clients.flatMap(([, found]) => domainsOf(found)))].sort();
    const series = (domain) => `var(--series-${(domains.indexOf(domain) % SERIES) + 1})`;
    const bar = (name, found) => {
      const shares = domains.map((domain) => [domain, found.metrics[SHARE + domain] ?? 0]);
      const parts = shares.map(([domain, share]) => h("span", { title: `${domain}: ${percent(share)}`, style: { "--swatch": series(domain), "flex-grow": String(share) } }));
      const said = shares.map(([domain, share]) => `${domain} ${percent(share)}`).join(", ");
      return h("li", {}, h("b", {}, name), h("div", { class: "strip", role: "img", "aria-label": said }, parts), h("small", {}, said));
    };
    fill(this.mixture, h("ul", {}, clients.map(([name, found]) => bar(name, found))));
  }
}

function remark() {
  return h("p", { class: "remark" });
}

function driftSeries(points, labels, unit) {
  const value = (tensors, label) => tensors[label]?.[unit] ?? 0;
  const last = points.at(-1).tensors;
  const shown = [...labels].sort((one, other) => value(last, other) - value(last, one)).slice(0, SERIES).sort();
  const moved = (label) => points.filter((one) => one.tensors[label]).map((one) => ({ x: one.round, y: value(one.tensors, label) }));
  return shown.map((label, place) => ({ label, place, data: moved(label) }));
}

/** `gamma_text_0, gamma_text_1` -> `[["gamma_text", [0, 1]]]`. */
function families(measured) {
  const found = new Map();
  for (const name of Object.keys(measured)) {
    const match = /^(.+)_(\d+)$/.exec(name);
    if (match) found.set(match[1], [...(found.get(match[1]) ?? []), Number(match[2])]);
  }
  return [...found].map(([family, blocks]) => [family, blocks.sort((a, b) => a - b)]);
}

function domainsOf(evaluation) {
  return Object.keys(evaluation.metrics).filter((name) => name.startsWith(SHARE)).map((name) => name.slice(SHARE.length));
}
