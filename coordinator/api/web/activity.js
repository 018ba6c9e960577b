// What has happened, newest first.

import { fill, h, panel } from "./dom.js";
import { clock, names } from "./format.js";

export const SHOWN = 60; // events, the newest ones

export class Activity {
  constructor() {
    this.list = h("ol", { class: "activity", tabindex: "0", "aria-label": "Activity, newest first" });
    this.element = panel("Activity", {}, this.list);
    this.shown = null;
  }

  update({ events }) {
    const newest = [...events].reverse();
    if (newest[0]?.id === this.shown) return;
    this.shown = newest[0]?.id;
    fill(this.list, newest.map((one) => h("li", {}, h("time", { datetime: one.at }, clock(one.at)), h("span", {}, sentence(one)))));
  }
}

function sentence(one) {
  const where = `round ${one.round}, ${one.phase}`;
  switch (one.kind) {
    case "federation-created": return "created";
    case "federation-state": return `the federation is ${one.state}${one.reason ? `: ${one.reason}` : ""}`;
    case "client-enrolled": return `${one.client ?? one.name} enrolled`;
    case "phase-opened": return `${where}: ${names(one.asked)} asked`;
    case "clients-asked": return `${where}: ${names(one.asked)} asked too`;
    case "phase-extended": return `${where}: too few answered, extended once`;
    case "task-settled": return `${where}: ${one.client} ${one.status}`;
    case "phase-closed": return `${where}: closed, ${one.counted.length} counted`;
    case "phase-completed": return `${where}: completed`;
    case "clients-joined": return `${names(one.clients)} joined the state`;
    case "client-withdrawn": return `${one.client} was withdrawn`;
    case "client-reset": return `the name ${one.client} was reset`;
    case "state-committed": return `state of round ${one.round} committed (${one.origin})`;
    case "initial-state-supplied": return "an initial state was supplied";
    default: return one.kind.replaceAll("-", " ");
  }
}

