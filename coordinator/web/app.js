// The page: sign in, then a list of federations beside what the address names: one of them (#/federations/ID), several
// (#/compare/ID,ID), a new one (#/new), one with another's settings (#/new/ID) or with its result too (#/continue/ID).

import { Api, Refused } from "./api.js";
import { destroyAll } from "./charts.js";
import { Compare } from "./compare.js";
import { Create } from "./create.js";
import { caller, fill, h } from "./dom.js";
import { Federation } from "./federation.js";
import { List } from "./list.js";
import { signIn } from "./signin.js";
import { Start } from "./start.js";

const main = document.getElementById("main");
const signOut = document.getElementById("sign-out");
const link = document.getElementById("link");
const TITLE = "promptfed";
const KEPT = "promptfed operator token";

let session = null;

class Session {
  constructor(api) {
    this.api = api;
    this.open = null;
    this.planned = new Map(); // sites to invite, by federation: known to this page until it is reloaded
    this.place = h("div", { class: "place" });
    this.list = new List(api, (error) => this.failed(error));
    this.root = h("div", { class: "desk" }, this.list.element, h("main", { class: "stage" }, this.place));
    this.route = () => this.show(opened());
  }

  async begin() {
    fill(main, this.root);
    window.addEventListener("hashchange", this.route);
    await this.list.begin();
    const only = this.list.federations.length === 1 ? this.list.federations[0].id : null;
    if (opened().kind === "none" && only !== null) window.location.replace(`#/federations/${only}`);
    else this.route();
  }

  end() {
    window.removeEventListener("hashchange", this.route);
    this.list.end();
    this.open?.end?.();
    link.hidden = true;
    document.title = TITLE;
  }

  show({ kind, ids }) {
    this.open?.end?.();
    destroyAll();
    link.hidden = true;
    this.root.classList.toggle("one", kind !== "none");
    this.list.mark(kind === "one" ? ids[0] : null);
    document.title = TITLE;
    const hooks = {
      failed: (error) => this.failed(error),
      connection: showLink,
      changed: () => this.list.refresh(),
      planned: (id) => this.planned.get(id),
      created: async (view, sites) => {
        this.planned.set(view.id, sites);
        await this.list.refresh();
        window.location.hash = `#/federations/${view.id}`;
      },
    };
    const [id] = ids;
    if (kind === "one") this.open = new Federation(this.api, id, hooks);
    else if (kind === "compare") this.open = new Compare(this.api, ids, hooks);
    else if (kind === "none") this.open = new Start(this.api, hooks, this.list.federations.length === 0);
    else this.open = new Create(this.api, hooks, id, kind === "continue");
    fill(this.place, this.open.element);
    this.open.begin?.();
  }

  /** A token that is no longer good ends the session; true where that was it. */
  failed(error) {
    if (!(error instanceof Refused) || error.status !== 401) return false;
    leave(`You have been signed out: ${error.message}`);
    return true;
  }
}

function opened() {
  const { hash } = window.location;
  const made = /^#\/(new|continue)(?:\/([\w.-]{1,100}))?$/.exec(hash);
  if (made) return { kind: made[1], ids: made[2] ? [made[2]] : [] };
  const some = /^#\/compare(?:\/([\w.,-]{0,4000}))?$/.exec(hash);
  if (some) return { kind: "compare", ids: (some[1] ?? "").split(",").filter(Boolean) };
  const one = /^#\/federations\/([\w.-]{1,100})$/.exec(hash);
  return one ? { kind: "one", ids: [one[1]] } : { kind: "none", ids: [] };
}

function showLink(state, text) {
  link.hidden = false;
  link.dataset.state = state;
  fill(link, text);
}

function leave(remark = "") {
  session?.end();
  session = null;
  sessionStorage.removeItem(KEPT);
  signOut.hidden = true;
  welcome(remark);
}

function welcome(remark) {
  signIn(main, remark, enter);
}

async function enter(token) {
  const api = new Api(token);
  caller.role = (await api.file("/v1/federations?limit=1")).headers.get("Promptfed-Role");
  sessionStorage.setItem(KEPT, token);
  session = new Session(api);
  signOut.hidden = false;
  await session.begin();
}

signOut.addEventListener("click", () => leave());
// A link's own way there would put #main where the federation's address is, and so leave the federation.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
const kept = sessionStorage.getItem(KEPT);
if (kept === null) welcome("");
else enter(kept).catch((error) => (error.status === 401 ? leave("You have been signed out.") : welcome(error.message)));
