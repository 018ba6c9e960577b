// The settings in words: a name is the first part of what the coordinator's schema says of it.

const NAMES = { "method.name": "Method" };

/** Take the names of these settings into sentences of the coordinator's. */
export function learn(fields) {
  for (const { path, about } of fields) NAMES[path] = nameOf(path, about);
}

/** The name of a setting for people. */
export function nameOf(path, about = "") {
  if (path in NAMES) return NAMES[path];
  // The first part of its description that is more than a value's name; a Greek letter stays as it is.
  const key = path.split(".").at(-1).replaceAll("_", " ");
  const said = about.split(/[;:.] |[;:]$/).map((part) => (part.length < 90 ? part : part.split(", ")[0])).find((part) => part.includes(" ") || part === key) ?? key;
  return said.replace(/^[a-z]/, (letter) => letter.toUpperCase());
}

/** What a description says beyond the name. */
export function restOf(path, about) {
  const name = nameOf(path, about);
  return spoken(about.toLowerCase().startsWith(name.toLowerCase()) ? about.slice(name.length).replace(/^[;:.,]?\s*/, "") : about);
}

/** The name of a setting whose path, or the last part of it, stands in a sentence. */
const named = (key) => NAMES[key] ?? Object.entries(NAMES).find(([path]) => key.includes("_") && path.endsWith(`.${key}`))?.[1];

/** A sentence of the coordinator's with the names of settings in the place of their keys. */
export function spoken(text) {
  return text.replace(/[a-z]+(?:[._][a-z_]+)+/g, (key) => (named(key) ? `“${named(key)}”` : key));
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
