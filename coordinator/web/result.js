// The result: what each site gained, with its intervals, how to use it, and every file that can be taken away.

import { Acts, announce, fill, h, inWords } from "./dom.js";
import { counted, gain, margin, measure, percent } from "./format.js";
import { sent, shownFigure } from "./status.js";

export class Result {
  constructor(api, path, failed) {
    Object.assign(this, { api, path });
    const button = (title, make) => h("button", { type: "button", on: { click: (event) => this.#take(event.currentTarget, make) } }, title);
    this.ofState = [button("Export", () => this.#export()), button("Prompts", () => this.#prompts()), button("Card", () => this.#card())];
    this.files = new Acts(failed, this.ofState, button("Numbers (CSV)", () => this.#numbers()), button("Reports (JSON)", () => this.#reports()));
    this.figures = h("dl", { class: "figures" });
    this.note = h("p", { class: "remark" }, "Gains are points against the model before training, on test images. ± is half of the 95 % interval; both figures are of the same images, so that it is rather too wide. Of noisy figures and of mean average precisions there is none.");
    this.use = h("ol", { class: "use" });
    this.using = h("div", {}, this.figures, this.note, h("h3", {}, "Use it"), this.use, h("h3", {}, "Files"));
    this.title = h("h2", { id: "result" });
    this.element = h("section", { class: "panel", "aria-labelledby": "result" }, this.title, this.using, this.files.element);
  }

  update(model) {
    this.model = model;
    const { view, rounds } = model;
    const reports = [...rounds.values()];
    const there = reports.some((one) => one.state_hash !== null);
    this.element.hidden = reports.length === 0;
    this.using.hidden = view.state !== "finished" || !there;
    for (const [at, one] of this.ofState.entries()) one.hidden = !there || (at === 0 && !this.using.hidden); // the first is at the top then
    fill(this.title, this.using.hidden ? "Files so far" : "Result");
    if (this.using.hidden) return;
    const last = reports.filter((one) => one.evaluation && Object.keys(one.evaluation.mean).length).at(-1); // of a selected round, where there is one
    const chosen = view.selection && ["Best round", [String(view.selection.round), `of ${view.selection.compared}, ${percent(view.selection.value)} on held-out images`]];
    const gains = last ? [gained(last, view, "trainer", "site"), gained(last, view, "evaluator", "unseen domain")] : [];
    fill(this.figures, [...gains, chosen, ["Sent", sent(reports)]].filter(Boolean).map(shownFigure));
    this.note.hidden = !gains.some(Boolean);
    const archive = `${view.name}.zip${view.class_names ? "" : ' --classes "sun,cloud"'}`; // where each site has its own
    fill(this.use, [`Download the result: ${view.name}.zip has the prompts, and a card that the coordinator has signed.`, `\`promptfed predict photo.png --export ${archive}\` classifies a picture, or a folder of them.`, `\`promptfed serve ${archive}\` opens a page for pictures.`, `\`promptfed export ${view.name}\` makes class weights for plain open_clip code: the coordinator has no backbone for them.`].map((text) => h("li", {}, inWords(text))));
  }

  /** The archive of prompts and card, as the button at the top takes it. */
  async download() {
    const [name, blob] = await this.#export();
    save(blob, name);
    announce(`${name} is downloaded`);
  }

  async #take(button, make) {
    button.disabled = true;
    await this.files.run(async () => {
      const [name, blob] = await make();
      save(blob, name);
      announce(`${name} is downloaded`);
    });
    button.disabled = false;
  }

  get #name() {
    return this.model.view.name;
  }

  async #numbers() {
    const { blob } = await this.api.file(`${this.path}/metrics`);
    return [`${this.#name}-metrics.csv`, blob];
  }

  async #reports() {
    return [`${this.#name}-rounds.json`, json(await this.api.all(`${this.path}/rounds`, "rounds"))];
  }

  async #prompts() {
    const { blob } = await this.api.prompts(this.model.view.id, this.#round);
    return [`${this.#name}-round-${this.#round}.safetensors`, blob];
  }

  async #card() {
    return [`${this.#name}-card.md`, (await this.api.file(`${this.path}/rounds/${this.#round}/card.md`)).blob];
  }

  /** Prompts and card, signed where this token may have that. */
  async #export() {
    const { blob, headers } = await this.api.file(`${this.path}/rounds/${this.#round}/export`);
    return [/filename="([^"]+)"/.exec(headers.get("Content-Disposition"))[1], blob];
  }

  /** The selected round, or the last one that has a state. */
  get #round() {
    const { selection, state } = this.model.view;
    if (selection && state === "finished") return selection.round;
    return [...this.model.rounds.values()].filter((one) => one.state_hash !== null).at(-1).round;
  }
}

/** What the sites of a role gained on average, with its interval; null where nobody tells. */
function gained({ evaluation }, { spec }, role, who) {
  const mean = evaluation.mean[role];
  if (mean?.zero_shot === undefined) return null;
  const own = Object.values(evaluation.clients).filter((one) => one.role === role && one.splits.test);
  const images = counted(own.reduce((sum, one) => sum + one.splits.test.num_samples, 0), "test image");
  return [`Gain of ${counted(own.length, who)}`, [gain(mean.zero_shot, mean.accuracy) + margin(evaluation.bounds?.[role]?.test), `${measure(spec.task)} ${percent(mean.accuracy)} instead of ${percent(mean.zero_shot)}, ${images}`]];
}

function json(value) {
  return new Blob([`${JSON.stringify(value, null, 1)}\n`], { type: "application/json" });
}

/** Let the browser keep it as a file. */
function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
