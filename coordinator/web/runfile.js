// A run file, which the coordinator reads, and the sites that it lists.

const MOST = 100_000; // clients of an entry

/** What a run file holds: `{spec, sites: [{name, role}]}`. Raises the coordinator's refusal. */
export async function readRun(api, text) {
  const { content } = await api.post("/v1/federations/run-file", { text });
  const { clients, clock: _, ...spec } = content;
  const sites = [clients ?? []].flat().flatMap((entry, at) => {
    const one = Object(entry);
    const count = one.count ?? 1;
    const named = (index) => String(one.name ?? (one.count ? "client-{index}" : `client-${at}`)).replaceAll("{index}", index).replaceAll("{count}", count);
    return Array.from({ length: Math.min(count, MOST) }, (_, index) => ({ name: named(index), role: one.role ?? "trainer" }));
  });
  const trainers = sites.filter((one) => one.role === "trainer").length;
  if (trainers && spec.participation?.min_clients === undefined) spec.participation = { ...spec.participation, min_clients: trainers };
  return { spec, sites };
}
