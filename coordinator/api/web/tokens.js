// Invitations: enrolment tokens, made and shown once as one command, listed with who came by them, taken back.

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
    this.address = h("input", { id: "address", type: "url", required: true, value: window.location.origin });
    this.role = h("select", { id: "role" }, ["any role", "trainer", "evaluator"].map((role) => h("option", { value: role === "any role" ? "" : role }, role)));
    const field = (label, input) => h("p", { class: "field" }, h("label", { for: input.id }, label), input);
    this.form = h(
      "form",
      { class: "fields", on: { submit: (event) => this.#mint(event) } },
      field("Clients that may join with it", this.uses),
      field("Name", this.name),
      field("Role", this.role),
      field("Hours until it expires", this.hours),
      field("Address for clients", this.address),
      h("button", { type: "submit", class: "primary" }, "Create an invitation"),
    );
    this.details = h("details", { on: { toggle: () => this.details.open && this.#refresh() } }, h("summary", {}, "Invite clients, and list or revoke invitations"), this.form, this.minted, this.list);
    this.element = panel("Invitations", { class: "folded" }, this.details);
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
    const asked = { uses: Number(this.uses.value), address: this.address.value.trim() };
    if (this.name.value.trim()) asked.name = this.name.value.trim();
    if (this.role.value) asked.role = this.role.value;
    if (this.hours.value) asked.hours = Number(this.hours.value);
    try {
      this.#show(await this.api.post(this.path, asked));
      announce("An invitation was created");
      await this.#refresh();
    } catch (error) {
      this.tell(error);
    }
  }

  #show(minted) {
    const field = (id, label, value) => h("p", { class: "field" }, h("label", { for: id }, label), h("input", { id, readonly: true, value, on: { focus: (event) => event.currentTarget.select() } }));
    const command = "promptfed join - --data folder:/path/to/images";
    const shown = field("minted", "The invitation for the data owner, shown only now", minted.invitation);
    const text = shown.lastChild;
    const copy = async (event) => {
      const button = event.currentTarget;
      text.select();
      try {
        await navigator.clipboard.writeText(minted.invitation);
        fill(button, "Copied");
      } catch {
        fill(button, "Selected: copy it"); // where the page is not on this machine and not encrypted
      }
    };
    this.minted.hidden = false;
    fill(
      this.minted,
      shown,
      h("button", { type: "button", on: { click: copy } }, "Copy"),
      h("p", { class: "remark" }, `It expires ${moment(minted.expires_at)}. Whoever has it can join: send it over a private channel. The data owner runs`, " ", h("code", {}, command), " ", "with the path of the images, and pastes it."),
      field("minted-token", "Its token alone, for --enrolment-token-file", minted.token),
    );
    text.focus();
  }

  async #refresh() {
    try {
      const tokens = await this.api.all(this.path, "tokens");
      const row = (one) => [
        [one.name, h("small", { class: "under" }, one.clients.length ? `used by ${names(one.clients)}` : "not used yet")],
        one.client ?? one.role ?? "any role",
        `${one.used}${one.uses === null ? "" : ` of ${one.uses}`}${one.closed ? ", closed" : ""}`,
        moment(one.expires_at),
        h("button", { type: "button", class: "danger slim", "aria-label": `Revoke ${one.name}`, on: { click: () => this.#revoke(one) } }, "Revoke"),
      ];
      fill(this.list, tokens.length ? table("Invitations", ["invitation", "for", "used", "expires", ""], tokens.map(row)) : h("p", { class: "empty" }, "There is no invitation."));
    } catch (error) {
      this.tell(error);
    }
  }

  async #revoke(token) {
    const text = "Nobody can join with it any more. Clients that have joined stay.";
    if (!(await ask(this.element, { title: `Revoke ${token.name}?`, text, keep: "Keep it", act: "Revoke it" }))) return;
    this.tell(null);
    try {
      await this.api.delete(`${this.path}/${encodeURIComponent(token.id)}`);
      announce(`${token.name} is revoked`);
      await this.#refresh();
    } catch (error) {
      this.tell(error);
    }
  }
}

function moment(time) {
  return new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}
