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

function summarised(clients) {
  const series = [];
  for (const [role, label] of [["trainer", "clients"], ["evaluator", "unseen"]]) {
    const members = clients.filter((one) => one.role === role);
    const rounds = [...new Set(members.flatMap((one) => one.points.map((point) => point.x)))].sort((a, b) => a - b);
    const over = (kind, combine) =>
      rounds.flatMap((x) => {
        const values = members.flatMap((one) => one[kind].filter((point) => point.x === x).map((point) => point.y));
        return values.length ? [{ x, y: combine(values) }] : [];
      });
    const place = series.length;
    const dashed = role === "evaluator";
    series.push({ label: members.length > 1 ? `mean of ${label}` : label, place, data: over("points", mean), dashed });
    series.push({ label: `${label}, zero-shot`, place, data: over("zero", mean), thin: true });
    if (!dashed) {
      series.push({ label: "lowest", place: 6, data: over("points", (values) => Math.min(...values)) });
      series.push({ label: "highest", place: 2, data: over("points", (values) => Math.max(...values)) });
    }
  }
  return series;
}
