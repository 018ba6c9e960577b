// What only prompt learning can show: attention shares and domain mixtures.

import { fill, h, panel } from "./dom.js";
import { figure, percent } from "./format.js";

const SERIES = 8;
const SHARE = "domain_share:";

export class Insights {
  constructor() {
    this.mixture = h("div", { class: "mixtures" });
    this.shares = h("div");
    this.remark = h("p", { class: "remark" });
    this.parts = {
      shares: panel("Attention shares γ", {}, this.shares, this.remark),
      mixture: panel("Domain mixture", {}, this.mixture, h("p", { class: "remark" }, "Mean share of each domain over a client's test images, from the domain classifier. A client's own page shows it for one image.")),
    };
    this.element = h("div", { class: "insights" }, this.parts.shares, this.parts.mixture);
  }

  update({ rounds }) {
    const reports = [...rounds.values()];
    this.#showShares(reports);
    this.#showMixture(reports);
    this.element.hidden = this.parts.shares.hidden && this.parts.mixture.hidden;
  }

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
    fill(this.remark, `Share of each client in each block's aggregate, round ${round}. Even shares would be ${figure(1 / clients.length, 3)}: differences of a few thousandths say little.`);
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

/** A table whose cells are tinted: from `low` (second colour) over `middle` (none) to `high` (first colour). */
function matrix(label, rows, columns, values, { low, middle, high, digits, rowTitle }) {
  const cell = (value) => {
    const span = value >= middle ? high - middle : middle - low;
    const strength = value === null || span <= 0 ? 0 : Math.min(1, Math.abs(value - middle) / span);
    return h("td", { "data-tone": value >= middle ? "first" : "second", style: { "--strength": `${Math.round(strength * 70)}%` } }, figure(value, digits));
  };
  const heading = (scope) => (name) => h("th", { scope, title: name }, h("span", {}, name));
  const body = rows.map((name, at) => h("tr", {}, heading("row")(name), values[at].map(cell)));
  const head = h("tr", {}, h("th", { scope: "col" }, rowTitle), columns.map(heading("col")));
  return h("div", { class: "scrolls", role: "region", "aria-label": label, tabindex: "0" }, h("table", { class: "matrix" }, h("caption", { class: "unseen" }, label), h("thead", {}, head), h("tbody", {}, body)));
}
