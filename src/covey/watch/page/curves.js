// Any metric of the runs, one chart each.

import { Chart, smooth } from "./chart.js";
import { ask, runs, shownRuns } from "./data.js";
import { choice, h, setter, tick } from "./dom.js";
import { plain, unit } from "./names.js";

const FIRST = ["eval/accuracy", "eval/accuracy by kind", "eval/reward", "reward", "completions/mean_length", "entropy", "kl", "grad_norm", "frac_reward_zero_std",
  "loss", "completions/clipped_ratio", "agent/success", "accuracy"];
const KINDS = "eval/accuracy by kind"; // of several curves one plot
const PALETTE = ["#1f77c9", "#e07b1a", "#2b9a5d", "#9552b5", "#c23b52", "#7a8793", "#0f9aa8", "#a58a00"];
const settings = { x: "step", smoothing: "auto", axes: "linear", marks: true, added: [], dropped: new Set() };
const charts = new Map();
let root, list, adding, marksBelow, names = [];

export function show(into) {
  root = into;
  charts.clear();
  list = h("div", { class: "panels" }, h("p", { class: "loading" }, "Loading…"));
  marksBelow = h("ol", { class: "marks" });
  adding = h("select", { "aria-label": "Add a metric", onchange: () => add(adding.value) });
  const redraw = (name) => setter(settings, draw)(name, (value) => value);
  root.replaceChildren(
    h("div", { class: "bar" },
      choice("x axis", [["step", "steps"], ["tokens", "tokens"], ["minutes", "minutes"]], settings.x, redraw("x")),
      choice("smoothing", [["auto", "automatic"], [0, "none"], [2, "5 steps"], [5, "11 steps"], [10, "21 steps"],
        [25, "51 steps"], [100, "201 steps"]], settings.smoothing, redraw("smoothing")),
      choice("scale", [["linear", "linear"], ["y", "y logarithmic"], ["x", "x logarithmic"], ["both", "both logarithmic"]], settings.axes, redraw("axes")),
      tick("mark phases and diagnoses", settings.marks, redraw("marks")),
      h("label", {}, h("span", { class: "soft" }, "add"), adding)),
    list,
    marksBelow);
  update();
}

export function update() {
  const known = new Set(runs.flatMap((run) => [...run.series.keys()]));
  if (runs.some((run) => kindsOf(run).length > 1)) known.add(KINDS);
  // Held-out reward is shown where it says what accuracy does not: of a run that has no accuracy.
  const useful = (name) => known.has(name) && (name !== "eval/reward" || runs.some((run) => run.series.has(name) && !run.series.has("eval/accuracy")));
  names = [...FIRST.filter(useful).slice(0, 8).filter((name) => !settings.dropped.has(name) && !settings.added.includes(name)), ...settings.added];
  const others = [...known].filter((name) => !names.includes(name)).sort();
  if (adding.options.length !== others.length + 1 && document.activeElement !== adding) {
    adding.replaceChildren(h("option", { value: "" }, "choose a metric…"),
      ...others.map((name) => h("option", { value: name }, plain(name) === name ? name : `${plain(name)} (${name})`)));
  }
  if (!known.size && runs.every((run) => run.loaded)) list.replaceChildren(h("p", {}, "No steps recorded yet."));
  draw();
}

function add(name) {
  if (!name) return;
  settings.added.push(name);
  adding.blur();
  update();
}

function drop(name) {
  settings.added = settings.added.filter((other) => other !== name);
  settings.dropped.add(name);
  charts.get(name).remove();
  charts.delete(name);
  update();
}

async function make(name) {
  const close = h("button", { class: "small", "aria-label": `Remove ${plain(name)}`, onclick: () => drop(name) }, "×");
  const chart = new Chart(plain(name), name, { tools: [close], csv: () => csv(name), unit: unit(name), name });
  charts.set(name, chart);
  const meaning = (await ask("describe", { name }))[name];
  if (meaning) chart.card.querySelector("h2").title = `${name}: ${meaning.filter(Boolean).join(": ")}`;
}

