// Elements from plain values. Text only ever becomes text nodes: no name that a client has chosen can become markup.

import { ago } from "./format.js";

setInterval(() => document.querySelectorAll("time[data-since]").forEach((one) => say(one, ago(one.dateTime))), 5000);

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

/** Say something to those who do not see the page change. */
export function announce(text) {
  say(document.getElementById("announcer"), text);
}

/** How long ago something was, which goes on growing. */
export function since(at) {
  return at ? h("time", { datetime: at, "data-since": true }, ago(at)) : ago(at);
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


/** Offer `values` in a select, as `told` names them; what is chosen stays so. */
export function offer(select, values, told = (value) => value) {
  if ([...select.options].map((one) => one.value).join("\n") === values.join("\n")) return;
  const chosen = select.value;
  fill(select, values.map((value) => h("option", { value }, told(value))));
  if (values.includes(chosen)) select.value = chosen;
}

/** Who has signed in: a viewer sees what others may do, and may not. */
export const caller = { role: null };
const ONLY = "A viewer looks on: this takes the role operator.";

/** What only operators may use. */
export function forOperators(...children) {
  const looksOn = caller.role === "viewer";
  return h("fieldset", { class: "inline", disabled: looksOn, title: looksOn && ONLY }, children);
}

/** Buttons with a place under them, where a click that fails says why. Viewers have those with `data-open` alone. */
export class Acts {
  constructor(failed, ...buttons) {
    this.failed = failed;
    this.problem = h("p", { class: "error", role: "alert" });
    const closed = (one) => one instanceof HTMLButtonElement && !("open" in one.dataset);
    this.row = h("div", { class: "row" }, buttons.flat().map((one) => (closed(one) ? forOperators(one) : one)));
    this.element = h("div", { class: "acts" }, this.row, this.problem);
  }

  /** True where `work` came to its end; until then it shows that it is at work. */
  async run(work) {
    fill(this.problem);
    this.element.setAttribute("aria-busy", "true");
    try {
      await work();
      return true;
    } catch (error) {
      this.refusal = error;
      if (!this.failed(error)) fill(this.problem, error.message);
      return false;
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  /** What was refused may work now. A role does not change by that. */
  clear() {
    if (this.refusal?.status !== 403) fill(this.problem);
  }
}

let questions = 0;

/** Ask before what cannot be undone; true where the answer is yes. `keep` and `act` are what the buttons say. */
export function ask(place, { title, text, extra = null, keep, act }) {
  const id = `question-${(questions += 1)}`;
  return new Promise((resolve) => {
    const button = (value, kind, label) => h("button", { type: "button", class: kind, on: { click: () => dialog.close(value) } }, label);
    const done = () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    };
    const buttons = h("div", { class: "row end" }, button("", null, keep), button("yes", "danger", act));
    const dialog = h("dialog", { "aria-labelledby": id, on: { close: done } }, h("h2", { id }, title), h("p", {}, text), extra, buttons);
    place.append(dialog);
    dialog.showModal();
  });
}

/** A field with its label, a remark under it and a place for what is wrong with it. */
export function field(label, input, about = "", wrong = null) {
  const remark = about ? h("small", { id: `about-${input.id}` }, inWords(about)) : null;
  const named = [remark?.id, wrong?.id].filter(Boolean).join(" ");
  if (named) input.setAttribute("aria-describedby", named);
  return h("div", { class: "field" }, h("label", { for: input.id }, label), input, remark, wrong);
}

/** Say what is wrong with a field, or nothing. */
export function mark(input, wrong, text) {
  fill(wrong, text);
  if (text) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}
