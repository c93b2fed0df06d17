// The page: which runs, which view, and the clock that keeps it up to date.

import { load, runs, shownRuns } from "./data.js";
import * as agents from "./agents.js";
import { archive } from "./archive.js";
import * as completions from "./completions.js";
import * as curves from "./curves.js";
import * as doctor from "./doctor.js";
import { h } from "./dom.js";
import * as ledger from "./ledger.js";
import * as machine from "./machine.js";
import * as questions from "./questions.js";
import * as settings from "./settings.js";
import { drawStrip } from "./strip.js";

const VIEWS = { Curves: curves, Completions: completions, Agents: agents, Tokens: ledger, Questions: questions, Machine: machine,
  Doctor: doctor, Settings: settings };
const EVERY = 2000;
let current = Object.hasOwn(VIEWS, location.hash.slice(1)) ? location.hash.slice(1) : "Curves";
const at = (id) => document.getElementById(id);

/** Go to a view; `where` tells it what to show. */
export function go(name, where) {
  current = name;
  history.replaceState(null, "", `#${name}`);
  for (const button of at("views").children) {
    if (button.textContent === name) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  // A place of its own: an answer that comes after the reader has left is drawn where nobody looks.
  const place = h("div", {}, h("p", { class: "loading" }, "Loading…"));
  at("view").replaceChildren(place);
  VIEWS[name].show(place, where, go);
  tell();
}

function drawHead() {
  at("runs").replaceChildren(...runs.map((run) => {
    const box = h("input", { type: "checkbox", checked: run.shown, onchange: () => { run.shown = box.checked; go(current); } });
    return h("label", { title: run.about.path }, box, h("span", { class: "dot", style: { background: run.colour } }), run.label);
  }));
}

function tell(problem = "") {
  const damaged = runs.filter((run) => run.damaged).map((run) => `${run.label}: ${run.damaged} damaged lines left out`);
  at("state").textContent = problem || [...damaged, archive?.note ?? ""].filter(Boolean).join("  ·  ");
  at("state").classList.toggle("failed", Boolean(problem));
  drawStrip(at("strip"), go);
  const has = (name) => name === "Curves" || shownRuns().some((run) => run.has(name));
  for (const button of at("views").children) button.hidden = !has(button.textContent) && button.textContent !== current;
  if (!has(current) && runs.every((run) => run.diagnosed || (run.loaded && !run.series.size))) go("Curves");
}

async function keepUp(run) {
  const changed = new Set();
  const draw = (what) => {
    changed.add(what);
    tell();
    VIEWS[current].update?.(new Set([what]));
  };
  if (!run.places.metrics && await run.look()) draw("metrics");
  await run.update(draw);
  tell();
  if (!changed.has("metrics") && run.diagnosed) return;
  await run.askDoctor();
  draw("doctor");
}

async function follow() {
  try {
    await Promise.all(runs.map(keepUp));
  } catch (error) {
    tell(error instanceof TypeError ? "covey watch has ended, or cannot be reached." : error.message);
  }
  if (archive) return;
  while (document.hidden) await new Promise((wake) => document.addEventListener("visibilitychange", wake, { once: true }));
  setTimeout(follow, EVERY);
}

try {
  at("views").replaceChildren(...Object.keys(VIEWS).map((name) => h("button", { onclick: () => go(name) }, name)));
  await load();
  document.title = `${runs.map((run) => run.label).join(", ")} – covey watch`;
  drawHead();
  go(current);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => go(current));
  follow();
} catch (error) {
  tell(error.message);
}
