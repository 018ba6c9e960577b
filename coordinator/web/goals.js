// What a federation is for, and the method that serves it best in the measurements of docs/guides/compare-methods.md.

const BASE = 72.5; // zero_shot's accuracy there, in percent
// Method: accuracy on the sites' own images, on an unseen domain, on new classes; bytes of a site and round; and whether
// noise can protect its records and clients.
export const MEASURED = {
  promptfolio: [79.1, 79.6, 76.5, "14.8 kB", "images, clients"], fedtaskres: [79.1, 78.7, 76.5, "6.3 kB", "images, clients"], fedlora: [78.8, 79.2, 78.7, "82.3 kB", "clients"],
  fedclipadapter: [78.7, 78.4, 77.5, "37.4 kB", "images, clients"], promptfl: [78.6, 78.8, 77.2, "14.8 kB", "images, clients"], fedavg: [78.5, 77.5, 79.2, "6.7 MB", "clients"],
  fedclip: [78.1, 78.4, 76.7, "149.8 kB", "images, clients"], fedlp: [78.0, 81.6, 76.5, "7.0 kB", "clients"], fedpgp: [77.7, 80.4, 77.2, "14.8 kB", "images, clients"],
  plan: [77.7, 78.3, 76.8, "595.0 kB", "-"], promptfl_prox: [76.4, 77.3, 77.6, "14.8 kB", "images, clients"], fast_pt: [76.2, 76.6, 65.6, "6.7 kB", "-"],
  fedvpt_deep: [74.9, 76.6, 76.5, "4.5 kB", "images, clients"], fedtpg: [74.4, 76.3, 76.5, "590.8 kB", "images, clients"], fedkgcoop: [74.4, 77.4, 77.2, "14.8 kB", "images, clients"],
  coop: [74.2, 67.6, 76.6, "304 B", "-"], fedmaple: [73.2, 73.9, 68.7, "369.4 kB", "images, clients"], pfedpg: [70.7, null, null, "10.7 kB", "images"], zero_shot: [72.5, 76.2, 76.5, "0 B", "-"],
};

export const GROUPS = {
  "One prompt for all sites": ["promptfl", "promptfl_prox", "fedkgcoop", "fedcocoop", "fedtpg"],
  "A prompt of each site's own": ["coop", "fedpgp", "promptfl_ft", "promptfl_per", "promptfl_amp", "fedotp", "promptfolio", "pfedmoap", "pfedprompt", "pfedpg"],
  "Prompts of images and domains": ["fedvpt", "fedvpt_deep", "singleset_vpt", "fedmaple", "plan", "fast_pt", "fedapt", "fedpr", "diprompt"],
  "Adapters behind the frozen model": ["fedtaskres", "fedlp", "fedclipadapter", "fedclip", "fedlora"],
  "The image model itself": ["fedavg", "fedprox", "singleset_full", "fedrep", "fedbabu", "fedrod", "perfedavg"],
  "No training": ["zero_shot"],
};

export const GOALS = {
  everybody: ["Best accuracy for everybody", 0, "the most accurate on the sites' own images"],
  own: ["Each site its own", 0, "a shared prompt beside one that stays at the site"],
  later: ["Classes that come later", 2, "the most accurate on new classes for its size"],
  small: ["Smallest messages", 0, "the fewest bytes of those that learn something from each other"],
};

/** The method for a goal, where the federation lists its classes or not, and with this privacy. */
export function proposed(goal, { listed, privacy }) {
  if (goal === "own") return "promptfolio";
  if (goal === "later") return privacy === "records" ? "promptfl_prox" : "fedlora";
  return listed ? "fedtaskres" : "promptfl"; // which has a row for every class, and so needs their list
}

/** Why this method, in a sentence. */
export function reasonFor(method, goal, { listed, privacy }) {
  const found = MEASURED[method];
  if (!found) return "Not in our comparison of methods.";
  const column = GOALS[goal][1];
  const where = column === 2 ? "on classes that nobody trained" : "on the sites' own images";
  const base = column === 2 ? MEASURED.zero_shot[2] : BASE;
  const gain = found[column] === null ? "" : `, ${signed(found[column] - base)} points ${where}`;
  const best = method === proposed(goal, { listed, privacy });
  const open = listed || goal === "own" || goal === "later" ? "" : " that needs no list of classes";
  return `${best ? `Proposed: ${GOALS[goal][2]}${open}` : "Your choice"}${gain}, ${found[3]} a site and round in our comparison.`;
}

/** A method as an entry of a list: its name, and what it gained and sent. */
export function entry(method) {
  const found = MEASURED[method];
  return found ? `${method}: ${signed(found[0] - BASE)} points, ${found[3]}` : method;
}

function signed(points) {
  return `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(1)}`;
}
