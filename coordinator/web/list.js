// All federations: name, method, state and how far each has come; searched by words, filtered by state.

import { fill, h, say } from "./dom.js";
import { counted } from "./format.js";

const LOOK_AGAIN = 5000;
const FEW = 3; // which need no search
const STATES = ["enrolling", "running", "paused", "finished", "failed", "cancelled"];

/** A federation's state as a badge; its word says all that its colour does. */
export function badge(state) {
  return h("span", { class: "badge", "data-state": state }, state);
}

/** How far it has come, in words. */
export function progress({ spec, round }) {
  return spec.rounds === 0 ? "an export, evaluated" : `${round} of ${counted(spec.rounds, "round")}`;
}

export class List {
  constructor(api, failed) {
    Object.assign(this, { api, failed, federations: [], chosen: null, shown: "" });
    this.items = h("ul", { class: "federations" });
    this.remark = h("p", { class: "remark" });
    this.search = h("input", { type: "search", id: "search", placeholder: "Search", "aria-label": "Search federations", autocomplete: "off", spellcheck: "false", on: { input: () => this.#show() } });
    this.state = h("select", { id: "state", "aria-label": "State", on: { change: () => this.#show() } }, ["any state", ...STATES].map((state) => h("option", { value: state === "any state" ? "" : state }, state)));
    this.found = h("p", { class: "unseen", role: "status" });
    this.filter = h("div", { class: "filter", hidden: true }, this.search, this.state);
    const links = h("p", { class: "links" }, h("a", { href: "#/new" }, "New"), h("a", { href: "#/compare" }, "Compare"));
    this.element = h("nav", { class: "side", "aria-labelledby": "federations" }, h("div", { class: "between" }, h("h2", { id: "federations" }, "Federations"), links), this.filter, this.found, this.items, this.remark);
  }

  async begin() {
    await this.refresh();
    this.timer = setInterval(() => this.refresh(), LOOK_AGAIN);
  }

  end() {
    clearInterval(this.timer);
  }

  mark(id) {
    this.chosen = id;
    this.#show();
  }

  async refresh() {
    try {
      this.federations = await this.api.all("/v1/federations", "federations");
      fill(this.remark);
      this.#show();
    } catch (error) {
      if (this.failed(error)) return;
      fill(this.remark, error.message);
      this.element.hidden = false;
    }
  }

  #show() {
    this.element.hidden = this.federations.length === 0;
    // Built again only where something changed: whoever has the keyboard on an item keeps it.
    this.filter.hidden = this.federations.length <= FEW;
    const now = JSON.stringify([this.chosen, this.search.value, this.state.value, this.federations.map((one) => [one.id, one.name, one.state, one.unreadable, one.round])]);
    if (now === this.shown) return;
    this.shown = now;
    const held = this.items.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const shown = this.#matching();
    fill(this.items, shown.map((one) => h("li", {}, this.#item(one))));
    const filtered = shown.length < this.federations.length;
    say(this.found, filtered ? `${counted(shown.length, "federation")} of ${this.federations.length}` : "");
    if (this.federations.length) fill(this.remark, shown.length ? "" : "No federation is like that.");
    if (held !== null) this.items.querySelector(`a[href="${held}"]`)?.focus();
  }

  /** Newest first: those that hold every word, in the chosen state. */
  #matching() {
    const words = this.filter.hidden ? [] : this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const state = this.filter.hidden ? "" : this.state.value;
    const holds = (one) => words.every((word) => `${one.name} ${one.spec.method.name} ${one.spec.backbone.model}`.toLowerCase().includes(word));
    return [...this.federations].reverse().filter((one) => (state === "" || one.state === state) && holds(one));
  }

  #item(one) {
    const { rounds, method } = one.spec;
    const current = one.id === this.chosen || one.name === this.chosen;
    const done = one.state === "finished" ? rounds : Math.max(0, one.round - (one.state === "running" ? 1 : 0));
    return h(
      "a",
      { href: `#/federations/${one.id}`, "aria-current": current ? "page" : null },
      h("span", { class: "name" }, one.name),
      badge(one.unreadable ? "unreadable" : one.state),
      h("span", { class: "what" }, one.unreadable ?? `${method.name} · ${progress(one)}`),
      h("progress", { max: Math.max(1, rounds), value: done, "aria-label": `${one.name}: rounds completed` }),
    );
  }
}
