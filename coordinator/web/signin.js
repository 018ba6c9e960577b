// Signing in. The tab keeps the operator's token until it is closed or signs out, also where the page is reloaded.

import { fill, h } from "./dom.js";

/** Show the form in `place`; `enter(token)` raises where the token is not good. */
export function signIn(place, remark, enter) {
  const alert = h("p", { class: "error", role: "alert", id: "refused" }, remark);
  const field = h("input", { id: "token", type: "password", autocomplete: "off", autocapitalize: "none", spellcheck: "false", required: true, "aria-describedby": "where refused" });
  const button = h("button", { type: "submit", class: "primary" }, "Sign in");
  const submit = async (event) => {
    event.preventDefault();
    const token = field.value.trim();
    if (!/^[\x21-\x7e]+$/.test(token)) {
      fill(alert, token ? "A token has no spaces or special characters: copy the whole line." : "Paste the operator token.");
      field.focus();
      return;
    }
    button.disabled = true;
    fill(alert);
    try {
      await enter(token);
    } catch (error) {
      fill(alert, error.status === 401 ? "This token is not known here." : error.message);
      field.focus();
      field.select();
    }
    button.disabled = false;
  };
  const where = h("p", { class: "remark", id: "where" }, "The coordinator wrote it into ", h("code", {}, "operator.token"), " in its data folder. This tab keeps it until it is closed, or you sign out.");
  const lead = h("p", {}, "Begin federations, invite their sites, and take their results.");
  fill(place, h("main", { class: "welcome" }, h("form", { class: "panel stack", on: { submit } }, h("h1", {}, "Sign in"), lead, h("label", { for: "token" }, "Operator token"), field, alert, button, where)));
  field.focus();
}
