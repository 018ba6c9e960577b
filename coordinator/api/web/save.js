// Files that the browser keeps.

import { h } from "./dom.js";

export function json(value) {
  return new Blob([`${JSON.stringify(value, null, 1)}\n`], { type: "application/json" });
}

/** Let the browser keep it as a file. */
export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = h("a", { href: address, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
