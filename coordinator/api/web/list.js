// All federations: name, method, state and how far each has come.

import { fill, h } from "./dom.js";
import { counted } from "./format.js";

const LOOK_AGAIN = 5000;

/** A federation's state as a badge; its word says all that its colour does. */
export function badge(state) {
  return h("span", { class: "badge", "data-state": state }, state);
}

export class List {
  constructor(api, failed) {
    this.api = api;
    this.failed = failed;
    this.federations = [];
    this.chosen = null;
    this.shown = "";
    this.items = h("ul", { class: "federations" });
    this.remark = h("p", { class: "remark" });
    this.element = h("nav", { class: "side", "aria-labelledby": "federations" }, h("h2", { id: "federations" }, "Federations"), this.items, this.remark);
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
      fill(this.remark, this.federations.length ? "" : "None yet. `promptfed federation create spec.yaml` makes one.");
      this.#show();
    } catch (error) {
      if (!this.failed(error)) fill(this.remark, error.message);
    }
  }

  #show() {
    // Built again only where something changed: whoever has the keyboard on an item keeps it.
    const now = JSON.stringify([this.chosen, this.federations.map((one) => [one.id, one.name, one.state, one.round])]);
    if (now === this.shown) return;
    this.shown = now;
    const held = this.items.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    fill(this.items, [...this.federations].reverse().map((one) => h("li", {}, this.#item(one))));
    if (held !== null) this.items.querySelector(`a[href="${held}"]`)?.focus();
  }

  #item(one) {
    const { rounds, method } = one.spec;
    const current = one.id === this.chosen || one.name === this.chosen;
    const done = one.state === "finished" ? rounds : Math.max(0, one.round - (one.state === "running" ? 1 : 0));
    return h(
      "a",
      { href: `#/federations/${one.id}`, "aria-current": current ? "page" : null },
      h("span", { class: "name" }, one.name),
      badge(one.state),
      h("span", { class: "what" }, `${method.name} · ${one.round} of ${counted(rounds, "round")}`),
      h("progress", { max: Math.max(1, rounds), value: done, "aria-label": `${one.name}: rounds completed` }),
    );
  }
}
