// The card of what a federation learned, made of what the API tells: the form of `promptfed export`, which
// `promptfed predict --export` and `promptfed verify` read, without the class weights that only a backbone can make.

import { bytes, measure, percent } from "./format.js";

const WHY = "the coordinator has no backbone: `promptfed export` makes class weights for plain open_clip code";

/** The card as card.json holds it, of the coordinator's facts. `files` get `{bytes, sha256}` by name. */
export function cardOf(facts, view, version) {
  const classNames = view.class_names;
  return {
    ...facts,
    class_names: classNames, // null: each client used its own
    class_names_from: classNames ? `the federation's ${view.spec.class_names ? "spec" : "trainers"}` : null,
    use: { open_clip: false, promptfed: Boolean(classNames), why_not_open_clip: WHY },
    files: {},
    made: { at: new Date().toISOString().replace(/\.\d+Z$/, "+00:00"), promptfed: version },
  };
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
    ["participants", card.participants.map((one) => `${one.name} (${one.role}, ${one.num_samples} images, ${one.updates_counted ?? "withheld"} updates counted)`).join(", ")],
    ["sent", card.bytes ? `${bytes(card.bytes.up)} up, ${bytes(card.bytes.down)} down, and not one image` : "withheld: it would tell how many took part; not one image"],
    ["state", card.hashes.state],
    ["backbone's weights", card.hashes.backbone ?? "not known"],
  ];
  const measured = card.accuracy?.clients.map((one) => [one.client, one.split, percent(one.zero_shot), percent(one.adapted)]) ?? [];
  const parts = [
    `# ${plain(card.federation.name)}: ${plain(card.method.name)} after round ${card.round} of ${card.rounds}`,
    plain(card.summary),
    rows(["", ""], facts),
    card.accuracy ? `## ${measure(card.method.task)} after round ${card.accuracy.round}` : "",
    measured.length ? rows(["client", "test set", "zero-shot", "adapted"], measured) : "",
    `Class weights are not here: ${plain(WHY)}.`,
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
