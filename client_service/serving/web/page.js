// The page of one client: an image in, class bars out. All text from elsewhere is set as text, never as HTML, and the
// token, where this service wants one, lives in this module's memory alone.

const SHOWN = 8; // classes before "show all"

const at = (id) => document.getElementById(id);
let token = null;
let preview = null; // the object URL of the image that is shown
let asked = 0; // counts images, so that a late answer does not replace a newer one

class NotSignedIn extends Error {}

async function call(path, options = {}) {
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...headers, ...options.headers }, cache: "no-store" });
  } catch {
    throw new Error("This site's service does not answer: is it still running?");
  }
  const body = await answer.json().catch(() => ({}));
  if (answer.status === 401) {
    token = null;
    signIn();
    throw new NotSignedIn("This service wants its token.");
  }
  if (!answer.ok) throw new Error(body.detail ?? `The service answered ${answer.status}.`);
  return body;
}

function tell(error) {
  at("error").textContent = error;
  at("error").hidden = !error;
}

function signIn() {
  at("sign-in").hidden = false;
  at("ask").hidden = true;
  at("answer").hidden = true;
  at("token").focus();
}

/** Show what there is; `refused` is said where the token is not this service's. */
async function begin(refused) {
  try {
    const status = await call("/status");
    at("about").textContent = `${described(status)}. The image goes to this site's own service, and no further.`;
    at("sign-in").hidden = true;
    at("ask").hidden = false;
    tell("");
  } catch (error) {
    tell(error instanceof NotSignedIn ? refused : error.message);
  }
}

function described({ name, federation, round, stage }) {
  if (stage === "serving") return `${name} of the export ${federation}, round ${round}`;
  const idle = stage === "ended" ? "which has ended" : "before its first round";
  return `${name} in the federation ${federation}, ${round === null ? idle : `in round ${round}`}`;
}

async function predict(file) {
  const mine = ++asked;
  at("answer").hidden = true;
  tell("");
  show(file);
  at("hint").textContent = `Looking at ${file.name}…`;
  at("ask").setAttribute("aria-busy", "true");
  try {
    const options = { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } };
    const found = await call("/v1/predict", options);
    if (mine === asked) present(found);
  } catch (error) {
    if (mine === asked) tell(error.message);
  }
  if (mine !== asked) return;
  at("hint").textContent = file.name;
  at("ask").setAttribute("aria-busy", "false");
}

function show(file) {
  if (preview !== null) URL.revokeObjectURL(preview);
  preview = URL.createObjectURL(file);
  at("preview").src = preview;
}

function present(found) {
  at("verdict").textContent = found.class_name;
  at("source").textContent = `${found.method}, prompts of round ${found.round}`;
  list(found.classes, SHOWN);
  const domains = found.domains ?? [];
  at("mixture").hidden = domains.length === 0;
  at("domains").replaceChildren(...domains.map((one) => item(one.name, [["adapted", one.share]])));
  at("answer").hidden = false;
}

function list(classes, count) {
  const rows = classes.slice(0, count).map((one) => {
    const bars = [["adapted", one.probability, "learned prompts"]];
    if (one.zero_shot !== undefined) bars.push(["zero-shot", one.zero_shot, "zero-shot"]);
    return item(one.name, bars);
  });
  at("classes").replaceChildren(...rows);
  at("more").hidden = count >= classes.length;
  at("more").textContent = `Show all ${classes.length} classes`;
  at("more").onclick = () => list(classes, classes.length);
}

function item(name, bars) {
  const row = document.createElement("li");
  row.append(element("span", "name", name), ...bars.map((one) => bar(...one)));
  return row;
}

/** `label` tells a screen reader what the colour says. */
function bar(kind, share, label = "") {
  const [line, track, fill] = [element("div", `bar ${kind}`), element("div", "track"), element("div", "fill")];
  fill.style.width = `${100 * share}%`;
  track.append(fill);
  if (label) line.append(element("span", "unseen", label));
  line.append(track, element("span", "value", `${(100 * share).toFixed(1)} %`));
  return line;
}

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

at("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = at("token").value.trim();
  at("token").value = "";
  // No header can carry anything else: fetch would fail as if nobody answered.
  if (!/^[\x20-\x7e]+$/.test(typed)) {
    tell("A token has no special characters: copy the whole line.");
    return;
  }
  token = typed;
  begin("This is not the token of this service.");
});
at("file").addEventListener("change", () => at("file").files.length && predict(at("file").files[0]));
at("preview").addEventListener("load", () => { at("preview").hidden = false; });
at("preview").addEventListener("error", () => { at("preview").hidden = true; });
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); at("drop").classList.add("over"); });
}
for (const kind of ["dragleave", "drop"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); at("drop").classList.remove("over"); });
}
document.addEventListener("drop", (event) => {
  if (!at("ask").hidden && event.dataTransfer.files.length) predict(event.dataTransfer.files[0]);
});
begin("");
