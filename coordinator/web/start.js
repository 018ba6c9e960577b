// The beginning: what a coordinator is for, and the two ways to a federation, by questions or from a run file.

import { Acts, announce, field, fill, h, mark } from "./dom.js";
import { readRun } from "./runfile.js";
import { resolvedFields } from "./schema.js";
import { inNames, spoken } from "./words.js";

const STEPS = [["Describe it", "what is to be told apart, by how many sites"], ["Invite the sites", "each joins with an invitation of its own"], ["Start, and take the result", "with the gain of every site beside it"]];

export class Start {
  constructor(api, hooks, empty) {
    this.api = api;
    this.hooks = hooks;
    this.wrong = h("small", { class: "error", id: "wrong-run", role: "alert" });
    this.text = h("textarea", { id: "run", rows: 6, spellcheck: "false", placeholder: "name: styles\nmethod: {name: fedtaskres}\nclass_names: [sun, cloud]\nclients:\n  - {name: north, data: \"folder:/images\"}", on: { input: () => mark(this.text, this.wrong, "") } });
    this.file = h("input", { type: "file", id: "run-file", class: "unseen", accept: ".yaml,.yml,.json", on: { change: () => this.#read(this.file.files[0]) } });
    const make = h("button", { type: "button", on: { click: () => this.#make() } }, "Create from it");
    this.acts = new Acts(hooks.failed, make, h("label", { for: "run-file", class: "button" }, "Choose a file"));
    const over = (on) => (event) => {
      event.preventDefault();
      this.drop.classList.toggle("over", on);
      if (event.type === "drop") this.#read(event.dataTransfer.files[0]);
    };
    this.drop = h(
      "section",
      { class: "panel", "aria-labelledby": "from-file", on: { dragover: over(true), dragleave: over(false), drop: over(false) } },
      h("h2", { id: "from-file" }, "Paste or drop a run file"),
      field("Run file, in YAML or JSON", this.text, "Its clients become the names of the sites to invite; where their images are stays with them.", this.wrong),
      this.file,
      this.acts.element,
    );
    this.heading = h("h1", { tabindex: "-1" }, empty ? "Train one model at many sites" : "Choose a federation, or begin another");
    const what = "Hospitals, factories or labs adapt a frozen CLIP model together. Each site trains on its own images and sends a few kilobytes a round; no image leaves it.";
    const begin = h("section", { class: "panel", "aria-labelledby": "by-questions" }, h("h2", { id: "by-questions" }, "New federation"), h("p", { class: "remark" }, "Seven questions, one screen. Everything else has a sensible default."), h("a", { class: "button primary", href: "#/new" }, "New federation"));
    const steps = h("ol", { class: "ways" }, STEPS.map(([title, text]) => h("li", {}, h("b", {}, title), h("span", {}, text))));
    this.element = h("article", { class: "stack start" }, this.heading, h("p", { class: "lead" }, what), steps, h("div", { class: "pair" }, begin, this.drop));
  }

  async #read(file) {
    if (!file) return;
    this.text.value = await file.text();
    this.stem = file.name.replace(/\.[^.]*$/, "").replace(/[^\w.-]+/g, "-");
    mark(this.text, this.wrong, "");
  }

  #make() {
    return this.acts.run(async () => {
      let run = null;
      try {
        run = await readRun(this.api, this.text.value);
        const view = await this.api.post("/v1/federations", this.stem ? { name: this.stem, ...run.spec } : run.spec);
        announce(`${view.name} is created`);
        this.hooks.created(view, run.sites);
      } catch (error) {
        if (error.status !== 422) throw error; // not of the file
        if (run !== null) await resolvedFields(this.api, run.spec).catch(() => []); // for the names of settings
        mark(this.text, this.wrong, error.errors.length ? inNames(error.errors) : spoken(error.message));
        this.text.focus();
      }
    });
  }
}
