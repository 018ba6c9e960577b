// Bytes by round, up and down.

import { Plot } from "./charts.js";
import { h, panel } from "./dom.js";
import { bytes } from "./format.js";

export class Traffic {
  constructor() {
    this.plot = new Plot("bar", "Bytes by round", { x: "round", format: bytes, zero: true });
    this.empty = h("p", { class: "empty" }, "Nothing has travelled yet.");
    this.element = panel("Traffic", {}, this.empty, this.plot.element);
  }

  update({ rounds }) {
    const all = [...rounds.values()].filter((one) => one.bytes_up || one.bytes_down);
    this.empty.hidden = all.length > 0;
    this.plot.element.hidden = all.length === 0;
    if (!all.length) return;
    const data = (key) => all.map((one) => ({ x: one.round, y: one[key] }));
    const series = [
      { label: "up: updates", place: 0, data: data("bytes_up") },
      { label: "down: payloads", place: 1, data: data("bytes_down") },
    ];
    const last = all.at(-1);
    this.plot.update(series, `Bytes by round; round ${last.round}: ${bytes(last.bytes_up)} up, ${bytes(last.bytes_down)} down`);
  }

  end() {
    this.plot.destroy();
  }
}
