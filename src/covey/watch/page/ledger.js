// The token ledger: what each token of a completion got, and what it added to the loss of its step.

import { ask, pick, runChoice, runs } from "./data.js";
import { choice, h, number, percent, setter } from "./dom.js";

const COLUMNS = { advantage: "advantage", loss: "contribution to the loss", gradient: "gradient (d loss / d log-prob)", share: "share of the gradient", weight: "weight in the loss", ratio: "importance ratio",
  difference: "log-prob, trainer minus sampler", logp: "log-prob of the trainer", sampler_logp: "log-prob of the sampler", entropy: "entropy, nats", kl: "KL from the reference, nats", clipped: "clipped (1 = yes)" };
/** Columns that say whether a token is reinforced, with the sign that means it: a lower loss is a more likely token. */
const REINFORCES = { advantage: 1, loss: -1, gradient: -1 };
const state = { run: 0, step: null, row: null, column: "advantage", turn: 0 };
let root, visit = 0;

export function show(into, where = {}) {
  Object.assign(state, where);
  root = into;
  state.run = pick("Tokens", state.run);
  load();
}

export function update(changed) {
  if (changed.has("tables") && !root.contains(document.activeElement) && state.row === null) load();
}

async function load() {
  const mine = ++visit;
  const run = runs[state.run];
  const steps = run.tables.ledger;
  if (!steps.length) return void root.replaceChildren(h("p", {}, "This run has recorded no tokens. ", h("code", {}, "run.ledger=off,all:10"), " records those of every tenth step."));
  if (!steps.includes(state.step)) [state.step, state.row] = [steps.at(-1), null];
  try {
    const { completions } = await ask(`${run.index}/ledger`, { step: state.step });
    if (mine !== visit) return;
    const turns = [...new Set(completions.map((each) => each.pass))];
    if (!turns.includes(state.turn)) [state.turn] = turns;
    const here = completions.filter((each) => each.pass === state.turn);
    if (!here.length) return void root.replaceChildren(h("p", {}, `Step ${number(state.step)} trained on nothing: no completion had a gradient.`));
    if (!here.some(({ row }) => row === state.row)) state.row = here[0].row;
    const { tokens } = await ask(`${run.index}/ledger/${state.row}`, { step: state.step, turn: state.turn });
    if (mine === visit) draw(run, steps, turns, here, tokens);
  } catch (error) {
    if (mine === visit) root.replaceChildren(h("p", { class: "failed" }, error.message));
  }
}

function draw(run, steps, turns, completions, tokens) {
  const set = setter(state, load);
  for (const token of tokens) if (token.logp !== undefined) token.difference = token.logp - token.sampler_logp;
  const known = Object.keys(COLUMNS).filter((name) => tokens.some((token) => token[name] !== undefined));
  if (!known.includes(state.column)) [state.column] = known;
  const values = tokens.map((token) => token[state.column]);
  const middle = state.column === "ratio" ? 1 : 0;
  const sign = REINFORCES[state.column] ?? 0;
  // Advantages have one scale for all completions: a small one is pale.
  const most = Math.max(state.column === "advantage" ? 1 : 1e-12, ...values.filter((value) => value !== undefined).map((value) => Math.abs(value - middle)));
  const facts = h("div", {});
  const spans = tokens.map((token, at) => h("span", {
    class: token.masked_by ? "masked" : "", style: { background: shade(values[at], middle, most, sign) }, tabindex: at ? -1 : 0,
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
      runChoice("Tokens", state.run, set("run", Number)),
      choice("step", steps, state.step, set("step", Number)),
      turns.length > 1 ? choice("optimiser step", turns.map((turn) => [turn, String(turn + 1)]), state.turn, set("turn", Number)) : null,
      choice("completion", completions.map(({ row, group, tokens: count }) => [row, `${row + 1} (group ${group}, ${count} tokens)`]), state.row, set("row", Number)),
      choice("colour", known.map((name) => [name, COLUMNS[name]]), state.column, set("column", String))),
    h("p", { class: "legend" }, swatch(1, sign && 1, sign ? "reinforced: made more likely" : `above ${middle}`), swatch(-1, sign && 1, sign ? "made less likely" : `below ${middle}`),
      h("span", {}, h("s", {}, "crossed out"), "masked")),
    h("div", { class: "card tokens" }, spans), h("h2", {}, "Selected token"), facts,
    h("p", { class: "note" }, `This completion adds ${number(mine.loss)} to the loss and has ${percent(mine.share)} of the gradient. The ${completions.length} recorded completions add up to ${number(whole)}; the loss of step ${number(state.step)} is ${number(logged)}${turns.length > 1 ? " (mean over its optimiser steps)" : ""}${at >= 0 ? `, in phase ${phase.ys[at] + 1}` : ""}. `
      + "A completion that is missing here had no gradient, or its group was not recorded (run.ledger)."));
  if (tokens.length) tell(0);
}

function shade(value, middle, most, sign) {
  if (value === undefined) return "";
  const strength = Math.round(55 * Math.min(1, Math.abs(value - middle) / most));
  const [above, below] = sign === 0 ? ["#1f77c9", "#e07b1a"] : sign > 0 ? ["#2b9a5d", "#d0364c"] : ["#d0364c", "#2b9a5d"];
  return `color-mix(in srgb, ${value >= middle ? above : below} ${strength}%, transparent)`;
}

const swatch = (value, sign, text) => h("span", {}, h("span", { class: "swatch", style: { background: shade(value, 0, 1, sign) } }), text);

const visible = (text) => text.replaceAll("\n", "⏎\n").replace(/[\0-\x09\x0b-\x1f\x7f]/g, "·") || "∅";
