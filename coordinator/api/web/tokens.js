// Enrolment tokens: minted and shown once, listed with who came by them, taken back.

import { ask } from "./dialog.js";
import { announce, fill, h, panel, table } from "./dom.js";
import { names } from "./format.js";

export class Tokens {
  constructor(api, path, tell) {
    this.api = api;
    this.path = `${path}/enrolment-tokens`;
    this.tell = tell;
    this.list = h("div");
    this.minted = h("div", { class: "minted", hidden: true });
    this.uses = h("input", { id: "uses", type: "number", min: 1, max: 100_000, value: 1, required: true });
    this.name = h("input", { id: "token-name", autocomplete: "off", spellcheck: "false", maxlength: 64 });
    this.hours = h("input", { id: "hours", type: "number", min: 0.1, step: "any", placeholder: "default" });
    this.role = h("select", { id: "role" }, ["any role", "trainer", "evaluator"].map((role) => h("option", { value: role === "any role" ? "" : role }, role)));
    const field = (label, input) => h("p", { class: "field" }, h("label", { for: input.id }, label), input);
    this.form = h(
      "form",
      { class: "fields", on: { submit: (event) => this.#mint(event) } },
      field("Clients that may use it", this.uses),
      field("Name", this.name),
      field("Role", this.role),
      field("Hours it is good", this.hours),
      h("button", { type: "submit", class: "primary" }, "Mint a token"),
    );
    this.details = h("details", { on: { toggle: () => this.details.open && this.#refresh() } }, h("summary", {}, "Mint, list and take back tokens with which clients enrol"), this.form, this.minted, this.list);
    this.element = panel("Enrolment tokens", { class: "folded" }, this.details);
    this.enrolled = -1;
  }

  update({ clients }) {
    const moved = clients.length !== this.enrolled;
    this.enrolled = clients.length;
    if (moved && this.details.open) this.#refresh();
  }

  async #mint(event) {
    event.preventDefault();
    this.tell(null);
    const asked = { uses: Number(this.uses.value) };
    if (this.name.value.trim()) asked.name = this.name.value.trim();
    if (this.role.value) asked.role = this.role.value;
    if (this.hours.value) asked.hours = Number(this.hours.value);
    try {
      this.#show(await this.api.post(this.path, asked));
      announce("A token was minted");
      await this.#refresh();
    } catch (error) {
      this.tell(error);
    }
  }

  #show(minted) {
    const text = h("input", { id: "minted", readonly: true, value: minted.token, on: { focus: (event) => event.currentTarget.select() } });
    const copy = async (event) => {
      const button = event.currentTarget;
      text.select();
      try {
        await navigator.clipboard.writeText(minted.token);
        fill(button, "Copied");
      } catch {
        fill(button, "Selected: copy it"); // where the page is not on this machine and not encrypted
      }
    };
    this.minted.hidden = false;
    fill(this.minted, h("p", { class: "field" }, h("label", { for: "minted" }, "The token, shown only now"), text), h("button", { type: "button", on: { click: copy } }, "Copy"));
    text.focus();
  }

  async #refresh() {
    try {
      const tokens = await this.api.all(this.path, "tokens");
      const row = (one) => [
        [one.name, h("small", { class: "under" }, one.clients.length ? `brought ${names(one.clients)}` : "nobody yet")],
        one.client ?? one.role ?? "any role",
        `${one.used}${one.uses === null ? "" : ` of ${one.uses}`}${one.closed ? ", closed" : ""}`,
        new Date(one.expires_at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }),
        h("button", { type: "button", class: "danger slim", "aria-label": `Take back ${one.name}`, on: { click: () => this.#revoke(one) } }, "Take back"),
      ];
      fill(this.list, tokens.length ? table("Tokens that were minted", ["token", "for", "used", "good until", ""], tokens.map(row)) : h("p", { class: "empty" }, "There is no token."));
    } catch (error) {
      this.tell(error);
    }
  }

  async #revoke(token) {
    const text = "Nobody enrols with it any more. Who came by it stays.";
    if (!(await ask(this.element, { title: `Take back ${token.name}?`, text, keep: "Keep it", act: "Take it back" }))) return;
    this.tell(null);
    try {
      await this.api.delete(`${this.path}/${encodeURIComponent(token.id)}`);
      announce(`${token.name} is taken back`);
      await this.#refresh();
    } catch (error) {
      this.tell(error);
    }
  }
}
