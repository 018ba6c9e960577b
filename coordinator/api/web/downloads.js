// What can be taken away: numbers as CSV, prompts as safetensors, the card, all of it in one archive.

import { cardOf, markdown } from "./card.js";
import { announce, fill, h, panel } from "./dom.js";
import { json, save } from "./save.js";
import { zip } from "./zip.js";

const PROMPTS = "prompts.safetensors";

export class Downloads {
  constructor(api, path, tell) {
    this.api = api;
    this.path = path;
    this.tell = tell;
    const button = (title, make) => h("button", { type: "button", on: { click: (event) => this.#take(event.currentTarget, make) } }, title);
    this.prompts = button("Prompts", () => this.#prompts());
    this.card = button("Card", () => this.#card());
    this.whole = button("Export", () => this.#export());
    this.numbers = button("Numbers (CSV)", () => this.#numbers());
    this.reports = button("Reports (JSON)", () => this.#reports());
    this.all = [this.numbers, this.reports, this.prompts, this.card, this.whole];
    for (const one of this.all) one.disabled = true; // until there is something to take
    this.buttons = h("div", { class: "buttons" }, this.all);
    this.remark = h("p", { class: "remark" });
    this.element = panel("Take away", {}, this.buttons, this.remark);
  }

  update(model) {
    this.model = model;
    const there = [...model.rounds.values()].some((one) => one.state_hash !== null);
    for (const one of this.all) one.disabled = this.taking === one || !(there || [this.numbers, this.reports].includes(one));
    const command = h("code", {}, `promptfed export ${model.view.name} --out FOLDER`);
    fill(this.remark, "Prompts are the selected or newest state, as safetensors. The export is an archive of prompts and card, signed by the coordinator, for ", h("code", {}, "promptfed predict --export"), "; class weights for plain open_clip code need a backbone: ", command, ".");
  }

  async #take(button, make) {
    button.disabled = true;
    this.taking = button;
    this.tell(null);
    try {
      const [name, blob] = await make();
      save(blob, name);
      announce(`${name} is downloaded`);
    } catch (error) {
      this.tell(error);
    }
    this.taking = null;
    button.disabled = false;
  }

  get #name() {
    return this.model.view.name;
  }

  async #numbers() {
    const { blob } = await this.api.file(`${this.path}/metrics?format=csv`);
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

  /** The state after the selected round, or the last one that has one, under its hash. */
  async #state() {
    const { selection, state } = this.model.view;
    const last = [...this.model.rounds.values()].filter((one) => one.state_hash !== null).at(-1).round;
    const round = selection && state === "finished" ? selection.round : last;
    const { blob, headers } = await this.api.file(`${this.path}/prompts?round=${round}`, "application/octet-stream");
    const digest = /sha-256=:([^:]+):/.exec(headers.get("Repr-Digest") ?? "")?.[1] ?? "";
    return { round, blob, hash: headers.get("ETag").replaceAll('"', ""), sha256: hexadecimal(atob(digest), (letter) => letter.charCodeAt(0)) };
  }

  /** The card, of the coordinator's facts. */
  async #described(round) {
    const [facts, about] = await Promise.all([this.api.get(`${this.path}/rounds/${round}/card`), this.api.once("/openapi.json")]);
    return cardOf(facts, this.model.view, `API ${about.info.version}`);
  }
}

/** SHA-256 in hexadecimal; null over plain HTTP from another machine, where browsers compute none. */
async function sha256(blob) {
  if (!crypto.subtle) return null;
  return hexadecimal(new Uint8Array(await crypto.subtle.digest("SHA-256", await blob.arrayBuffer())), (byte) => byte);
}

function hexadecimal(bytes, number) {
  return [...bytes].map((byte) => number(byte).toString(16).padStart(2, "0")).join("");
}
