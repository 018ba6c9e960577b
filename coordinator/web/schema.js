// What a spec may hold, as the coordinator describes it itself (/openapi.json), with a method's own part and defaults.

import { learn, told } from "./words.js";

const SPEC = "FederationSpec";
export const PINNED = /^backbone\.(shape($|\.)|fingerprint$)/; // what clients tell of a backbone, and a spec may fix

/**
 * The fields of a spec with `method` (as GET /v1/methods/{name} tells, or null) on `backbone` (`{model, pretrained}`, or
 * null for the default one): `[{path, choices, standard, about}]`, sections opened.
 */
export async function fieldsOf(api, method, backbone = null) {
  const { components } = await api.once("/openapi.json");
  const found = walk(components.schemas[SPEC], components.schemas, "", {});
  const own = method === null ? [] : walk(method.hyperparameters, method.hyperparameters.$defs ?? {}, "method.", {});
  const others = found.filter((one) => one.path !== "method");
  const fields = [...others.slice(0, 1), ...own, ...others.slice(1)];
  for (const [path, value] of Object.entries(method === null ? {} : flat(method.defaults))) {
    const field = fields.find((one) => one.path === path);
    if (field) field.standard = value;
  }
  if (method !== null) fields.find((one) => one.path === "backbone.model").standard = method.default_backbone;
  const standard = (path) => fields.find((one) => one.path === path)?.standard ?? null;
  const on = backbone ?? { model: standard("backbone.model"), pretrained: standard("backbone.pretrained") };
  const swept = method?.swept?.find((one) => one.model === on.model && one.pretrained === on.pretrained);
  for (const [name, value] of Object.entries(swept?.training ?? {})) fields.find((one) => one.path === `training.${name}`).standard = value;
  learn(fields);
  return fields;
}

/** The fields of a federation's spec. A method that this coordinator lacks has no defaults; its settings are shown all the same. */
export async function resolvedFields(api, spec) {
  const method = await api.once(`/v1/methods/${encodeURIComponent(spec.method.name)}`).catch(() => null);
  return fieldsOf(api, method, spec.backbone).catch(() => []);
}

function walk(schema, known, prefix, standards) {
  return Object.entries(schema.properties ?? {}).flatMap(([name, given]) => {
    const property = given.$ref ? { ...known[given.$ref.split("/").at(-1)], standard: given.default } : given;
    const standard = standards?.[name] ?? given.default ?? null;
    const path = prefix + name;
    const choices = property.anyOf?.map((one) => (one.$ref ? known[one.$ref.split("/").at(-1)] : one)) ?? [property];
    const sections = choices.filter((one) => one.properties);
    if (sections.length && path !== "method") return walk(sections[0], known, `${path}.`, standard ?? {});
    return [{ path, standard, about: property.description ?? "", choices }];
  });
}

/** `{training: {epochs: 1}}` -> `{"training.epochs": 1}`; lists stay whole. */
export function flat(section, prefix = "") {
  const found = {};
  for (const [key, value] of Object.entries(section ?? {})) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) Object.assign(found, flat(value, `${prefix}${key}.`));
    else found[prefix + key] = value;
  }
  return found;
}

/** `["training.epochs", 2]...` -> `{training: {epochs: 2}}`. */
export function nested(entries) {
  const whole = {};
  for (const [path, value] of entries) {
    const names = path.split(".");
    let place = whole;
    for (const name of names.slice(0, -1)) place = place[name] ??= {};
    place[names.at(-1)] = value;
  }
  return whole;
}

/** The same settings of a federation: `[{path, value, standard, differs, about}]`, what differs from its default first. */
export function settingsOf(spec, fields) {
  const given = flat(spec);
  const known = new Map(fields.map((one) => [one.path, one]));
  const paths = [...new Set([...known.keys(), ...Object.keys(given)])];
  const rows = paths.map((path) => {
    const field = known.get(path);
    const standard = field?.standard ?? null;
    const value = path in given ? given[path] : standard;
    const own = path === "name" || path === "method.name" || PINNED.test(path);
    return { path, value, standard, about: field?.about ?? "", differs: !own && known.size > 0 && told(value) !== told(standard) };
  });
  return rows.sort((one, other) => Number(other.differs) - Number(one.differs));
}
