// A run file: JSON, or the part of YAML that run files are written in. What is not understood is refused with its line.

const MOST = 100_000; // clients of an entry

/** What a run file holds: `{spec, sites: [{name, role}]}`. Raises an Error that says where it is wrong. */
export function readRun(text) {
  const whole = text.trim().startsWith("{") ? fromJson(text) : fromYaml(text);
  if (whole === null || typeof whole !== "object" || Array.isArray(whole)) throw new Error("This is no run file: it has to begin with settings, such as “name: styles”.");
  const { clients = [], ...spec } = whole;
  const sites = [clients].flat().flatMap((one, at) => {
    const named = (index) => String(one.name ?? (one.count ? "client-{index}" : `client-${at}`)).replaceAll("{index}", index).replaceAll("{count}", one.count);
    return Array.from({ length: Math.min(one.count ?? 1, MOST) }, (_, index) => ({ name: named(index), role: one.role ?? "trainer" }));
  });
  const trainers = sites.filter((one) => one.role === "trainer").length;
  if (trainers && spec.participation?.min_clients === undefined) spec.participation = { ...spec.participation, min_clients: trainers };
  return { spec, sites };
}

function fromJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}.`);
  }
}

export function fromYaml(text) {
  const lines = text.split(/\r?\n/).map((raw, at) => ({ at: at + 1, raw, text: uncommented(raw).trimEnd() })).filter((one) => one.text.trim() && one.text !== "---");
  const place = { lines, at: 0 };
  const found = block(place, 0);
  if (place.at < lines.length) refuse(lines[place.at]);
  return found;
}

function refuse(line) {
  throw new Error(`Line ${line.at} is not understood: ${line.raw.trim().slice(0, 60)}. JSON can be pasted too.`);
}

/** A line without its comment, which begins at a # after a space and outside quotes. */
function uncommented(line) {
  if (/^\s*#/.test(line)) return "";
  const [code] = /^(?:"(?:[^"\\]|\\.)*"|'[^']*'|(?!\s#)[^"']|(?<=\w)['"])*/.exec(line);
  return /^\s+#/.test(line.slice(code.length)) ? code : line;
}

const indent = (line) => line.text.length - line.text.trimStart().length;
const KEY = /^("(?:[^"\\]|\\.)*"|'[^']*'|[^\s#&*!|>%@`"'{}[\],:][^:#]*?)\s*:(?:\s+|$)(.*)$/;

/** The mapping or list that begins here, whose lines are indented by `depth`. */
function block(place, depth) {
  const isList = /^\s*-(\s|$)/.test(place.lines[place.at]?.text ?? "");
  const found = isList ? [] : {};
  while (place.at < place.lines.length) {
    const line = place.lines[place.at];
    const rest = line.text.trim();
    const isItem = /^-(\s|$)/.test(rest);
    if (indent(line) < depth || (isList && !isItem && indent(line) === depth)) break;
    if (indent(line) > depth || isItem !== isList) refuse(line);
    if (isList) {
      const item = rest.slice(1).trimStart();
      if (KEY.test(item) && !/^[{["']/.test(item)) {
        line.text = " ".repeat(line.text.length - item.length) + item; // a mapping whose first key stands behind the dash
        found.push(block(place, indent(line)));
      } else found.push(value(place, item, depth));
      continue;
    }
    const [, key, after] = KEY.exec(rest) ?? refuse(line);
    const name = /^["']/.test(key) ? scalar(key, line) : key;
    if (Object.hasOwn(found, name)) throw new Error(`Line ${line.at}: “${name}” stands there twice.`);
    Object.defineProperty(found, name, { value: value(place, after, depth), enumerable: true });
  }
  return found;
}

/** What stands behind a key or a dash, or on the lines below it. */
function value(place, text, depth) {
  const line = place.lines[place.at];
  place.at += 1;
  if (text === "") {
    const next = place.lines[place.at];
    const below = next && (indent(next) > depth || (indent(next) === depth && /^\s*-(\s|$)/.test(next.text) && !/^\s*-/.test(line.text)));
    return below ? block(place, indent(next)) : null;
  }
  if (!/^[{[]/.test(text)) return scalar(text, line);
  while (place.at < place.lines.length && !closed(text)) {
    text += ` ${place.lines[place.at].text.trim()}`;
    place.at += 1;
  }
  const parts = text.match(PARTS) ?? [];
  if (parts.join("").replace(/\s/g, "") !== text.replace(/\s/g, "")) refuse(line);
  const found = flow(parts, line);
  if (parts.length) refuse(line);
  return found;
}

const PARTS = /"(?:[^"\\]|\\.)*"|'[^']*'|[{}[\],]|:(?=\s|$)|[^\s{}[\],:"'](?:[^{}[\],:]|:(?!\s|$))*/g;

function closed(text) {
  const bare = text.replace(/"(?:[^"\\]|\\.)*"|'[^']*'/g, "");
  return bare.split(/[{[]/).length === bare.split(/[}\]]/).length;
}

/** `{a: 1, b: [2, 3]}` from its parts, which are used up. */
function flow(parts, line) {
  const first = parts.shift();
  if (first !== "{" && first !== "[") return first === undefined || /^[}\],:]$/.test(first) ? refuse(line) : scalar(first.trim(), line);
  const found = first === "{" ? {} : [];
  const end = first === "{" ? "}" : "]";
  while (parts[0] !== end) {
    if (first === "[") found.push(flow(parts, line));
    else {
      const key = flow(parts, line);
      if (parts.shift() !== ":" || Object.hasOwn(found, key)) refuse(line);
      Object.defineProperty(found, key, { value: flow(parts, line), enumerable: true });
    }
    if (parts[0] === ",") parts.shift();
    else if (parts[0] !== end) refuse(line);
  }
  parts.shift();
  return found;
}

function scalar(text, line) {
  if (/^"(?:[^"\\]|\\.)*"$/.test(text)) return JSON.parse(text);
  if (/^'(?:[^']|'')*'$/.test(text)) return text.slice(1, -1).replaceAll("''", "'");
  if (/^["'|>&*!%@`]/.test(text) || /:(\s|$)|^-(\s|$)|^(0\d+|yes|no|on|off)$/i.test(text)) refuse(line);
  if (/^(null|~|Null|NULL)$/.test(text)) return null;
  if (/^(true|True|TRUE|false|False|FALSE)$/.test(text)) return text.toLowerCase() === "true";
  return /^[-+]?(\d+|\d*\.\d+|\d+\.)(e[-+]?\d+)?$/i.test(text) ? Number(text) : text;
}
