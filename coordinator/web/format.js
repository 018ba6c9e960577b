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

/** Wilson's 95 % interval of a fraction of `count` images. */
export function interval(share, count) {
  const [z, spread] = [1.96, 1.96 ** 2 / count];
  const half = z * Math.sqrt((share * (1 - share)) / count + spread / (4 * count));
  return [share + spread / 2 - half, share + spread / 2 + half].map((edge) => Math.min(1, Math.max(0, edge / (1 + spread))));
}

/** The variance of a fraction of `count` images (Agresti and Caffo). */
function variance(share, count) {
  const moved = (share * count + 1) / (count + 2);
  return (moved * (1 - moved)) / (count + 2);
}

/** The 95 % interval of the mean over sites, each counting once, of `[{share, count}]`. */
export function meanInterval(sites) {
  if (sites.length === 1) return interval(sites[0].share, sites[0].count);
  const mean = sites.reduce((sum, { share }) => sum + share, 0) / sites.length;
  const half = (1.96 * Math.sqrt(sites.reduce((sum, { share, count }) => sum + variance(share, count), 0))) / sites.length;
  return [Math.max(0, mean - half), Math.min(1, mean + half)];
}

/**
 * Half of the 95 % interval of a mean gain, of `[{before, after, count}]` (Agresti and Caffo). Both fractions are of the
 * same images, which is left out of account: the interval is rather too wide than too narrow.
 */
export function gainMargin(pairs) {
  const all = pairs.reduce((sum, { before, after, count }) => sum + variance(before, count) + variance(after, count), 0);
  return (1.96 * Math.sqrt(all)) / pairs.length;
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
