// Elements from plain values. Text only ever becomes text nodes: no name that a client has chosen can become markup.

/** An element with attributes, listeners (`on: {click}`) and children; null and false children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  fill(element, ...children);
  return element;
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  const wanted = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.replaceChildren(...wanted.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Text whose `commands` between backticks are shown as code. */
export function inWords(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}

/** Set an element's text, and touch nothing where it is that already. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A table in a region of its own that scrolls sideways on narrow screens; keyboards reach it. */
export function table(label, columns, rows, options = {}) {
  const head = h("tr", {}, columns.map((one) => h("th", { scope: "col", class: one.class }, one.title ?? one)));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell, at) => tableCell(cell, columns[at], at))));
  return h(
    "div",
    { class: "scrolls", role: "region", "aria-label": label, tabindex: "0" },
    h("table", { class: options.class }, h("caption", { class: "unseen" }, label), h("thead", {}, head), h("tbody", {}, body)),
  );
}

function tableCell(cell, column, at) {
  if (cell instanceof HTMLTableCellElement) return cell;
  return at === 0
    ? h("th", { scope: "row", class: column?.class }, cell)
    : h("td", { class: column?.class }, cell);
}

/** A panel: a section with a heading, an optional remark under it, and what it holds. */
export function panel(title, attributes = {}, ...children) {
  const id = `panel-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { ...attributes, class: `panel ${attributes.class ?? ""}`, "aria-labelledby": id }, h("h2", { id }, title), children);
}

/** Say something to those who do not see the page change. */
export function announce(text) {
  say(document.getElementById("announcer"), text);
}
