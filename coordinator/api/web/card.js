// The card of what a federation learned, made of what the API tells: the form of `promptfed export`, which
// `promptfed predict --export` and `promptfed verify` read, without the class weights that only a backbone can make.

import { bytes, percent } from "./format.js";
import { mean } from "./series.js";

const WHY = "the coordinator has no backbone: `promptfed export` makes class weights for plain open_clip code";

/** The card as card.json holds it. `state` is `{round, hash, signature, sha256, bytes}`. */
export function cardOf({ view, clients, rounds }, method, state, version) {
  const reports = [...rounds.values()].filter((one) => one.round <= state.round);
  const { spec } = view;
  return {
    format: 1,
    federation: { name: view.name, id: view.id, state: view.state },
    method: spec.method,
    summary: method?.summary ?? "",
    paper: method?.paper ?? "",
    backbone: { ...spec.backbone, fingerprint: view.backbone.fingerprint, shape: view.backbone.shape },
    template: spec.template ?? "a photo of a {}.",
    class_names: spec.class_names, // null: each client used its own
    class_names_from: spec.class_names ? "the federation's spec" : null,
    round: state.round,
    rounds: spec.rounds,
    training: spec.training,
    seed: spec.seed,
    domains: clients.filter((one) => one.role === "trainer" && one.domain).map((one) => one.domain),
    participants: clients.map((one) => participant(one, reports)),
    accuracy: accuracies(reports),
    bytes: { up: sum(reports, "bytes_up"), down: sum(reports, "bytes_down") },
    use: { open_clip: false, promptfed: Boolean(spec.class_names), why_not_open_clip: WHY },
    hashes: { state: state.hash, backbone: view.backbone.fingerprint, spec: null },
    ...(state.signature ? { signature: state.signature } : {}),
    files: { "prompts.safetensors": { bytes: state.bytes, sha256: state.sha256 } },
    made: { at: new Date().toISOString().replace(/\.\d+Z$/, "+00:00"), promptfed: version },
  };
}

function sum(reports, key) {
  return reports.reduce((total, one) => total + one[key], 0);
}

function participant(one, reports) {
  const counted = reports.flatMap((report) => report.phases.flatMap((phase) => phase.counted)).filter((update) => update.client === one.name);
  return { name: one.name, role: one.role, domain: one.domain?.name ?? null, num_samples: one.num_samples, num_classes: one.num_classes, updates_counted: counted.length };
}

function accuracies(reports) {
  const last = reports.filter((one) => one.evaluation && Object.keys(one.evaluation.clients).length).at(-1);
  if (!last) return null;
  const rows = Object.entries(last.evaluation.clients).sort().flatMap(([client, one]) =>
    Object.entries(one.splits).sort().map(([split, { accuracy, num_samples }]) => {
      const zero = one.zero_shot[split.split("@")[0]]?.accuracy ?? null;
      return { client, role: one.role, split, adapted: accuracy, zero_shot: zero, num_samples };
    }),
  );
  const means = {};
  for (const role of [...new Set(rows.map((one) => one.role))].sort()) {
    const own = rows.filter((one) => one.role === role && one.split === "test");
    const template = own.map((one) => one.zero_shot).filter((value) => value !== null);
    means[role] = { ...(own.length ? { adapted: mean(own.map((one) => one.adapted)) } : {}), ...(template.length ? { zero_shot: mean(template) } : {}) };
  }
  return { round: last.round, clients: rows, mean: means };
}

/** The card for people. */
export function markdown(card) {
  const facts = [
    ["method", `${card.method.name}: ${card.paper}`],
    ["hyperparameters", settings(card.method)],
    ["training", settings(card.training)],
    ["backbone", [card.backbone.model, card.backbone.pretrained ?? "random", card.backbone.precision].join(", ")],
    ["classes", card.class_names ? card.class_names.join(", ") : "each client's own"],
    ["template", card.template],
    ["participants", card.participants.map((one) => `${one.name} (${one.role}, ${one.num_samples} images, ${one.updates_counted} updates counted)`).join(", ")],
    ["sent", `${bytes(card.bytes.up)} up, ${bytes(card.bytes.down)} down, and not one image`],
    ["state", card.hashes.state],
    ["backbone's weights", card.hashes.backbone ?? "not known"],
  ];
  const measured = card.accuracy?.clients.map((one) => [one.client, one.split, percent(one.zero_shot), percent(one.adapted)]) ?? [];
  const parts = [
    `# ${plain(card.federation.name)}: ${plain(card.method.name)} after round ${card.round} of ${card.rounds}`,
    plain(card.summary),
    rows(["", ""], facts),
    card.accuracy ? `## Accuracy after round ${card.accuracy.round}` : "",
    measured.length ? rows(["client", "test set", "zero-shot", "adapted"], measured) : "",
    `There are no class weights for plain open\\_clip code here: ${plain(WHY)}.`,
    `Made at ${card.made.at} at the coordinator's page.`,
  ];
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

function settings(section) {
  return Object.entries(section).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
}

function rows(head, body) {
  const line = (cells) => `| ${cells.map((cell) => plain(cell)).join(" | ")} |`;
  return [line(head), `|${head.map(() => "---|").join("")}`, ...body.map(line)].join("\n");
}

/** One line that is neither markup nor HTML, whoever wrote it. */
function plain(text) {
  return String(text).replace(/\s+/g, " ").replace(/[\\`*_[\]|#!~]/g, "\\$&").replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
