// The page of one client: images in, class bars out. All text from elsewhere is set as text, never as HTML, and the
// token, where this service wants one, lives in this module's memory alone.

const SHOWN = 8; // classes before "show all"; of several images fewer
const FEW = 3;
const MOST = 64; // images at once
const REFUSALS = {
  400: "The service did not take it: try again.",
  408: "It took too long to arrive: try again.",
  413: "It is too large: at most 20 MB, and no more pixels than a large photograph has.",
  422: "It cannot be read as an image. Choose a PNG, JPEG, WebP, TIFF or another common picture.",
  503: "The service has nothing to compare it with yet, or is busy: try again in a moment.",
};
const UNFAITHFUL = "the image cannot be shown"; // whose reason is for people already

const at = (id) => document.getElementById(id);
let token = null;
let previews = []; // the object URLs of the images that are shown
let asked = 0; // counts choices, so that late answers do not stand among newer ones

class NotSignedIn extends Error {}
class Refused extends Error {}

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
  if (!answer.ok) throw new Refused(body.detail?.startsWith(UNFAITHFUL) ? `It${body.detail.slice("the image".length)}.` : (REFUSALS[answer.status] ?? "The service could not answer: try again."));
  return body;
}

function tell(error) {
  at("error").textContent = error;
  at("error").hidden = !error;
}

function signIn() {
  at("sign-in").hidden = false;
  at("ask").hidden = true;
  clear();
  at("token").focus();
}

/** Show what there is; `refused` is said where the token is not this service's. */
async function begin(refused) {
  try {
    const status = await call("/status");
    at("about").textContent = `${described(status)}. Images go to this site's own service, and no further.`;
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

function clear() {
  for (const address of previews) URL.revokeObjectURL(address);
  previews = [];
  at("pictures").replaceChildren();
  at("legend").hidden = true;
}

/** One image after the other, each with its answer or what is wrong with it. */
async function predict(chosen) {
  const mine = ++asked;
  const files = [...chosen].slice(0, MOST);
  clear();
  tell(chosen.length > MOST ? `The first ${MOST} of ${chosen.length} images are looked at.` : "");
  at("ask").setAttribute("aria-busy", "true");
  for (const [place, file] of files.entries()) {
    at("hint").textContent = files.length > 1 ? `Looking at ${place + 1} of ${files.length}: ${file.name}…` : `Looking at ${file.name}…`;
    const entry = picture(file);
    try {
      const found = await call("/v1/predict", { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } });
      if (mine !== asked) return;
      present(entry, found, files.length > 1 ? FEW : SHOWN);
    } catch (error) {
      if (mine !== asked) return;
      if (!(error instanceof Refused)) {
        tell(error.message); // the service is gone, or wants its token: nothing is wrong with the image
        break;
      }
      const wrong = element("p", "wrong", error.message);
      wrong.setAttribute("role", "alert");
      entry.append(wrong);
    }
  }
  at("hint").textContent = files.length > 1 ? `${files.length} images` : files[0].name;
  at("ask").setAttribute("aria-busy", "false");
}

/** The place of an image: itself, where the browser can show it, and its name. */
function picture(file) {
  const [entry, shown, what] = [element("li", "picture"), element("img"), element("div")];
  previews.push(URL.createObjectURL(file));
  shown.alt = "";
  shown.hidden = true;
  shown.addEventListener("load", () => { shown.hidden = false; });
  shown.src = previews.at(-1);
  what.append(element("p", "file", file.name));
  entry.append(shown, what);
  at("pictures").append(entry);
  return what;
}

function present(entry, found, count) {
  const [classes, more] = [element("ol", "classes"), element("button")];
  const show = (most) => {
    const bars = ({ probability, zero_shot: before }) => [["adapted", probability, "learned prompts"], ...(before === undefined ? [] : [["zero-shot", before, "zero-shot"]])];
    classes.replaceChildren(...found.classes.slice(0, most).map((one) => item(one.name, bars(one))));
    more.hidden = most >= found.classes.length;
  };
  more.type = "button";
  more.textContent = `Show all ${found.classes.length} classes`;
  more.addEventListener("click", () => show(found.classes.length));
  show(count);
  entry.append(element("h2", "verdict", found.present?.join(", ") || found.class_name), element("p", "source", `${found.method}, prompts of round ${found.round}`), classes, more);
  if (found.domains?.length) {
    const domains = element("ol", "domains");
    domains.append(...found.domains.map((one) => item(one.name, [["adapted", one.share]])));
    entry.append(element("h3", "", "Looks like the domains"), domains);
  }
  at("legend").hidden = false;
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
at("file").addEventListener("change", () => at("file").files.length && predict(at("file").files));
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); at("drop").classList.add("over"); });
}
for (const kind of ["dragleave", "drop"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); at("drop").classList.remove("over"); });
}
document.addEventListener("drop", (event) => {
  if (!at("ask").hidden && event.dataTransfer.files.length) predict(event.dataTransfer.files);
});
begin("");
