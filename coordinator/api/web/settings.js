// Every setting of a federation, what differs from its default first, with a search over names, values and meanings.

import { fill, h, inWords, panel, say, table } from "./dom.js";
import { counted } from "./format.js";
import { broken, resolvedFields, settingsOf, told } from "./schema.js";

export class Settings {
  constructor(api) {
    this.api = api;
    this.shown = "";
    this.rows = [];
    this.search = h("input", { type: "search", id: "setting", autocomplete: "off", spellcheck: "false", on: { input: () => this.#draw() } });
    this.found = h("p", { class: "remark", role: "status" });
    this.table = h("div");
    this.summary = h("summary", {}, "Settings");
    this.details = h("details", { on: { toggle: () => this.#draw() } }, this.summary, h("p", { class: "choice" }, h("label", { for: "setting" }, "Search "), this.search), this.found, this.table);
    this.element = panel("Settings", { class: "folded" }, this.details);
  }

  update({ view }) {
    const now = JSON.stringify(view.spec);
    if (now === this.shown) return;
    this.shown = now;
    this.#load(view.spec);
  }

  async #load(spec) {
    this.rows = settingsOf(spec, await resolvedFields(this.api, spec));
    const differing = this.rows.filter((one) => one.differs).length;
    say(this.summary, `All ${counted(this.rows.length, "setting")}, ${differing} other than the default`);
    this.#draw();
  }

  #draw() {
    if (!this.details.open) return;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = this.rows.filter((one) => words.every((word) => `${one.path} ${told(one.value)} ${one.about}`.toLowerCase().includes(word)));
    say(this.found, words.length ? counted(matching.length, "setting") : "");
    const cells = matching.map((one) => [
      [broken(one.path), one.about ? h("small", { class: "under" }, inWords(one.about)) : null],
      one.differs ? h("b", {}, told(one.value)) : told(one.value),
      one.differs ? told(one.standard) : h("span", { class: "faint" }, "the same"),
    ]);
    fill(this.table, matching.length ? table("Settings, what differs from its default first", ["setting", "here", "default"], cells, { class: "settings" }) : h("p", { class: "empty" }, "No setting is like that."));
  }
}
