// A question before what cannot be undone.

import { h } from "./dom.js";

let number = 0;

/** Ask; true where the answer is yes. `extra` is shown above the buttons, `keep` and `act` are what these say. */
export function ask(place, { title, text, extra = null, keep, act }) {
  const id = `question-${(number += 1)}`;
  return new Promise((resolve) => {
    let answer = false;
    const close = (yes) => () => {
      answer = yes;
      dialog.close();
    };
    const done = () => {
      dialog.remove();
      resolve(answer);
    };
    const dialog = h(
      "dialog",
      { "aria-labelledby": id, on: { close: done } },
      h("h2", { id }, title),
      h("p", {}, text),
      extra,
      h("div", { class: "choices" }, h("button", { type: "button", on: { click: close(false) } }, keep), h("button", { type: "button", class: "danger", on: { click: close(true) } }, act)),
    );
    place.append(dialog);
    dialog.showModal();
  });
}
