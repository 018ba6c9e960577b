// Who takes part, and whose answers were refused or did not count, with the reason; taking one out.

import { Acts, announce, ask, fill, h, offer, panel, since, table } from "./dom.js";
import { clock, counted, figure } from "./format.js";
import { ENDED } from "./status.js";

const MOST = 50;
const VERDICTS = {
  rejected: "the aggregation rule gave it no part",
  clipped: "it was longer than the rule allows, and was shortened",
  discarded: "the operator withdrew the client with its update",
  unused: "the phase never closed",
};
const ACTS = {
  withdraw: ["Withdraw", "danger", "Withdraw it for good", "is withdrawn", "It is not asked again and is refused from now on. What it sent before stays until its updates are deleted."],
  reset: ["Reset the name", "", "Reset the name", "has its name reset", "Somebody with a token for this very name can enrol under it with a new secret; its place stays. The client that has it now is refused once that has happened."],
  updates: ["Delete its updates", "danger", "Delete them for good", "has its updates deleted", "The tensors that it has sent are gone for good; reports keep their figures."],
};

export class Clients {
  constructor(api, path, failed, changed) {
    Object.assign(this, { api, path, changed, clients: [] });
    this.list = h("div");
    this.refused = h("div");
    this.picked = h("select", { id: "client", on: { change: () => this.#offer() } });
    this.buttons = Object.fromEntries(Object.entries(ACTS).map(([act, [title, kind]]) => [act, h("button", { type: "button", class: kind, on: { click: () => this.#act(act) } }, title)]));
    this.acts = new Acts(failed, h("label", { for: "client" }, "Client "), this.picked, Object.values(this.buttons));
    this.troubles = panel("Refused and failed", { hidden: true }, this.refused);
    this.members = panel("Clients", {}, this.list, h("details", { class: "apart" }, h("summary", {}, "Take a client out, or free its name"), this.acts.element));
    this.element = h("div", { class: "stack" }, this.members, this.troubles);
  }

  update({ view, clients, rounds }) {
    this.over = ENDED.includes(view.state);
    this.clients = clients;
    this.element.hidden = clients.length === 0;
    offer(this.picked, clients.map((one) => one.client_id), (id) => clients.find((one) => one.client_id === id).name);
    this.#offer();
    keepScroll(this.list, () => fill(this.list, clientTable(clients, view.state)));
    const rows = troubles(clients, [...rounds.values()]);
    this.troubles.hidden = rows.length === 0;
    keepScroll(this.refused, () => fill(this.refused, troubleList(rows)));
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

  async #act(act) {
    const one = this.#chosen;
    const [title, , yes, done, text] = ACTS[act];
    const discard = h("input", { type: "checkbox", id: "discard" });
    const extra = act === "withdraw" ? h("label", { class: "radio" }, discard, "Drop its update of the open phase too") : null;
    if (!(await ask(this.members, { title: `${title}: ${one.name}?`, text, extra, keep: "Keep it", act: yes }))) return;
    const at = `${this.path}/clients/${encodeURIComponent(one.client_id)}`;
    const calls = { withdraw: () => this.api.delete(`${at}${discard.checked ? "?discard=true" : ""}`), reset: () => this.api.post(`${at}/reset`), updates: () => this.api.delete(`${at}/updates`) };
    if (!(await this.acts.run(calls[act]))) return;
    announce(`${one.name} ${done}`);
    this.changed();
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
    since(one.last_seen),
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
      for (const line of stage.unreadable) found.push({ at, client: "", what: `cannot be read in ${where}, and is in no figure`, why: line });
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
