// Who takes part, and whose answers were refused or did not count, with the reason; taking one out.

import { ask } from "./dialog.js";
import { announce, fill, h, panel, table } from "./dom.js";
import { ago, clock, counted, figure } from "./format.js";

const MOST = 50;
const VERDICTS = {
  rejected: "the aggregation rule gave it no part",
  clipped: "it was longer than the rule allows, and was shortened",
  discarded: "the operator withdrew the client with its update",
  unused: "the phase never closed",
};

export class Clients {
  constructor(api, path, tell, changed) {
    this.api = api;
    this.path = path;
    this.tell = tell;
    this.changed = changed;
    this.list = h("div");
    this.refused = h("div");
    this.picked = h("select", { id: "client", on: { change: () => this.#offer() } });
    this.buttons = {
      withdraw: h("button", { type: "button", class: "danger", on: { click: () => this.#withdraw() } }, "Withdraw"),
      reset: h("button", { type: "button", on: { click: () => this.#reset() } }, "Reset the name"),
      updates: h("button", { type: "button", class: "danger", on: { click: () => this.#deleteUpdates() } }, "Delete its updates"),
    };
    const acts = h("div", { class: "acts" }, h("label", { for: "client" }, "Client "), this.picked, Object.values(this.buttons));
    this.acts = h("details", { class: "apart", hidden: true }, h("summary", {}, "Take a client out, or free its name"), acts);
    this.element = h("div", { class: "pair" }, panel("Clients", {}, this.list, this.acts), panel("Refused and failed", {}, this.refused));
  }

  update({ view, clients, rounds }) {
    this.over = ["finished", "failed", "cancelled"].includes(view.state);
    this.clients = clients;
    this.acts.hidden = clients.length === 0;
    const known = [...this.picked.options].map((option) => option.textContent).join("\n");
    if (known !== clients.map((one) => one.name).join("\n")) {
      const chosen = this.picked.value;
      fill(this.picked, clients.map((one) => h("option", { value: one.client_id }, one.name)));
      if (clients.some((one) => one.client_id === chosen)) this.picked.value = chosen;
    }
    this.#offer();
    keepScroll(this.list, () => fill(this.list, clients.length ? clientTable(clients, view.state) : h("p", { class: "empty" }, "Nobody has enrolled yet. Create an invitation below for each data owner.")));
    const rows = troubles(clients, [...rounds.values()]);
    keepScroll(this.refused, () => fill(this.refused, rows.length ? troubleList(rows) : h("p", { class: "empty" }, "Nothing has been refused, and nobody has failed.")));
  }

  get #chosen() {
    return this.clients.find((one) => one.client_id === this.picked.value);
  }

  #offer() {
    const one = this.#chosen;
    const gone = one?.status === "withdrawn";
    this.buttons.withdraw.disabled = !one || gone || this.over;
    this.buttons.reset.disabled = !one || gone;
    this.buttons.updates.disabled = !one || !(gone || this.over);
    this.buttons.updates.title = this.buttons.updates.disabled ? "once it is withdrawn, or all is over" : "";
  }

  async #withdraw() {
    const one = this.#chosen;
    const discard = h("input", { type: "checkbox", id: "discard" });
    const extra = h("p", { class: "check" }, discard, h("label", { for: "discard" }, "Drop its update of the open phase too"));
    const text = "It is not asked again and is refused from now on. What it sent before stays until its updates are deleted.";
    if (!(await ask(this.element, { title: `Withdraw ${one.name}?`, text, extra, keep: "Keep it", act: "Withdraw it for good" }))) return;
    await this.#act(() => this.api.delete(`${this.#at(one)}${discard.checked ? "?discard=true" : ""}`), `${one.name} is withdrawn`);
  }

  async #reset() {
    const one = this.#chosen;
    const text = "Somebody with a token for this very name can enrol under it with a new secret; its place stays. The client that has it now is refused once that has happened.";
    if (!(await ask(this.element, { title: `Reset the name ${one.name}?`, text, keep: "Leave it", act: "Reset the name" }))) return;
    await this.#act(() => this.api.post(`${this.#at(one)}/reset`), `The name ${one.name} is reset`);
  }

  async #deleteUpdates() {
    const one = this.#chosen;
    const text = "The tensors that it has sent are gone for good; reports keep their figures.";
    if (!(await ask(this.element, { title: `Delete the updates of ${one.name}?`, text, keep: "Keep them", act: "Delete them for good" }))) return;
    await this.#act(() => this.api.delete(`${this.#at(one)}/updates`), `The updates of ${one.name} are deleted`);
  }

  #at(one) {
    return `${this.path}/clients/${encodeURIComponent(one.client_id)}`;
  }

  async #act(call, done) {
    this.tell(null);
    try {
      await call();
      announce(done);
      this.changed();
    } catch (error) {
      this.tell(error);
    }
  }
}

/** Replace a table without losing where its reader has scrolled to, or the keyboard's place. */
function keepScroll(place, change) {
  const region = place.querySelector(".scrolls");
  const { scrollLeft = 0, scrollTop = 0 } = region ?? {};
  const focused = region !== null && region === document.activeElement;
  change();
  const now = place.querySelector(".scrolls");
  if (now === null) return;
  now.scrollLeft = scrollLeft;
  now.scrollTop = scrollTop;
  if (focused) now.focus();
}

function clientTable(clients, state) {
  const rows = clients.map((one) => [
    [one.name, h("small", { class: "under" }, [one.role, one.domain?.name, one.device].filter(Boolean).join(" · "), standing(one, state))],
    one.num_samples.toLocaleString("en"),
    ago(one.last_seen),
    String(one.refusals),
  ]);
  const number = (title) => ({ title, class: "number" });
  return table(counted(clients.length, "client"), ["client", number("images"), number("last seen"), number("refusals")], rows);
}

function standing(one, state) {
  if (one.status === "withdrawn") return " · withdrawn";
  if (one.reset) return " · its name was reset";
  return one.joined || state === "enrolling" ? "" : " · joins at the next round";
}

function troubles(clients, rounds) {
  const found = [];
  for (const one of clients) {
    const last = one.last_refusal;
    if (last) found.push({ at: last.at, client: one.name, what: `refused: ${last.type}`, why: last.detail });
  }
  for (const report of rounds) {
    for (const stage of [...report.phases, ...(report.evaluation ? [report.evaluation] : [])]) {
      const where = `round ${report.round}, ${stage.phase ?? "evaluation"}`;
      const at = stage.closed_at ?? stage.opened_at;
      for (const one of stage.failed) found.push({ at, client: one.client, what: `failed in ${where}: ${one.type}`, why: one.detail });
      for (const name of stage.expired) found.push({ at, client: name, what: `no answer in ${where}`, why: "it had not answered when this ended" });
      for (const one of stage.updates ?? []) {
        if (one.far) found.push({ at: one.received_at, client: one.client, what: `far off in ${where}`, why: `its change is ${figure(one.far)} times as long as the round's median` });
        if (VERDICTS[one.verdict]) found.push({ at: one.received_at, client: one.client, what: `${one.verdict} in ${where}`, why: judged(one) });
      }
    }
  }
  return found.sort((one, other) => (one.at < other.at ? 1 : -1)).slice(0, MOST);
}

function judged(update) {
  const share = update.influence === null ? "" : `; share of the aggregate ${figure(update.influence)}`;
  const far = update.distance === null ? "" : `, distance from it ${figure(update.distance)}`;
  return `${VERDICTS[update.verdict]}${share}${far}`;
}

function troubleList(rows) {
  const item = (one) => h("li", {}, h("p", {}, h("b", {}, one.client), " ", one.what, h("time", { datetime: one.at }, clock(one.at))), h("p", { class: "remark" }, one.why));
  return h("ol", { class: "troubles scrolls", tabindex: "0", "aria-label": "Refused and failed, newest first" }, rows.map(item));
}
