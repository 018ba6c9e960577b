// Numbers and times as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** 0.3875 -> "38.8 %". */
export function percent(fraction) {
  return fraction === null || fraction === undefined ? "–" : `${(100 * fraction).toFixed(1)} %`;
}

/** What an evaluation's `accuracy` is, by the spec's task, or by that of a card's method. */
export function measure(task) {
  return task === "multi_label" ? "Mean average precision" : "Accuracy";
}

/** Percentage points between two fractions, signed. */
export function gain(before, after) {
  if (before === null || before === undefined || after === null || after === undefined) return "–";
  const points = 100 * (after - before);
  return `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(1)}`;
}

/** The coordinator's 95 % interval in per cent: "76.0–85.5"; none of noisy figures and of precisions. */
export function edges(bounds) {
  return bounds ? [bounds.low, bounds.high].map((edge) => (100 * edge).toFixed(1)).join("–") : "";
}

/** Half of the interval of a gain, behind it. */
export function margin(bounds) {
  return bounds?.margin === undefined ? "" : ` ± ${(100 * bounds.margin).toFixed(1)}`;
}

/** 179700 -> "179.7 kB". */
export function bytes(count) {
  const unit = byteUnit(count);
  return `${unit === 0 ? count : (count / 1000 ** unit).toFixed(1)} ${UNITS[unit]}`;
}

function byteUnit(count) {
  return Math.min(UNITS.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(1, count)) / 3)));
}

/** Bytes and seconds as the ticks of an axis: all in the unit of the `largest`. */
export function byteTick(count, largest) {
  const unit = byteUnit(largest);
  return `${Number((count / 1000 ** unit).toFixed(2))} ${UNITS[unit]}`;
}

export function secondTick(seconds, largest) {
  const [size, unit] = largest >= 7200 ? [3600, "h"] : largest >= 120 ? [60, "min"] : largest >= 1 ? [1, "s"] : [0.001, "ms"];
  return `${Number((seconds / size).toFixed(2))} ${unit}`;
}

export function percentTick(share) {
  return `${Number((100 * share).toFixed(1))} %`;
}

/** 75 -> "1 min 15 s". */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** How long ago an RFC 3339 time was, in its largest unit. */
export function ago(time) {
  if (!time) return "never";
  const seconds = Math.max(0, (Date.now() - Date.parse(time)) / 1000);
  if (seconds < 3) return "just now";
  const units = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, unit] = units.find(([one]) => seconds >= one);
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

/** The clock time of an RFC 3339 time. */
export function clock(time) {
  return time ? new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" }) : "–";
}

/** A few digits of a number. */
export function figure(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  const text = Math.abs(value) >= 1000 ? value.toExponential(1) : value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

/** "1 round", "2 rounds". */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** "a, b and 3 more". */
export function names(list, most = 4) {
  const shown = list.slice(0, most).join(", ");
  return list.length > most ? `${shown} and ${list.length - most} more` : shown;
}
