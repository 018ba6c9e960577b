// A table of numbers whose cells are tinted: it reads as a picture, and by row and column.

import { h } from "./dom.js";
import { figure } from "./format.js";

/**
 * `rows` and `columns` are labels, `values[row][column]` numbers or null. The tint goes from `low` (second colour) over
 * `middle` (none) to `high` (first colour).
 */
export function matrix(label, rows, columns, values, { low, middle, high, digits = 2, rowTitle = "" }) {
  const tint = (value) => {
    if (value === null || value === undefined) return { tone: "none", strength: 0 };
    const span = value >= middle ? high - middle : middle - low;
    const strength = span > 0 ? Math.min(1, Math.abs(value - middle) / span) : 0;
    return { tone: value >= middle ? "first" : "second", strength };
  };
  const cell = (value) => {
    const { tone, strength } = tint(value);
    return h("td", { "data-tone": tone, style: { "--strength": `${Math.round(strength * 70)}%` } }, figure(value, digits));
  };
  const head = h("tr", {}, h("th", { scope: "col" }, rowTitle), columns.map((name) => h("th", { scope: "col", title: name }, h("span", {}, name))));
  const body = rows.map((name, at) => h("tr", {}, h("th", { scope: "row", title: name }, h("span", {}, name)), values[at].map(cell)));
  return h(
    "div",
    { class: "scrolls", role: "region", "aria-label": label, tabindex: "0" },
    h("table", { class: "matrix" }, h("caption", { class: "unseen" }, label), h("thead", {}, head), h("tbody", {}, body)),
  );
}
