// The result: what each site gained, with its intervals, how to use it, and every file that can be taken away.

import { cardOf, markdown } from "./card.js";
import { Acts, announce, fill, h, inWords } from "./dom.js";
import { counted, gain, gainMargin, measure, percent } from "./format.js";
import { sent, shownFigure } from "./status.js";
import { zip } from "./zip.js";

const PROMPTS = "prompts.safetensors";

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
    const { round, blob } = await this.#state();
    return [`${this.#name}-round-${round}.safetensors`, blob];
  }

  async #card() {
    const card = await this.#described((await this.#state()).round);
    return [`${this.#name}-card.md`, new Blob([markdown(card)], { type: "text/markdown" })];
  }

  /** Prompts and card, with the coordinator's signature where this token and this browser can have one. */
  async #export() {
    const state = await this.#state();
    const card = await this.#described(state.round);
    if (card.hashes.state !== state.hash) throw new Error(`The state holds a server optimizer's moments: promptfed export ${this.#name} leaves them out`);
    card.files[PROMPTS] = { bytes: state.blob.size, sha256: state.sha256 };
    const text = new Blob([markdown(card)]);
    const digest = await sha256(text);
    if (digest !== null) card.files["card.md"] = { bytes: text.size, sha256: digest };
    const described = json(card);
    const parts = [[PROMPTS, state.blob], ["card.json", described], ["card.md", text]];
    const signature = digest !== null ? await this.#signature(state.round, await described.text()) : null;
    if (signature !== null) parts.push(["card.json.sig", new Blob([`${signature}\n`])]);
    const files = await Promise.all(parts.map(async ([name, blob]) => [name, new Uint8Array(await blob.arrayBuffer())]));
    return [`${this.#name}${signature === null ? "-unsigned" : ""}.zip`, zip(files)];
  }

  /** The coordinator's signature of card.json; null for a viewer. */
  async #signature(round, card) {
    try {
      return (await this.api.postText(`${this.path}/rounds/${round}/card/signature`, card)).signature;
    } catch (error) {
      if (error.status === 403) return null;
      throw error;
    }
  }

  /** The state after the selected round, or the last one that has one. */
  #state() {
    const { id, selection, state } = this.model.view;
    const last = [...this.model.rounds.values()].filter((one) => one.state_hash !== null).at(-1).round;
    return this.api.prompts(id, selection && state === "finished" ? selection.round : last);
  }

  /** The card, of the coordinator's facts. */
  async #described(round) {
    const [facts, about] = await Promise.all([this.api.get(`${this.path}/rounds/${round}/card`), this.api.once("/openapi.json")]);
    return cardOf(facts, this.model.view, `API ${about.info.version}`);
  }
}

/** What the sites of a role gained on average, with its interval; null where nobody tells. */
function gained({ evaluation }, { spec }, role, who) {
  const mean = evaluation.mean[role];
  if (mean?.zero_shot === undefined) return null;
  const pairs = pairsOf(evaluation, role);
  const noisy = Object.values(evaluation.clients).some((one) => one.role === role && one.privacy);
  const margin = spec.task === "multi_label" || noisy || !pairs.length ? "" : ` ± ${(100 * gainMargin(pairs)).toFixed(1)}`;
  const images = counted(pairs.reduce((sum, one) => sum + one.count, 0), "test image");
  return [`Gain of ${counted(pairs.length, who)}`, [gain(mean.zero_shot, mean.accuracy) + margin, `${measure(spec.task)} ${percent(mean.accuracy)} instead of ${percent(mean.zero_shot)}, ${images}`]];
}

/** `[{before, after, count}]` of the sites of a role. */
export function pairsOf(evaluation, role, split = "test") {
  const own = Object.values(evaluation.clients).filter((one) => one.role === role && one.splits[split] && (one.zero_shot[split] ?? one.zero_shot[split.split("@")[0]]));
  return own.map((one) => ({ before: (one.zero_shot[split] ?? one.zero_shot[split.split("@")[0]]).accuracy, after: one.splits[split].accuracy, count: one.splits[split].num_samples }));
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

/** SHA-256 in hexadecimal; null over plain HTTP from another machine, where browsers compute none. */
async function sha256(blob) {
  if (!crypto.subtle) return null;
  return [...new Uint8Array(await crypto.subtle.digest("SHA-256", await blob.arrayBuffer()))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
