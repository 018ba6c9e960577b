// A new federation: seven questions, and every other setting of the coordinator's own schema where somebody looks for it.

import { Acts, announce, field, fill, h, mark, say } from "./dom.js";
import { counted } from "./format.js";
import { entry, GOALS, GROUPS, proposed, reasonFor } from "./goals.js";
import { fieldsOf, flat, nested, PINNED } from "./schema.js";
import { inNames, nameOf, restOf, spoken, told } from "./words.js";

const ASKED = ["name", "class_names", "participation.min_clients", "rounds"]; // typed on the first screen
const NOT_TYPED = /^method(\.name)?$|^(origin|continues)($|\.)/;
const BACKBONES = { "": "What suits the method", "promptfed-photo embedded": "promptfed-photo: knows photographs of 1,000 things", "promptfed-tiny embedded": "promptfed-tiny: knows drawn symbols, to try things out", "ViT-B-32 openai": "CLIP ViT-B/32 of OpenAI", "ViT-B-16 openai": "CLIP ViT-B/16 of OpenAI", "ViT-L-14 openai": "CLIP ViT-L/14 of OpenAI" };
const PRIVACY = {
  none: ["Nothing more: the coordinator sees each site's change, and no image.", {}],
  records: ["Records: noise hides every single image (ε = 8 over all rounds).", { privacy: { level: "sample", clip: 0.3, epsilon: 8 } }],
  clients: ["Clients: noise hides whole sites (ε = 8), which takes many of them.", { privacy: { level: "client", clip: 1, epsilon: 8 }, aggregation: { weighting: "uniform", max_weight_share: 1 } }],
  sums: ["Secure sums: the coordinator sees the sum of three sites or more, and no part.", { secure_aggregation: {} }],
};