function draw() {
  if (!names.length) return;
  for (const name of names) if (!charts.has(name)) make(name);
  const cards = names.map((name) => charts.get(name).card); // one that is known later still has its place
  if (cards.length !== list.children.length || cards.some((card, at) => card !== list.children[at])) list.replaceChildren(...cards);
  const marks = settings.marks ? shownRuns().flatMap((run) => run.marks()) : [];
  const named = marks.slice(0, 60).map((mark, at) => ({ ...mark, name: String(at + 1), colour: runs.length > 1 && mark.run.colour, x: mark.run.place(mark.step, settings.x) }));
  for (const name of names) {
    charts.get(name).draw(shownRuns().flatMap((run) => linesOf(run, name)), {
      xLabel: settings.x, log: ["y", "both"].includes(settings.axes), logX: ["x", "both"].includes(settings.axes), marks: named,
      zero: name.startsWith("eval/accuracy"),
    });
  }
  marksBelow.replaceChildren(...named.map((mark) =>
    h("li", {}, h("b", {}, `${mark.name}  step ${mark.step} `), h("span", { class: "dot", style: { background: mark.run.colour } }),
      `${runs.length > 1 ? ` ${mark.run.label},` : ""} ${mark.kind}: ${mark.text}`)));
}

const kindsOf = (run) => [...run.series.keys()].filter((name) => name.startsWith("eval/accuracy/")).map((name) => name.slice(14)).sort();

/** The held-out accuracy of one kind of question; with its interval where that leaves the lines readable. */
function ofKind(run, kind, at, count) {
  const { xs, ys } = run.points(`eval/accuracy/${kind}`, settings.x);
  const [low, high] = ["low", "high"].map((edge) => run.points(`eval/accuracy_${edge}/${kind}`).ys);
  const several = shownRuns().length > 1;
  const line = { label: several ? `${run.label}: ${kind}` : kind, colour: PALETTE[at % PALETTE.length], xs, ys, points: true };
  const dash = several ? [[], [6, 4], [2, 3], [10, 3, 2, 3]][shownRuns().indexOf(run) % 4] : [];
  return { ...line, dash, ...(count <= 3 && !several && low.length === ys.length && high.length === ys.length ? { low, high } : {}) };
}

/** Steps on either side: as in the learning curve up to a thousand steps, a hundredth of what is longer. */
const automatic = (steps) => Math.max(1, Math.min(10, Math.floor(steps / 10)), Math.floor(steps / 100));

function linesOf(run, name) {
  if (name === KINDS) return kindsOf(run).flatMap((kind, at, all) => ofKind(run, kind, at, all.length));
  const { xs, ys } = run.points(name, settings.x);
  const line = { label: run.label, colour: run.colour, xs, ys };
  if (name === "eval/accuracy") {
    const [low, high] = ["eval/accuracy_low", "eval/accuracy_high"].map((edge) => run.points(edge).ys);
    const whole = low.length === ys.length && high.length === ys.length;
    return [{ ...line, points: true, ...(whole ? { low, high } : {}) }];
  }
  if (name.startsWith("eval/")) return [{ ...line, points: true }];
  const reach = settings.smoothing === "auto" ? automatic(ys.length) : Number(settings.smoothing);
  if (reach === 0 || ys.length < 3) return [line];
  return [{ ...line, label: "", thin: true }, { ...line, ys: smooth(ys, reach) }];
}

function csv(name) {
  const lines = ["run,step,tokens,minutes,value"];
  const quoted = (text) => `"${text.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  const curves = shownRuns().flatMap((run) => (name === KINDS ? kindsOf(run).map((kind) => [run, `eval/accuracy/${kind}`]) : [[run, name]]));
  for (const [run, metric] of curves) {
    const { ys, steps } = run.points(metric);
    const label = name === KINDS ? `${run.label}: ${metric}` : run.label;
    steps.forEach((step, at) => lines.push([quoted(label), step, run.tokens.get(step) ?? "", run.minutes.get(step) ?? "", ys[at]].join()));
  }
  return `${lines.join("\n")}\n`;
}
