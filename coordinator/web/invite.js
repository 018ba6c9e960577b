// Invitations: one for each site by its name, shown once with what to send, listed with who came by it, taken back.

import { Acts, announce, ask, field, fill, forOperators, h, say, table } from "./dom.js";
import { counted, names } from "./format.js";

const ROLES = { trainer: "trains", evaluator: "only tests (unseen domain)", "": "either" };
const MOST = 200; // rows of sites that are not invited yet

export class Invite {
  constructor(api, path, failed, planned) {
    Object.assign(this, { api, path: `${path}/enrolment-tokens`, tokens: [] });
    this.planned = planned?.length ? planned.slice(0, MOST) : null; // null: not known before the federation is
    this.rows = h("ul", { class: "planned", "aria-label": "Sites to invite" });
    this.made = h("div", { class: "stack", "aria-live": "polite" });
    this.list = h("div");
    this.uses = h("input", { id: "uses", type: "number", min: 1, max: 100_000, value: 1, required: true });
    this.hours = h("input", { id: "hours", type: "number", min: 0.1, step: "any", placeholder: "the coordinator's usual time" });
    this.address = h("input", { id: "address", type: "url", required: true, value: window.location.origin });
    const local = /^(localhost|127\.|\[::1\])/.test(window.location.hostname);
    const reached = field("Address at which the sites reach this coordinator", this.address, local ? "Only this machine reaches the address that this page has: sites elsewhere need another one." : "");
    this.send = h("button", { type: "submit" });
    this.acts = new Acts(failed, this.send, h("button", { type: "button", on: { click: () => this.#add() } }, "Add a site"));
    const options = h("details", {}, h("summary", {}, `${local ? "Expiry" : "Address, expiry"}, several sites with one invitation`), h("div", { class: "fields" }, local ? null : reached, field("Hours until it expires", this.hours), field("Sites that may join with each", this.uses)));
    this.form = h("form", { hidden: true, on: { submit: (event) => this.#mint(event) } }, this.rows, local ? reached : null, options, this.acts.element);
    this.listing = new Acts(failed);
    this.remark = h("p", { class: "remark" });
    this.gone = h("p", { class: "remark" });
    this.element = h("section", { class: "panel", "aria-labelledby": "invitations" }, h("h2", { id: "invitations" }, "Invitations"), this.remark, this.form, this.made, this.gone, this.list, this.listing.element);
  }

  update({ view, clients, events }) {
    this.element.hidden = ["finished", "failed", "cancelled"].includes(view.state);
    this.view = view;
    this.clients = clients;
    const told = [clients.length, events.filter((one) => one.kind === "enrolment-refused").at(-1)?.id].join();
    const moved = told !== this.told;
    this.told = told;
    if (moved) this.listing.run(() => this.#refresh());
  }

  async #refresh() {
    this.tokens = (await this.api.all(this.path, "tokens")).sort((one, other) => one.created_at.localeCompare(other.created_at));
    if (this.planned === null) {
      const there = Math.max(this.tokens.length, this.clients.length);
      const missing = this.view.state === "enrolling" ? Math.max(0, Math.min(MOST, this.view.spec.participation.min_clients) - there) : 0;
      const free = Array.from({ length: missing + there }, (_, at) => `site-${at + 1}`).filter((name) => !this.#taken(name));
      this.planned = free.slice(0, missing).map((name) => ({ name, role: "trainer" }));
    }
    this.#draw();
  }

  #taken(name) {
    return this.tokens.some((one) => one.name === name) || this.clients.some((one) => one.name === name);
  }

  #draw() {
    this.form.hidden = false;
    this.planned = this.planned.filter((one) => !this.#taken(one.name));
    const open = this.tokens.filter((one) => !one.closed && Date.parse(one.expires_at) > Date.now());
    const coming = open.reduce((sum, one) => sum + one.uses - one.used, this.clients.filter((one) => one.status === "active").length);
    const needed = this.view.spec.participation.min_clients - coming;
    const row = (one, at) => {
      const name = h("input", { id: `site-${at}`, "aria-label": `Name of site ${at + 1}`, value: one.name, autocomplete: "off", spellcheck: "false", maxlength: 64, required: true, on: { input: () => Object.assign(one, { name: name.value.trim() }) } });
      const role = h("select", { "aria-label": `Role of site ${at + 1}`, on: { change: () => Object.assign(one, { role: role.value }) } }, Object.entries(ROLES).map(([value, label]) => h("option", { value }, label)));
      role.value = one.role;
      const drop = () => {
        this.planned.splice(at, 1);
        this.#draw();
      };
      return h("li", {}, name, role, h("button", { type: "button", class: "quiet slim", "aria-label": `Leave out ${one.name}`, on: { click: drop } }, "×"));
    };
    const same = this.drawn?.length === this.planned.length && this.planned.every((one, at) => one === this.drawn[at]);
    if (!same) fill(this.rows, this.planned.map(row)); // whoever types a name keeps the place
    this.drawn = [...this.planned];
    this.send.hidden = this.planned.length === 0;
    say(this.send, `Create ${counted(this.planned.length, "invitation")}`);
    this.send.classList.toggle("primary", this.view.state === "enrolling" && this.view.clients.trainers < this.view.spec.participation.min_clients);
    const planned = this.planned.length ? "Each site joins with an invitation of its own. Give the sites names that you will know them by." : needed > 0 ? `${counted(needed, "more site")} must be invited before it can start.` : "Every site of the plan is invited.";
    say(this.remark, this.view.state === "enrolling" ? planned : "Another site can still join; it takes part from the next round on.");
    say(this.gone, !this.shown && open.some((one) => one.used === 0) ? "An invitation is shown only once. One that was not copied can be made anew below; the former one then ends." : "");
    const standing = (one) => (one.clients.length ? `joined: ${names(one.clients)}` : Date.parse(one.expires_at) < Date.now() ? "expired" : "has not joined yet");
    const line = (one) => [
      [one.name, h("small", { class: "under" }, `${one.client ?? ROLES[one.role ?? ""]}${one.closed ? ", closed" : ""}`)],
      [standing(one), one.refused && h("small", { class: "under error" }, `${one.refused.client} cannot join: ${one.refused.detail}`), h("small", { class: "under" }, `${one.uses > 1 ? `${one.used} of ${counted(one.uses, "site")} joined with it, ` : ""}until ${moment(one.expires_at)}`)],
      forOperators(
        one.used === 0 && !one.client ? h("button", { type: "button", class: "slim", "aria-label": `Make ${one.name} anew`, on: { click: () => this.#renew(one) } }, "Make anew") : null,
        h("button", { type: "button", class: "danger slim", "aria-label": `Revoke ${one.name}`, on: { click: () => this.#revoke(one) } }, "Revoke"),
      ),
    ];
    fill(this.list, this.tokens.length ? table("Invited sites", ["site", "standing", ""], this.tokens.map(line)) : null);
  }

  #add() {
    let number = this.planned.length + this.tokens.length + 1;
    while (this.#taken(`site-${number}`) || this.planned.some((one) => one.name === `site-${number}`)) number += 1;
    this.planned.push({ name: `site-${number}`, role: "trainer" });
    this.#draw();
    this.rows.lastChild.querySelector("input").select();
  }

  async #mint(event) {
    event.preventDefault();
    if (this.send.disabled) return;
    this.send.disabled = true;
    const asked = { uses: Number(this.uses.value), address: this.address.value.trim(), ...(this.hours.value ? { hours: Number(this.hours.value) } : {}) };
    const fresh = [];
    await this.acts.run(async () => {
      try {
        for (const { name, role } of [...this.planned]) fresh.push(await this.api.post(this.path, { ...asked, name, ...(role ? { role } : {}) }));
      } finally {
        if (fresh.length) this.#show(fresh);
        await this.#refresh();
      }
    });
    this.send.disabled = false;
  }

  /** Another invitation in the place of one that nobody has used: of the same name, role and number of sites. */
  #renew({ id, name, role, uses }) {
    return this.listing.run(async () => {
      await this.api.delete(`${this.path}/${encodeURIComponent(id)}`);
      this.#show([await this.api.post(this.path, { name, uses, address: this.address.value.trim(), ...(role ? { role } : {}) })]);
      await this.#refresh();
    });
  }

  /** What to send to each site; nothing shows an invitation again. */
  #show(fresh) {
    this.shown = true;
    const one = (minted) => {
      const text = h("input", { id: `invitation-${minted.id}`, readonly: true, value: minted.invitation, on: { focus: () => text.select() } });
      const copy = async ({ currentTarget: button }) => {
        text.select();
        try {
          await navigator.clipboard.writeText(`${minted.invitation}\n`);
          fill(button, "Copied");
        } catch {
          fill(button, "Selected: copy it"); // where the page is not on this machine and not encrypted
        }
      };
      return h("div", { class: "minted" }, field(`Invitation for ${minted.name}, shown only now`, text), h("button", { type: "button", "aria-label": `Copy the invitation for ${minted.name}`, on: { click: copy } }, "Copy"), h("details", {}, h("summary", {}, "Its token alone, for a client's file"), h("input", { readonly: true, value: minted.token, "aria-label": `Token of ${minted.name}` })));
    };
    const how = h("p", { class: "remark" }, `Send each site its own over a private channel, until ${moment(fresh[0].expires_at)}: whoever has it can join. Send promptfed's wheel too, which `, h("code", {}, "make dist"), " builds. There the owner of the images runs ", h("code", {}, "pip install promptfed-VERSION-py3-none-any.whl"), ", with the file's whole name, then ", h("code", {}, "promptfed join - --data folder:/path/to/images"), ", and pastes it.");
    fill(this.made, h("h3", {}, "To send"), fresh.map(one), how);
    this.made.querySelector("input").focus();
    announce(`${counted(fresh.length, "invitation")} created`);
  }

  async #revoke(token) {
    const text = "Nobody can join with it any more. Clients that have joined stay.";
    if (!(await ask(this.element, { title: `Revoke ${token.name}?`, text, keep: "Keep it", act: "Revoke it" }))) return;
    await this.listing.run(async () => {
      await this.api.delete(`${this.path}/${encodeURIComponent(token.id)}`);
      announce(`${token.name} is revoked`);
      if (!token.used && !token.client) this.planned.push({ name: token.name, role: token.role ?? "" }); // its site is still to be invited
      await this.#refresh();
    });
  }
}

function moment(time) {
  return new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}
