// Agents' episodes as conversations: those of a group beside each other, turn by turn.

import { ask, pick, runChoice, runs } from "./data.js";
import { CUT, ENDS, pictures } from "./completions.js";
import { choice, h, number } from "./dom.js";

const state = { run: 0, kind: "step", step: null, group: null, only: "all" };
let root, visit = 0, goTo, newest = true;

export function show(into, where = {}, go) {
  Object.assign(state, where);
  goTo = go;
  root = into;
  state.run = pick("Agents", state.run);
  load();
}

export function update(changed) {
  if (!changed.has("tables") || root.contains(document.activeElement)) return;
  if (newest) [state.step, state.group] = [null, null];
  load();
}

async function load() {
  const mine = ++visit;
  const run = runs[state.run];
  const steps = run.tables[state.kind];
  if (!steps.includes(state.step)) [state.step, state.group] = [steps.at(-1) ?? null, null];
  newest = state.step === (steps.at(-1) ?? null);
  try {
    const found = state.step === null ? { groups: [] } : await ask(`${run.index}/episodes`, { kind: state.kind, step: state.step, ...(state.group === null ? {} : { group: state.group }) });
    if (mine === visit) draw(run, steps, found);
  } catch (error) {
    if (mine === visit) root.replaceChildren(controls(run, steps, { groups: [] }), h("p", { class: "failed" }, error.message));
  }
}

function controls(run, steps, found) {
  const set = (name, read = String) => (value) => {
    state[name] = read(value);
    if (name !== "only") state.group = name === "group" ? state.group : null;
    load();
  };
  const episodes = found.rows ?? [];
  return h("div", { class: "bar" },
    runChoice("Agents", state.run, set("run", Number)),
    choice("from", [["step", "training"], ["eval", "one evaluation"]], state.kind, (kind) => { state.step = null; set("kind")(kind); }),
    choice("step", steps, state.step ?? "", set("step", Number)),
    found.groups.length ? choice("task", found.groups.map(({ group, uid, mean }) => [group, `${uid} (mean reward ${number(mean)})`]), found.group, set("group", Number)) : null,
    episodes.length > 1 ? choice("episodes", [["all", "side by side"], ...episodes.map((row, at) => [row.row, `${at + 1} alone`])], state.only, set("only")) : null);
}

function draw(run, steps, found) {
  if (!found.groups.length) return void root.replaceChildren(controls(run, steps, found), h("p", { class: "note" }, state.step === null
    ? "No episodes are recorded yet, or run.log_completions is false." : "These completions are single answers, or were recorded without their turns. They are under Completions."));
  if (!found.rows.some(({ row }) => String(row) === state.only)) state.only = "all";
  const rows = found.rows.filter(({ row }) => state.only === "all" || String(row) === state.only);
  const most = Math.max(...rows.map(({ play }) => play.length));
  const ledger = state.kind === "step" && run.tables.ledger.includes(state.step);
  const turns = Array.from({ length: most }, (_, at) => h("tr", {}, h("th", { scope: "row" }, String(at + 1)),
    rows.map((row) => h("td", {}, row.play[at] ? turn(row.play[at], at, rows, ledger) : h("span", { class: "soft" }, "–")))));
  root.replaceChildren(controls(run, steps, found),
    h("p", { class: "note" }, `Task ${found.uid}. Under each action: number of tokens, reward of the turn, and advantage of its tokens (of episode and turn, where the estimator has both). `
      + "≠ marks a turn at which the episodes of the group differ."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Episodes, turn by turn" }, h("table", { class: "episodes" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "turn"), rows.map((row) => h("th", { scope: "col" }, head(row, found.rows.indexOf(row)))))),
      h("tbody", {}, turns),
      h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "end"), rows.map((row) => h("td", {}, ending(row))))))));
}

/** What an episode came to. */
function head(row, at) {
  const credits = row.play.map(({ advantage }) => advantage).filter((value) => value !== null);
  const mean = credits.length ? credits.reduce((a, b) => a + b, 0) / credits.length : null;
  return h("div", { class: "facts" }, h("span", {}, `episode ${at + 1}`), h("b", { class: row.correct ? "good" : "bad" }, number(row.reward)),
    h("span", { class: `tag ${row.correct ? "good" : "bad"}` }, row.correct ? "success" : "no success"),
    mean === null ? null : h("span", {}, `advantage ${number(mean)} (mean of its turns)`), h("span", {}, `${row.turns} turns`));
}

function ending(row) {
  return h("div", { class: "facts" }, h("span", { class: CUT.includes(row.ended) ? "tag warn" : "tag" }, ENDS[row.ended] ?? row.ended),
    row.turns > row.play.length ? h("span", {}, `${row.turns - row.play.length} more turns were not recorded`) : null,
    row.error ? h("span", { class: "bad text" }, row.error) : null);
}

function turn(each, at, rows, ledger) {
  const others = rows.map(({ play }) => play[at]?.said.trim()).filter((said) => said !== undefined);
  const differs = new Set(others).size > 1;
  return h("div", {},
    pictures(state.run, [each]), h("div", { class: "text soft seen" }, each.seen),
    h("div", { class: "text said" }, h("span", { class: "soft", "aria-hidden": "true" }, differs ? "≠ " : "> "), each.said.trim() || "(nothing)"),
    each.action !== null && each.action !== "" && each.action !== each.said.trim() ? h("div", { class: "note text" }, `taken as: ${each.action}`) : null,
    h("div", { class: "facts" }, each.valid ? null : h("span", { class: "tag warn" }, "no valid action"),
      h("span", {}, `${number(each.tokens)} tokens`), h("span", { class: each.reward > 0 ? "good" : each.reward < 0 ? "bad" : "" }, `reward ${number(each.reward)}`),
      each.advantage === null ? null : h("span", { class: each.advantage > 0 ? "good" : each.advantage < 0 ? "bad" : "" }, `advantage ${number(each.advantage)}`,
        each.of_episode === null ? null : " ", each.of_episode === null ? null : h("span", { class: "soft" }, `= episode ${number(each.of_episode)}, turn ${number(each.advantage - each.of_episode)}`)),
      each.masked_by ? h("span", { class: "tag bad" }, `masked: ${each.masked_by}`) : null,
      ledger && each.row !== null ? h("button", { class: "small", onclick: () => goTo("Tokens", { run: state.run, step: state.step, row: each.row }) }, "tokens") : null));
}
