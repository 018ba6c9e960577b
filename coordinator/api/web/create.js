// A new federation from a form: the method's own options and every setting of the spec, from the coordinator's schema.

import { announce, fill, h, inWords, say } from "./dom.js";
import { fieldsOf, nested, told } from "./schema.js";

const TITLES = { "": "Federation", method: "Method", training: "Local training", loss: "Loss", backbone: "Backbone", participation: "Participation", aggregation: "Aggregation", evaluation: "Evaluation", admission: "Admission", privacy: "Differential privacy (optional)", secure_aggregation: "Secure aggregation (optional)", schedule: "Asynchronous rounds (optional)" };
const NOT_TYPED = /^method$|^(origin|backbone\.(fingerprint|shape))($|\.)/; // set otherwise, or mappings
const OPEN = ["", "method", "training"];
const UNSET = "";

export class Create {
  constructor(api, hooks) {
    this.api = api;
    this.hooks = hooks;
    this.kept = new Map();
    this.heading = h("h1", { tabindex: "-1" }, "New federation");
    this.method = h("select", { id: "method", on: { change: () => this.#offer() } });
    this.summary = h("p", { class: "remark" });
    this.sections = h("div", { class: "sections" });
    this.problem = h("p", { class: "error", role: "alert" });
    this.told = h("p", { class: "remark", role: "status" });
    this.form = h(
      "form",
      { class: "panel create", novalidate: true, on: { submit: (event) => this.#send(event, false), input: (event) => this.#edited(event), change: (event) => this.#changed(event) } },
      h("p", { class: "back" }, h("a", { href: "#/" }, "← All federations")),
      this.heading,
      h("p", { class: "field" }, h("label", { for: "method" }, "Method"), this.method),
      this.summary,
      this.sections,
      this.problem,
      this.told,
      h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Create"), h("button", { type: "button", on: { click: (event) => this.#send(event, true) } }, "Only check")),
      h("p", { class: "remark" }, "An empty field takes the default that it shows. For a start from words, descriptions of classes and a comparison of methods, use ", h("code", {}, "promptfed federation create"), "."),
    );
    this.element = h("article", { class: "federation" }, this.form);
  }

  async begin() {
    this.heading.focus();
    try {
      const { methods } = await this.api.once("/v1/methods");
      this.methods = new Map(methods.map((one) => [one.name, one]));
      fill(this.method, [...this.methods.keys()].map((name) => h("option", { value: name }, name)));
      this.method.value = this.methods.has("promptfl") ? "promptfl" : this.method.value;
      await this.#offer();
    } catch (error) {
      this.#tell(error);
    }
  }

  end() {}

  /** What an answer said of the former values does not hold for the new ones. */
  #edited({ target }) {
    fill(this.problem);
    say(this.told, "");
    if (this.inputs?.get(target.name) === target) this.#mark(target.name, target, "");
  }

  #changed({ target }) {
    if (["backbone.model", "backbone.pretrained", "training.optimizer"].includes(target.name)) this.#offerRate();
  }

  #tell(error) {
    if (!this.hooks.failed(error)) fill(this.problem, error.message);
  }

  async #offer() {
    const method = this.methods.get(this.method.value);
    fill(this.problem);
    say(this.told, "");
    fill(this.summary, `${method.summary} ${method.paper}`);
    for (const [path, input] of this.inputs ?? []) if (input.value !== UNSET) this.kept.set(path, input.value);
    this.fields = (await fieldsOf(this.api, method)).filter((one) => !NOT_TYPED.test(one.path));
    this.inputs = new Map(this.fields.map((one) => [one.path, this.#input(one)]));
    const groups = new Map();
    for (const one of this.fields) {
      const group = one.path.includes(".") ? one.path.split(".")[0] : "";
      groups.set(group, [...(groups.get(group) ?? []), one]);
    }
    const order = [...Object.keys(TITLES).filter((group) => groups.has(group)), ...[...groups.keys()].filter((group) => !(group in TITLES))];
    fill(this.sections, order.map((group) => h("details", { open: OPEN.includes(group) }, h("summary", {}, TITLES[group] ?? titled(group)), h("div", { class: "fields" }, groups.get(group).map((one) => this.#field(one))))));
    await this.#offerRate();
  }

  /** The default rate goes by the backbone, where a sweep has found one; naming an optimizer leaves it to the method. */
  async #offerRate() {
    const typed = (path) => this.inputs.get(path)?.value.trim() || this.fields.find((one) => one.path === path)?.standard;
    const method = this.methods.get(this.method.value);
    const named = this.inputs.get("training.optimizer").value !== UNSET;
    const backbone = named ? { model: null, pretrained: null } : { model: typed("backbone.model"), pretrained: typed("backbone.pretrained") };
    const fields = await fieldsOf(this.api, method, backbone);
    const { standard } = fields.find((one) => one.path === "training.learning_rate");
    this.inputs.get("training.learning_rate").setAttribute("placeholder", told(standard));
  }

  #input(field) {
    const [first] = field.choices.filter((one) => one.type !== "null");
    const attributes = { id: `spec-${field.path}`, name: field.path, autocomplete: "off", spellcheck: "false", "aria-describedby": `about-${field.path} wrong-${field.path}` };
    const options = first.enum ?? (first.type === "boolean" ? ["true", "false"] : null);
    const kept = this.kept.get(field.path);
    if (options !== null && field.choices.length === 1) {
      const input = h("select", attributes, h("option", { value: UNSET }, `${told(field.standard)} (default)`), options.map((one) => h("option", { value: one }, one)));
      if (options.includes(kept)) input.value = kept;
      return input;
    }
    const numeric = ["integer", "number"].includes(first.type) && field.choices.filter((one) => one.type !== "null").length === 1;
    const placeholder = field.required ? "" : told(field.standard);
    return h("input", { ...attributes, inputmode: numeric ? "decimal" : null, placeholder, value: kept, required: field.required });
  }

  #field(field) {
    const input = this.inputs.get(field.path);
    const label = field.path.split(".").slice(field.path.startsWith("method.") || field.path.split(".").length < 3 ? -1 : -2).join(" ").replaceAll("_", " ");
    const about = field.path === "class_names" ? "names by commas; empty: each client's own" : field.about;
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input, h("small", { id: `about-${field.path}` }, inWords(about)), h("small", { id: `wrong-${field.path}`, class: "error" }));
  }

  /** The spec as the form has it; what is empty is left out. */
  #spec() {
    const entries = [["method.name", this.method.value]];
    for (const field of this.fields) {
      const text = this.inputs.get(field.path).value;
      if (text.trim() !== UNSET) entries.push([field.path, value(field, text)]);
    }
    return nested(entries);
  }

  async #send(event, dry) {
    event.preventDefault();
    fill(this.problem);
    say(this.told, "");
    for (const [path, input] of this.inputs) this.#mark(path, input, "");
    try {
      const answer = await this.api.post(`/v1/federations${dry ? "?dry_run=true" : ""}`, this.#spec());
      if (dry) say(this.told, "The spec is good; nothing was created.");
      else {
        announce(`${answer.name} is created`);
        this.hooks.changed();
        window.location.hash = `#/federations/${answer.id}`;
      }
    } catch (error) {
      this.#refused(error);
    }
  }

  #refused(error) {
    const offences = (error.errors ?? []).filter((one) => one.path);
    const there = offences.filter((one) => this.inputs.has(one.path));
    for (const one of there) this.#mark(one.path, this.inputs.get(one.path), one.detail);
    if (!there.length) {
      this.#tell(error);
      return;
    }
    const others = offences.filter((one) => !this.inputs.has(one.path)).map((one) => `${one.path}: ${one.detail}`);
    fill(this.problem, [`${there.length === 1 ? "One field needs" : `${there.length} fields need`} another value.`, ...others].join(" "));
    this.inputs.get(there[0].path).focus();
  }

  #mark(path, input, text) {
    fill(this.form.querySelector(`#${CSS.escape(`wrong-${path}`)}`), text);
    if (text) {
      input.setAttribute("aria-invalid", "true");
      input.closest("details").open = true;
    } else input.removeAttribute("aria-invalid");
  }
}

function titled(group) {
  return `${group[0].toUpperCase()}${group.slice(1).replaceAll("_", " ")}`;
}

/** What somebody wrote as the schema wants it: a number, a list, true, or text where it is none of these. */
function value(field, text) {
  const kinds = field.choices.map((one) => one.type);
  const written = text.trim();
  if (kinds.includes("array")) return written.split(",").map((one) => one.trim()).filter(Boolean);
  if (kinds.includes("null") && written === "null") return null;
  if (kinds.includes("boolean") && ["true", "false"].includes(written)) return written === "true";
  if (["integer", "number"].some((kind) => kinds.includes(kind)) && Number.isFinite(Number(written))) return Number(written);
  return kinds.includes("string") && !kinds.some((kind) => ["integer", "number"].includes(kind)) ? text : written;
}
