// The settings in words; a setting without a name here has that of its description, or its own name in the specification.

const NAMES = {
  name: "Name", task: "Labels of an image", class_names: "Classes", template: "Sentence around a class name", continues: "State that it continues",
  licence: "Licence of the result", rounds: "Rounds", retention: "Tensors that are kept", start: "Begins", seed: "Seed of random numbers",
  "origin.card": "Card of the result it starts from", "origin.federation": "Result it starts from", "origin.licence": "Licence of that result",
  "method.name": "Method", "method.label_space": "Classes that are told apart", "method.weighting": "Weights of sites", "method.m": "Learned vectors",
  "backbone.model": "Model", "backbone.pretrained": "Weights of the model", "backbone.precision": "Precision of the model", "backbone.fingerprint": "Fingerprint of the weights",
  "training.epochs": "Passes over the images in a round", "training.batch_size": "Images of a step", "training.optimizer": "Optimizer", "training.learning_rate": "Learning rate",
  "training.momentum": "Momentum", "training.weight_decay": "Weight decay", "training.schedule": "Course of the learning rate", "training.augmentation": "Changes of training images",
  "training.views": "Views of each image", "training.threads": "Processor threads", "training.deterministic": "The same numbers in every repetition", "training.tf32": "Faster multiplication on GPUs",
  "participation.min_clients": "Sites that must have joined", "participation.fraction": "Share of sites asked in a round", "participation.quorum": "Share of those asked that must answer",
  "participation.deadline_seconds": "Seconds for an answer", "participation.on_missed_quorum": "If too few answer", "participation.draw": "Where the draw of sites comes from",
  "participation.sampling": "How sites are drawn", "compression.up": "Encoding of changes", "aggregation.weighting": "What weighs a site", "aggregation.rule": "How updates become one",
  "aggregation.tolerate": "Share of updates that may be bad", "aggregation.clip_norm": "Longest change of a site", "aggregation.max_weight_share": "Largest weight of a site",
  "aggregation.server.optimizer": "Optimizer of the coordinator", "aggregation.server.learning_rate": "Learning rate of the coordinator", "aggregation.server.momentum": "Momentum of the coordinator",
  "aggregation.server.beta1": "First moment's decay at the coordinator", "aggregation.server.beta2": "Second moment's decay at the coordinator", "aggregation.server.tau": "Least second moment at the coordinator",
  "secure_aggregation.threshold": "Share of sites that open a secure sum", "secure_aggregation.minimum": "Sites of a secure sum, at least", "secure_aggregation.step_seconds": "Seconds for a step of a secure sum",
  "evaluation.every": "Rounds between evaluations", "admission.max_bytes": "Most bytes of an update", "admission.max_update_norm": "Longest accepted change",
  "privacy.level": "What noise protects", "privacy.clip": "Longest contribution (C)", "privacy.noise_multiplier": "Noise, in contributions (z)", "privacy.epsilon": "Privacy budget (ε)",
  "privacy.delta": "Privacy budget's δ", "privacy.unit": "Unit that is protected", "privacy.per_group": "Images of a group that count", "privacy.evaluation": "Accuracies that leave a site",
  "privacy.evaluation_epsilon": "ε of a noisy count", "privacy.accept_noise": "Run with more noise than signal", "selection.metric": "What chooses the best round",
  "selection.split": "Images that choose the best round", "selection.share": "Share of images held out for the choice",
};

/** The name of a setting for people. */
export function nameOf(path, about = "") {
  if (path in NAMES) return NAMES[path];
  // The first part of its description that is more than a value's name; a Greek letter stays as it is.
  const said = about.split(/[;:.] |[;:]$/).map((part) => (part.length < 90 ? part : part.split(", ")[0])).find((part) => part.includes(" ")) ?? path.split(".").at(-1).replaceAll("_", " ");
  return said.replace(/^[a-z]/, (letter) => letter.toUpperCase());
}

/** What a description says beyond the name. */
export function restOf(path, about) {
  const name = nameOf(path, about);
  return spoken(about.toLowerCase().startsWith(name.toLowerCase()) ? about.slice(name.length).replace(/^[;:.,]?\s*/, "") : about);
}

const BY_LAST = Object.fromEntries(Object.keys(NAMES).filter((path) => /_/.test(path.split(".").at(-1))).map((path) => [path.split(".").at(-1), NAMES[path]]));

/** A sentence of the coordinator's with the names of settings in the place of their keys. */
export function spoken(text) {
  return text.replace(/[a-z]+(?:[._][a-z_]+)+/g, (key) => (NAMES[key] ?? BY_LAST[key] ? `“${NAMES[key] ?? BY_LAST[key]}”` : key));
}

/** A value of a setting as text. */
export function told(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.length > 6 ? `${value.slice(0, 6).join(", ")} and ${value.length - 6} more` : value.join(", ");
  return /^[a-z]+(_[a-z]+)+$/.test(value) ? value.replaceAll("_", " ") : String(value);
}

/** What the coordinator finds wrong, in these names. */
export function inNames(errors) {
  return errors.map(({ path, detail }) => `${nameOf(path)}: ${spoken(detail)}`).join(". ");
}
