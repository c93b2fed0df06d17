// The token ledger: what each token of a completion got, and what it added to the loss of its step.

import { ask, runs, shownRuns } from "./data.js";
import { choice, h, number, percent } from "./dom.js";

const COLUMNS = { loss: "contribution to the loss", gradient: "d loss / d log-prob", share: "share of the gradient", advantage: "advantage", weight: "weight in the loss", ratio: "ratio",
  difference: "trainer – sampler", logp: "log-prob of the trainer", sampler_logp: "log-prob of the sampler", entropy: "entropy", kl: "KL", clipped: "clipped" };
const state = { run: 0, step: null, row: null, column: "loss", turn: 0 };
let root, visit = 0;

export function show(into, where = {}) {
  Object.assign(state, where);
  root = into;
  if (!shownRuns().includes(runs[state.run])) state.run = shownRuns()[0]?.index ?? 0;
  load();
}

export function update(changed) {
  if (changed.has("tables") && !root.contains(document.activeElement) && state.row === null) load();
}

async function load() {
  const mine = ++visit;
  const run = runs[state.run];
  const steps = run.tables.ledger;
  if (!steps.length) {
    root.replaceChildren(h("p", {}, "This run has no token ledger. ", h("code", {}, "run.ledger=off,all:10"), " writes one every ten steps."));
    return;
  }
  if (!steps.includes(state.step)) [state.step, state.row] = [steps.at(-1), null];
  try {
    const { completions } = await ask(`${run.index}/ledger`, { step: state.step });
    if (mine !== visit) return;
    const turns = [...new Set(completions.map((each) => each.pass))];
    if (!turns.includes(state.turn)) [state.turn] = turns;
    const here = completions.filter((each) => each.pass === state.turn);
    if (!here.length) {
      root.replaceChildren(h("p", {}, `Step ${state.step} trained on nothing: no completion had a gradient.`));
      return;
    }
    if (!here.some(({ row }) => row === state.row)) state.row = here[0].row;
    const { tokens } = await ask(`${run.index}/ledger/${state.row}`, { step: state.step, turn: state.turn });
    if (mine === visit) draw(run, steps, turns, here, tokens);
  } catch (error) {
    if (mine === visit) root.replaceChildren(h("p", { class: "failed" }, error.message));
  }
}

function draw(run, steps, turns, completions, tokens) {
  const set = (name, read) => (value) => {
    state[name] = read(value);
    load();
  };
  for (const token of tokens) if (token.logp !== undefined) token.difference = token.logp - token.sampler_logp;
  const known = Object.keys(COLUMNS).filter((name) => tokens.some((token) => token[name] !== undefined));
  if (!known.includes(state.column)) [state.column] = known;
  const values = tokens.map((token) => token[state.column]);
  const middle = state.column === "ratio" ? 1 : 0;
  const most = Math.max(1e-12, ...values.filter((value) => value !== undefined).map((value) => Math.abs(value - middle)));
  const facts = h("div", {});
  const spans = tokens.map((token, at) => h("span", {
    class: token.masked_by ? "masked" : "", style: { background: shade(values[at], middle, most) }, tabindex: at ? -1 : 0,
    onmouseenter: () => tell(at), onfocus: () => tell(at), onkeydown: (event) => step(event, at),
  }, visible(token.token)));
  // One stop for the Tab key; arrows go from token to token.
  const step = (event, at) => {
    const next = spans[at + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0)];
    if (!next || next === spans[at]) return;
    event.preventDefault();
    spans[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
  const tell = (at) => {
    spans.forEach((span, other) => span.classList.toggle("chosen", other === at));
    const token = tokens[at];
    facts.replaceChildren(h("table", {}, h("tbody", {},
      h("tr", {}, h("td", {}, "token"), h("td", { class: "text" }, `${JSON.stringify(token.token)} (${token.token_id}, position ${token.position})`)),
      token.masked_by ? h("tr", {}, h("td", {}, "masked by"), h("td", {}, token.masked_by)) : null,
      known.map((name) => h("tr", {}, h("td", {}, COLUMNS[name]), h("td", { class: "number" }, number(token[name])))))));
  };
  const whole = completions.reduce((sum, { loss }) => sum + loss, 0);
  const { steps: logSteps, ys: losses } = run.points("loss");
  const logged = losses[logSteps.indexOf(state.step)];
  const phase = run.points("phase");
  const at = phase.steps.indexOf(state.step);
  const mine = completions.find(({ row }) => row === state.row);
  root.replaceChildren(
    h("div", { class: "bar" },
      runs.length > 1 ? choice("run", runs.map((each) => [each.index, each.label]), state.run, set("run", Number)) : null,
      choice("step", steps, state.step, set("step", Number)),
      turns.length > 1 ? choice("pass", turns.map((turn) => [turn, String(turn + 1)]), state.turn, set("turn", Number)) : null,
      choice("completion", completions.map(({ row, group, tokens: count }) => [row, `${row} (group ${group}, ${count} tokens)`]), state.row, set("row", Number)),
      choice("colour", known.map((name) => [name, COLUMNS[name]]), state.column, set("column", String))),
    h("p", { class: "note" }, `This completion adds ${number(mine.loss)} to the loss and has ${percent(mine.share)} of the gradient; the ${completions.length} in the ledger add up to ${number(whole)}; the step's loss is ${number(logged)}${turns.length > 1 ? " (mean of its passes)" : ""}${at >= 0 ? `, in phase ${phase.ys[at] + 1}` : ""}. `
      + "Those that are not in it had no gradient, or their group was not chosen (run.ledger). Blue is above, red below zero (of ratios: one). Crossed out is masked."),
    h("div", { class: "card tokens" }, spans), h("h2", {}, "Under the pointer"), facts);
  if (tokens.length) tell(0);
}

function shade(value, middle, most) {
  if (value === undefined) return "";
  const strength = Math.round(60 * Math.min(1, Math.abs(value - middle) / most));
  return `color-mix(in srgb, ${value >= middle ? "#1f77c9" : "#d0364c"} ${strength}%, transparent)`;
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replace(/[\0-\x09\x0b-\x1f\x7f]/g, "·") || "∅";
