// Who takes part, and whose answers were refused or did not count, with the reason.

import { fill, h, panel, table } from "./dom.js";
import { ago, clock, counted, figure } from "./format.js";

const MOST = 50;
const VERDICTS = {
  rejected: "the aggregation rule gave it no part",
  clipped: "it was longer than the rule allows, and was shortened",
  discarded: "the operator withdrew the client with its update",
  unused: "the phase never closed",
};

export class Clients {
  constructor() {
    this.list = h("div");
    this.refused = h("div");
    this.element = h("div", { class: "pair" }, panel("Clients", {}, this.list), panel("Refused and failed", {}, this.refused));
  }

  update({ clients, rounds }) {
    keepScroll(this.list, () => fill(this.list, clients.length ? clientTable(clients) : h("p", { class: "empty" }, "Nobody has enrolled yet. `promptfed federation token` mints the token that clients join with.")));
    const rows = troubles(clients, [...rounds.values()]);
    keepScroll(this.refused, () => fill(this.refused, rows.length ? troubleList(rows) : h("p", { class: "empty" }, "Nothing has been refused, and nobody has failed.")));
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

function clientTable(clients) {
  const rows = clients.map((one) => [
    [one.name, h("small", { class: "under" }, [one.role, one.domain?.name, one.device].filter(Boolean).join(" · "), standing(one))],
    one.num_samples.toLocaleString("en"),
    ago(one.last_seen),
    String(one.refusals),
  ]);
  const number = (title) => ({ title, class: "number" });
  return table(counted(clients.length, "client"), ["client", number("images"), number("last seen"), number("refusals")], rows);
}

function standing(one) {
  if (one.status === "withdrawn") return " · withdrawn";
  if (one.reset) return " · its name was reset";
  return one.joined ? "" : " · joins at the next round";
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
      for (const name of stage.expired) found.push({ at, client: name, what: `silent in ${where}`, why: "its answer did not come before the deadline" });
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
