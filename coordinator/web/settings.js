// Every setting of a federation, what differs from its default first, with a search over names, values and meanings.

import { fill, h, inWords, panel, say, table } from "./dom.js";
import { counted } from "./format.js";
import { resolvedFields, settingsOf } from "./schema.js";
import { nameOf, restOf, told } from "./words.js";

export class Settings {
  constructor(api) {
    this.api = api;
    this.rows = [];
    this.search = h("input", { type: "search", id: "setting", autocomplete: "off", spellcheck: "false", on: { input: () => this.#draw() } });
    this.found = h("p", { class: "remark", role: "status" });
    this.table = h("div");
    this.element = panel("Settings", { hidden: true }, h("p", { class: "row" }, h("label", { for: "setting" }, "Search"), this.search), this.found, this.table);
  }

  async update({ view }) {
    const now = JSON.stringify(view.spec);
    if (now === this.shown) return;
    this.shown = now;
    this.rows = settingsOf(view.spec, await resolvedFields(this.api, view.spec));
    this.element.hidden = false;
    this.#draw();
  }

  #draw() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const name = (one) => nameOf(one.path, one.about);
    const matching = this.rows.filter((one) => words.every((word) => `${name(one)} ${one.path} ${told(one.value)} ${one.about}`.toLowerCase().includes(word)));
    say(this.found, words.length ? counted(matching.length, "setting") : `${counted(this.rows.length, "setting")}, ${this.rows.filter((one) => one.differs).length} other than the default, which come first.`);
    const cells = matching.map((one) => [
      [name(one), restOf(one.path, one.about) ? h("small", { class: "under" }, inWords(restOf(one.path, one.about))) : null],
      one.differs ? h("b", {}, told(one.value)) : told(one.value),
      one.differs ? told(one.standard) : h("span", { class: "faint" }, "the same"),
    ]);
    fill(this.table, matching.length ? table("Settings, what differs from its default first", ["setting", "here", "default"], cells, { class: "settings" }) : null);
  }
}