export class Create {
  /** `from`: the id of a federation whose settings are taken over; `continues`: its result too. */
  constructor(api, hooks, from = null, continues = false) {
    Object.assign(this, { api, hooks, from, continues, kept: new Map(), given: [], inputs: new Map(), wrongs: new Map(), fields: [] });
    const typed = (path, label, attributes, about) => this.#question(path, h("input", { id: `spec-${path}`, name: path, autocomplete: "off", spellcheck: "false", ...attributes }), label, about);
    const choice = (id, label, options, about) => this.#question(id, h("select", { id }, options), label, about);
    this.heading = h("h1", { tabindex: "-1" }, "New federation");
    const left = [
      typed("name", "Name", { required: true, placeholder: "skin-lesions" }),
      typed("class_names", "What is to be told apart", { placeholder: "the sites' own classes" }, "Class names with commas between them. Empty: the sites' own."),
      h("div", { class: "halves" }, typed("participation.min_clients", "How many sites", { inputmode: "numeric", value: 3 }), typed("rounds", "Rounds", { inputmode: "numeric", placeholder: "10" })),
      choice("backbone", "Backbone", Object.entries(BACKBONES).map(([value, label]) => h("option", { value }, label))),
    ];
    const right = [this.#radios("goal", "Goal", Object.entries(GOALS).map(([value, [label]]) => [value, label])), choice("method", "Method", [])];
    this.reason = h("p", { class: "remark", role: "status" });
    this.summary = h("summary", {}, "All settings");
    this.search = h("input", { type: "search", id: "find-setting", autocomplete: "off", spellcheck: "false", on: { input: () => this.#showFields() } });
    this.grid = h("div", { class: "fields" });
    this.found = h("p", { class: "remark", role: "status" });
    this.every = h("button", { type: "button", class: "slim", "aria-pressed": "false", on: { click: () => this.#toggleAll() } }, "Show all");
    this.details = h("details", { on: { toggle: () => this.#showFields() } }, this.summary, h("div", { class: "row" }, h("label", { for: "find-setting" }, "Search by name"), this.search, this.every), this.found, this.grid);
    this.told = h("p", { class: "remark", role: "status" });
    const check = h("button", { type: "button", on: { click: (event) => this.#send(event, true) } }, "Only check");
    this.acts = new Acts(hooks.failed, h("button", { type: "submit", class: "primary" }, "Create"), check);
    this.form = h(
      "form",
      { class: "panel create", novalidate: true, on: { submit: (event) => this.#send(event, false), input: (event) => this.#edited(event.target), change: (event) => this.#changed(event.target) } },
      h("p", { class: "back" }, h("a", { href: "#/" }, "← All federations")),
      this.heading,
      h("div", { class: "pair" }, h("div", { class: "stack" }, left), h("div", { class: "stack" }, right, this.reason)),
      this.#radios("privacy", "Privacy", Object.entries(PRIVACY).map(([value, [label]]) => [value, label])),
      this.details,
      this.acts.element,
      this.told,
    );
    this.element = h("article", { class: "stack" }, this.form);
  }

  #question(path, input, label, about) {
    const wrong = h("small", { class: "error", id: `wrong-${path}` });
    this.inputs.set(path, input);
    this.wrongs.set(path, wrong);
    return field(label, input, about, wrong);
  }

  #radios(id, title, options) {
    const wrong = h("small", { class: "error", id: `wrong-${id}` });
    const radio = ([value, label], at) => h("label", { class: "radio" }, h("input", { type: "radio", name: id, value, checked: at === 0 }), h("span", {}, label));
    const group = h("fieldset", { role: "radiogroup", id, "aria-describedby": wrong.id }, h("legend", {}, title), options.map(radio), wrong);
    this.inputs.set(id, group);
    this.wrongs.set(id, wrong);
    return group;
  }

  #chosen(id) {
    return this.form.querySelector(`input[name="${id}"]:checked`).value;
  }

  async begin() {
    this.heading.focus();
    this.proposing = this.acts.run(async () => {
      const { methods } = await this.api.once("/v1/methods");
      this.methods = new Map(methods.map((one) => [one.name, one]));
      const grouped = new Set(Object.values(GROUPS).flat());
      const groups = [...Object.entries(GROUPS), ["Others", [...this.methods.keys()].filter((name) => !grouped.has(name))]];
      const options = ([label, names]) => h("optgroup", { label }, names.filter((name) => this.methods.has(name)).map((value) => h("option", { value }, entry(value))));
      fill(this.inputs.get("method"), groups.filter(([, names]) => names.length).map(options));
      if (this.from !== null) await this.#takeOver(await this.api.get(`/v1/federations/${this.from}`));
      await this.#propose();
    });
    await this.proposing;
  }

  /** The settings of another federation, which this one begins with. */
  async #takeOver(view) {
    const { spec } = view;
    this.former = view;
    say(this.heading, this.continues ? `Continue from ${view.name}` : "New federation");
    const values = { ...flat(spec), class_names: spec.class_names ?? (this.continues ? view.class_names : null), name: `${view.name}-2` };
    for (const path of ASKED) this.inputs.get(path).value = written(values[path]);
    const backbone = `${spec.backbone.model} ${spec.backbone.pretrained}`;
    if (!(backbone in BACKBONES)) this.inputs.get("backbone").append(h("option", { value: backbone }, backbone));
    this.inputs.get("backbone").value = backbone;
    const level = { sample: "records", client: "clients" }[spec.privacy?.level] ?? (spec.secure_aggregation ? "sums" : "none");
    this.form.querySelector(`input[name="privacy"][value="${level}"]`).checked = true;
    this.picked = this.methods.has(spec.method.name) ? spec.method.name : null;
    for (const [path, value] of Object.entries(values)) {
      if (PINNED.test(path)) this.given.push([path, value]);
      else if (!ASKED.includes(path) && !NOT_TYPED.test(path) && !/^backbone\.(model|pretrained)$|^privacy\.level$/.test(path)) this.kept.set(path, written(value));
    }
    if (!this.continues) return;
    const { fingerprint, shape } = view.backbone;
    const file = await this.api.prompts(view.id, view.selection?.round ?? view.round);
    this.state = file.blob;
    this.given.push(["backbone.fingerprint", fingerprint], ["backbone.shape", shape], ["continues", file.hash]);
    this.inputs.get("method").disabled = true; // a result is continued by the method that made it
  }

  #edited(target) {
    fill(this.acts.problem);
    say(this.told, "");
    const path = this.inputs.has(target.name) ? target.name : target.id;
    if (this.inputs.has(path)) this.#mark(path, ""); // what was said of the former value
  }

  #changed(target) {
    if (target.id === "method") this.picked = target.value;
    if (target.name === "goal") this.picked = this.continues ? this.picked : null;
    if (["goal", "privacy", "class_names"].includes(target.name) || target.id === "method") this.proposing = this.acts.run(() => this.#propose());
    else if (["backbone", "spec-backbone.model", "spec-backbone.pretrained", "spec-training.optimizer"].includes(target.id)) Promise.resolve(this.proposing).then(() => this.#offerRate()); // not between two sets of fields
  }

  /** The goal's method, or the one that was chosen; and its options where it is another one than before. */
  async #propose() {
    const asked = { listed: this.inputs.get("class_names").value.trim() !== "", privacy: this.#chosen("privacy") };
    const goal = this.#chosen("goal");
    const select = this.inputs.get("method");
    const name = this.picked ?? proposed(goal, asked);
    if (this.methods.has(name)) select.value = name;
    say(this.reason, `${reasonFor(select.value, goal, asked)} ${this.methods.get(select.value).summary}`);
    say(this.inputs.get("backbone").options[0], `What suits the method: ${this.methods.get(select.value).default_backbone}`);
    if (this.offered === select.value) return;
    this.offered = select.value;
    await this.#offer(this.methods.get(select.value));
  }

  async #offer(method) {
    for (const one of this.fields) this.kept.set(one.path, this.inputs.get(one.path).value);
    for (const one of this.fields) this.inputs.delete(one.path);
    const all = await fieldsOf(this.api, method);
    this.fields = all.filter((one) => !NOT_TYPED.test(one.path) && !PINNED.test(one.path) && !ASKED.includes(one.path));
    const rounds = all.find((one) => one.path === "rounds");
    this.inputs.get("rounds").setAttribute("placeholder", told(rounds.standard));
    for (const one of this.fields) one.element = this.#question(one.path, this.#input(one), nameOf(one.path, one.about), restOf(one.path, one.about));
    await this.#offerRate();
    this.#showFields();
  }

  /** The default rate goes by the backbone, where a sweep has found one; naming an optimizer leaves it to the method. */
  async #offerRate() {
    const [model, pretrained] = (this.inputs.get("backbone").value || `${this.methods.get(this.offered).default_backbone} embedded`).split(" ");
    const typed = (path, other) => this.inputs.get(path).value.trim() || other;
    const named = typed("training.optimizer", "") !== "";
    const backbone = named ? { model: null, pretrained: null } : { model: typed("backbone.model", model), pretrained: typed("backbone.pretrained", pretrained) };
    const fields = await fieldsOf(this.api, this.methods.get(this.offered), backbone);
    this.inputs.get("training.learning_rate").setAttribute("placeholder", told(fields.find((one) => one.path === "training.learning_rate").standard));
  }

  #input(one) {
    const [first] = one.choices.filter((choice) => choice.type !== "null");
    const attributes = { id: `spec-${one.path}`, name: one.path, autocomplete: "off", spellcheck: "false" };
    const options = first.enum ?? (first.type === "boolean" ? ["true", "false"] : null);
    const before = this.kept.get(one.path) ?? "";
    const kept = before === written(one.standard) ? "" : before;
    if (options === null || one.choices.length > 1) return h("input", { ...attributes, placeholder: told(one.standard), value: kept });
    const select = h("select", attributes, h("option", { value: "" }, `${told(one.standard)} (default)`), options.map((value) => h("option", { value }, first.type === "boolean" ? told(value === "true") : told(value))));
    if (options.includes(kept)) select.value = kept;
    return select;
  }

  #toggleAll() {
    this.every.setAttribute("aria-pressed", String(this.every.getAttribute("aria-pressed") === "false"));
    this.#showFields();
  }

  /** What is changed or wrong comes first; the others only where they are looked for, or all are wanted. */
  #showFields() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = this.every.getAttribute("aria-pressed") === "true";
    const first = (one) => this.inputs.get(one.path).value.trim() !== "" || this.wrongs.get(one.path).textContent !== "";
    const holds = (one) => words.every((word) => `${nameOf(one.path, one.about)} ${one.path} ${one.about}`.toLowerCase().includes(word));
    const shown = this.fields.filter((one) => (words.length ? holds(one) : all || first(one)));
    const changed = this.fields.filter((one) => this.inputs.get(one.path).value.trim() !== "").length;
    say(this.summary, `All settings: ${this.fields.length}, ${changed} changed`);
    say(this.found, words.length ? counted(shown.length, "setting") : all || shown.length ? "" : "None is changed. Search for one, or show all.");
    shown.sort((one, other) => Number(first(other)) - Number(first(one)));
    if (this.details.open) fill(this.grid, shown.map((one) => one.element));
  }

  /** The spec as the form has it; what is empty is left out, and what is typed stands over what privacy proposes. */
  #spec() {
    const [model, pretrained] = this.inputs.get("backbone").value.split(" ");
    const backbone = model ? [["backbone.model", model], ["backbone.pretrained", pretrained === "null" ? null : pretrained]] : [];
    const asked = [["method.name", this.inputs.get("method").value], ...backbone, ...Object.entries(flat(PRIVACY[this.#chosen("privacy")][1]))];
    if (this.#chosen("privacy") === "sums") asked.push(["secure_aggregation", {}]);
    const typed = [...ASKED.map((path) => [path, { class_names: LIST, name: TEXT }[path] ?? NUMBER]), ...this.fields.map((one) => [one.path, one.choices])];
    const entries = typed.map(([path, choices]) => [path, choices, this.inputs.get(path).value]).filter(([, , text]) => text.trim() !== "");
    return nested([...asked, ...this.given, ...entries.map(([path, choices, text]) => [path, value(choices, text)])]);
  }

  async #send(event, dry) {
    event.preventDefault();
    await this.proposing; // the method of what was typed last
    say(this.told, "");
    for (const path of this.wrongs.keys()) this.#mark(path, "");
    await this.acts.run(async () => {
      try {
        const view = await this.api.post(`/v1/federations${dry ? "?dry_run=true" : ""}`, this.#spec());
        if (dry) return say(this.told, "These settings are good; nothing was created.");
        if (this.state) await this.api.put(`/v1/federations/${view.id}/initial-state`, this.state);
        announce(`${view.name} is created`);
        const sites = this.former ? (await this.api.all(`/v1/federations/${this.former.id}/clients`, "clients")).filter((one) => one.status === "active") : [];
        this.hooks.created(view, asMany(sites, view.spec.participation.min_clients));
      } catch (error) {
        if (!error.errors?.length) throw error;
        this.#refused(error.errors);
      }
      return null;
    });
  }

  /** Each error at its field; what has none is said beside the button. */
  #refused(errors) {
    const place = ({ path }) => [path, ["method", "backbone", "privacy"].find((one) => path.split(".")[0] === one), /^secure_aggregation|^aggregation/.test(path) && "privacy"].find((one) => one && this.inputs.has(one));
    const there = errors.filter(place);
    for (const one of there) this.#mark(place(one), spoken(one.detail));
    const others = inNames(errors.filter((one) => !place(one)));
    if (there.some((one) => this.fields.some((some) => some.path === place(one)))) this.details.open = true;
    this.#showFields();
    fill(this.acts.problem, [there.length === 1 ? "One field needs another value." : there.length ? `${there.length} fields need another value.` : "", others].filter(Boolean).join(" "));
    const first = there.length ? this.inputs.get(place(there[0])) : null;
    (first?.matches("fieldset") ? first.querySelector("input:checked") : first)?.focus();
  }

  #mark(path, text) {
    if (this.inputs.has(path)) mark(this.inputs.get(path), this.wrongs.get(path), text);
  }
}

const [TEXT, NUMBER, LIST] = ["string", "number", "array"].map((type) => [{ type }]);

/** A value as somebody would type it. */
function written(value) {
  return value === null || value === undefined ? "" : Array.isArray(value) ? value.join(", ") : String(value);
}

/** What somebody wrote as the schema wants it: a number, a list, true, or text where it is none of these. */
function value(choices, text) {
  const kinds = choices.map((one) => one.type);
  const bare = text.trim();
  if (kinds.includes("array")) return bare.split(",").map((one) => one.trim()).filter(Boolean);
  if (kinds.includes("null") && bare === "null") return null;
  if (kinds.includes("boolean") && ["true", "false"].includes(bare)) return bare === "true";
  if (["integer", "number"].some((kind) => kinds.includes(kind)) && Number.isFinite(Number(bare))) return Number(bare);
  return kinds.includes("string") && !kinds.some((kind) => ["integer", "number"].includes(kind)) ? text : bare;
}

/** The sites to invite: those of before, as far as there are so many trainers, and new ones up to their number. */
function asMany(sites, wanted) {
  if (!sites.length) return [];
  const trainers = sites.filter((one) => one.role === "trainer").slice(0, wanted);
  for (let number = 1; trainers.length < wanted; number += 1) {
    if (!sites.some((one) => one.name === `site-${number}`)) trainers.push({ name: `site-${number}`, role: "trainer" });
  }
  return [...trainers, ...sites.filter((one) => one.role !== "trainer")].map(({ name, role }) => ({ name, role }));
}
