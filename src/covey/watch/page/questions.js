// How each training question was answered over the run.

import { pick, runChoice, runs } from "./data.js";
import { choice, h, number, percent, setter } from "./dom.js";

const MOST = 300;
const VISITS = 60;
const state = { run: 0, shown: "all", order: "hardest", search: "" };
let root, goTo;

export function show(into, _, go) {
  root = into;
  goTo = go;
  state.run = pick("Questions", state.run);
  draw();
}

/** The texts of the questions that are listed, a few tables at a time; a search reads those of all questions. */
async function fill(run, uids) {
  const bar = root.firstChild;
  try {
    const more = await run.readTexts(uids);
    if (more && root.firstChild === bar && !bar.contains(document.activeElement)) draw();
  } catch (error) {
    root.append(h("p", { class: "failed" }, error.message));
  }
}

export function update(changed) {
  if (changed.has("questions") && !root.contains(document.activeElement)) draw();
}

function summed(visits) {
  const sum = (list) => list.reduce(([a, b], [, right, all]) => [a + right, b + all], [0, 0]);
  const [right, all] = sum(visits);
  const [firstRight, firstAll] = sum(visits.slice(0, 1));
  const [lastRight, lastAll] = sum(visits.slice(-1));
  return { weight: weight(visits), share: all ? right / all : null, first: firstAll ? firstRight / firstAll : null, last: lastAll ? lastRight / lastAll : null };
}

/**
 * How much a question can teach, by what was seen of it: six times the expected p (1 - p) with p ~ Beta(1 + right,
 * 1 + wrong), where each visit halves what earlier ones count; as data.prompt_order = "difficulty" draws questions
 * with estimators that compare within a group.
 */
function weight(visits) {
  let [a, b] = [0, 0];
  for (const [, right, all] of visits) [a, b] = [a / 2 + right, b / 2 + all - right];
  [a, b] = [a + 1, b + 1];
  return (6 * a * b) / ((a + b) * (a + b + 1));
}

function draw() {
  const run = runs[state.run];
  const all = [...run.questions].map(([uid, visits]) => ({ uid, visits, ...summed(visits) })).filter((each) => each.share !== null);
  const kinds = { never: all.filter((q) => q.share === 0), always: all.filter((q) => q.share === 1) };
  kinds.sometimes = all.filter((q) => q.share > 0 && q.share < 1);
  const orders = {
    hardest: (a, b) => a.share - b.share, easiest: (a, b) => b.share - a.share, weight: (a, b) => b.weight - a.weight, visits: (a, b) => b.visits.length - a.visits.length,
    gained: (a, b) => b.last - b.first - (a.last - a.first), lost: (a, b) => a.last - a.first - (b.last - b.first),
  };
  const search = state.search.toLowerCase();
  const wanted = (kinds[state.shown] ?? all).filter((q) => `${q.uid}\n${run.texts.get(q.uid) ?? ""}`.toLowerCase().includes(search));
  wanted.sort(orders[state.order]);
  const set = setter(state, draw);
  const field = h("input", { type: "search", value: state.search, placeholder: "text of a question", "aria-label": "Search",
    onchange: () => { field.blur(); set("search")(field.value); } });
  const weighted = run.about.settings["data.prompt_order"] === '"difficulty"';
  root.replaceChildren(
    h("div", { class: "bar" },
      runChoice("Questions", state.run, set("run", Number)),
      choice("show", [["all", `all questions (${all.length})`], ["never", `never right (${kinds.never.length})`],
        ["sometimes", `sometimes right (${kinds.sometimes.length})`], ["always", `always right (${kinds.always.length})`]], state.shown, set("shown")),
      choice("sort by", [["hardest", "hardest first"], ["easiest", "easiest first"], ["weight", "most useful for training"], ["visits", "most often sampled"], ["gained", "largest gain"],
        ["lost", "largest loss"]], state.order, set("order")),
      field),
    h("p", { class: "note" }, all.length
      ? "Each bar is one time that the question was sampled; its height is the share of right completions. Click on a question to read its last completions. "
        + (weighted ? "Questions are drawn by their weight (data.prompt_order)." : "The weight is the one of data.prompt_order = \"difficulty\". This run does not use it.")
      : "No questions yet, or no reward says which completions are right (rewards.correctness)."),
    h("div", { class: "scroll" }, wanted.length ? h("table", {},
      h("thead", {}, h("tr", {}, ["question", "right", "sampled", "first time", "last time", "weight", "over the run"].map((text) => h("th", {}, text)))),
      h("tbody", {}, wanted.slice(0, MOST).map((question) => line(question, run)))) : null),
    wanted.length > MOST ? h("p", { class: "note" }, `${number(wanted.length - MOST)} more are not listed.`) : "");
  fill(run, (search ? all : wanted.slice(0, MOST)).map(({ uid }) => uid));
}

function line({ uid, visits, share, first, last, weight: teaches }, run) {
  const tables = new Set(run.tables.step);
  const recorded = visits.map(([step]) => step).filter((step) => tables.has(step)).at(-1);
  const text = run.texts.get(uid) || uid;
  const name = recorded === undefined ? text
    : h("button", { class: "link", onclick: () => goTo("Completions", { run: state.run, kind: "step", step: recorded, uid, shown: "all", search: "" }) }, text);
  return h("tr", {}, h("td", { class: "asked", title: uid }, h("div", {}, name)), h("td", { class: "number" }, percent(share)), h("td", { class: "number" }, `${visits.length}×`),
    h("td", { class: "number" }, percent(first)), h("td", { class: "number" }, percent(last)), h("td", { class: "number" }, number(Number(teaches.toFixed(2)))),
    h("td", {}, h("div", { class: "visits" }, visits.slice(-VISITS).map(([step, right, all]) =>
      h("i", { title: `step ${step}: ${right} of ${all}` }, h("span", { style: { height: `${all ? (100 * right) / all : 0}%` } }))))));
}
