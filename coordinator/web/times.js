// Bytes and seconds: what rounds and clients take, and when it will be over.

import { Plot } from "./charts.js";
import { fill, h, panel, table } from "./dom.js";
import { bytes, byteTick, clock, duration, figure, secondTick } from "./format.js";
import { mean } from "./series.js";
import { shownFigure } from "./status.js";

const RECENT = 5; // rounds whose mean tells how long the next ones take

/** Seconds until the last round is over, from the newest rounds; null where nothing tells. */
export function secondsLeft(view, reports) {
  if (view.state !== "running") return null;
  const over = reports.filter((one) => one.round > 0 && one.ended_at !== null && one.seconds !== null);
  if (!over.length) return null;
  const left = view.spec.rounds - over.at(-1).round;
  const since = (Date.now() - Date.parse(over.at(-1).ended_at)) / 1000;
  const each = mean(over.slice(-RECENT).map((one) => one.seconds));
  // However late the open round is, those after it still take their time.
  return (left - 1) * each + Math.max(0, each - Math.max(0, since));
}

/** Seconds from the start until the end, or until now. */
export function elapsed(view) {
  if (!view.started_at) return null;
  return (Date.parse(view.ended_at ?? new Date().toISOString()) - Date.parse(view.started_at)) / 1000;
}

export class Times {
  constructor() {
    this.plot = new Plot("bar", "Seconds by round", { x: "round", format: (value) => `${figure(value, 2)} s`, tick: secondTick, zero: true });
    this.figures = h("dl", { class: "figures small" });
    this.clients = h("div");
    this.element = panel("Time", {}, this.figures, this.plot.element, this.clients);
  }

  update({ view, rounds }) {
    const reports = [...rounds.values()];
    const over = reports.filter((one) => one.seconds !== null);
    this.element.hidden = !over.length;
    const trained = over.filter((one) => one.round > 0);
    const took = elapsed(view);
    fill(this.figures, [["Elapsed", took === null ? "–" : duration(took)], ["A round", trained.length ? `${tenth(mean(trained.map((one) => one.seconds)))} s` : "–"], view.ended_at && ["Ended", clock(view.ended_at)]].filter(Boolean).map(([name, value]) => shownFigure([name, [value]])));
    const rows = byClient(reports);
    fill(this.clients, rows.length ? clientTable(rows) : null);
    if (!over.length) return;
    const stages = [...new Set(over.flatMap((one) => stagesOf(one).map(([name]) => name)))];
    const data = (wanted) => over.flatMap((one) => stagesOf(one).filter(([name]) => name === wanted).map(([, stage]) => ({ x: one.round, y: stage.seconds ?? 0 })));
    const last = over.at(-1);
    this.plot.update(stages.map((label, place) => ({ label, place, data: data(label) })), `Seconds by round; round ${last.round} took ${tenth(last.seconds)} s`);
  }
}

/** Bytes by round, up and down. */
export class Traffic {
  constructor() {
    this.plot = new Plot("bar", "Bytes by round", { x: "round", format: bytes, tick: byteTick, zero: true });
    this.element = panel("Bytes", {}, this.plot.element);
  }

  update({ rounds }) {
    const all = [...rounds.values()].filter((one) => one.bytes_up || one.bytes_down);
    this.element.hidden = all.length === 0;
    if (!all.length) return;
    const series = [["up: updates", "bytes_up"], ["down: payloads", "bytes_down"]].map(([label, key], place) => ({ label, place, data: all.map((one) => ({ x: one.round, y: one[key] })) }));
    const last = all.at(-1);
    this.plot.update(series, `Bytes by round; round ${last.round}: ${bytes(last.bytes_up)} up, ${bytes(last.bytes_down)} down`);
  }
}

function stagesOf(report) {
  return [...report.phases.map((phase) => [phase.phase, phase]), ...(report.evaluation ? [["evaluation", report.evaluation]] : [])];
}

/** What clients need: seconds of training as they tell them, and from being asked to the answer. */
function byClient(reports) {
  const found = new Map();
  for (const phase of reports.flatMap((one) => one.phases)) {
    for (const one of phase.updates) {
      if (!found.has(one.client)) found.set(one.client, { name: one.client, trained: [], answered: [] });
      const row = found.get(one.client);
      if (Number.isFinite(one.metrics.train_seconds)) row.trained.push(one.metrics.train_seconds);
      row.answered.push((Date.parse(one.received_at) - Date.parse(phase.opened_at)) / 1000);
    }
  }
  return [...found.values()].sort((one, other) => mean(other.answered) - mean(one.answered));
}

function clientTable(rows) {
  const number = (title) => ({ title, class: "number" });
  const cells = rows.map((one) => [one.name, one.trained.length ? `${tenth(mean(one.trained))} s` : "–", `${tenth(mean(one.answered))} s`, `${tenth(Math.max(...one.answered))} s`]);
  return table("Seconds of each client", ["client", number("trains"), number("answers in"), number("at most")], cells);
}

function tenth(seconds) {
  return Math.round(10 * seconds) / 10;
}
