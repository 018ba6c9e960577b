// One series a client for a chart, or of many clients their mean, lowest and highest.

export const MANY = 8;

/** Clients as `{name, role, label, points: [{x, y}], zero: [{x, y}]}` become what a Plot draws. */
export function drawn(clients, places) {
  if (clients.length > MANY) return summarised(clients);
  return clients.flatMap((one) => {
    const place = places.get(one.name) ?? 0;
    const dashed = one.role === "evaluator";
    return [{ label: one.label, place, data: one.points, dashed }, { label: `${one.name}, zero-shot`, place, data: one.zero, thin: true }];
  });
}

export function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** `[[round, values of all clients]]`, in one pass: a thousand clients have a hundred thousand points. */
function byRound(members, kind) {
  const found = new Map();
  for (const one of members) {
    for (const { x, y } of one[kind]) {
      if (!found.has(x)) found.set(x, []);
      found.get(x).push(y);
    }
  }
  return [...found].sort(([one], [other]) => one - other);
}

function summarised(clients) {
  const series = [];
  for (const [role, label] of [["trainer", "clients"], ["evaluator", "unseen"]]) {
    const members = clients.filter((one) => one.role === role);
    const [points, zero] = ["points", "zero"].map((kind) => byRound(members, kind));
    const over = (kind, combine) => (kind === "zero" ? zero : points).map(([x, values]) => ({ x, y: combine(values) }));
    const place = series.length;
    const dashed = role === "evaluator";
    series.push({ label: members.length > 1 ? `mean of ${label}` : label, place, data: over("points", mean), dashed });
    series.push({ label: `${label}, zero-shot`, place, data: over("zero", mean), thin: true });
    if (!dashed) {
      series.push({ label: "lowest", place: 6, data: over("points", (values) => values.reduce((one, other) => Math.min(one, other))) });
      series.push({ label: "highest", place: 2, data: over("points", (values) => values.reduce((one, other) => Math.max(one, other))) });
    }
  }
  return series;
}
