// Where the seconds and the memory go.

import { Chart } from "./chart.js";
import { runs, shownRuns } from "./data.js";
import { choice, h, number, percent } from "./dom.js";

const PARTS = ["time/sampling", "time/scoring", "time/waiting_for_samples", "time/reference", "time/update", "time/publish"];
const COLOURS = ["#1f77c9", "#e07b1a", "#7a8793", "#9552b5", "#2b9a5d", "#c23b52"];
const OTHERS = [["Memory, GB", ["memory/peak_gb", "memory/peak_cuda_gb"]], ["Staleness, optimiser steps", ["staleness/mean", "staleness/max"]],
  ["Agents: share of time that waits", ["agent/waiting_share"]]];
let root, chosen = 0, charts = {}, tiles;

export function show(into) {
  root = into;
  if (!shownRuns().includes(runs[chosen])) chosen = shownRuns()[0]?.index ?? 0;
  const run = runs[chosen];
  charts = { parts: new Chart("Seconds of a step, by part", "stacked"), speed: new Chart("Tokens a second", "prompt and sampled tokens of a step over its seconds") };
  const panels = h("div", { class: "panels" }, charts.parts.card, charts.speed.card);
  for (const [title, names] of OTHERS) {
    if (!names.some((name) => run.series.has(name))) continue;
    charts[title] = new Chart(title, names.join(", "));
    panels.append(charts[title].card);
  }
  tiles = h("div", { class: "tiles" });
  root.replaceChildren(
    h("div", { class: "bar" }, runs.length > 1 ? choice("run", runs.map((each) => [each.index, each.label]), chosen, (value) => {
      chosen = Number(value);
      show(root);
    }) : null),
    tiles, panels, h("h2", {}, "Versions and machine"),
    h("table", {}, h("tbody", {}, Object.entries(run.about.versions).map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value))))));
  update();
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

export function update() {
  const run = runs[chosen];
  const whole = run.points("step_time");
  const total = new Map(whole.steps.map((step, at) => [step, whole.ys[at]]));
  const parts = PARTS.filter((name) => run.series.has(name));
  let below = whole.steps.map(() => 0);
  const shares = [];
  const stacked = parts.map((name) => {
    const { steps, ys } = run.points(name);
    const values = new Map(steps.map((step, at) => [step, ys[at]]));
    shares.push([name, ys.reduce((a, b) => a + b, 0)]);
    const told = whole.steps.map((step) => values.get(step) ?? 0);
    below = below.map((sum, at) => sum + (values.get(whole.steps[at]) ?? 0));
    const colour = COLOURS[PARTS.indexOf(name)];
    return { label: name.slice(5), colour, xs: whole.steps, ys: below, fill: colour, told };
  });
  // The highest is drawn first, so that each shows above the one before.
  charts.parts.draw([{ label: "whole step", colour: "#59626e", xs: whole.steps, ys: whole.ys }, ...stacked.reverse()], { zero: true });
  const { steps, ys } = run.points("num_tokens");
  const speed = steps.map((step, at) => [step, (ys[at] - (at ? ys[at - 1] : 0)) / (total.get(step) || NaN)]).filter(([, value]) => Number.isFinite(value));
  charts.speed.draw([{ label: "tokens/s", colour: COLOURS[0], xs: speed.map(([x]) => x), ys: speed.map(([, y]) => y) }], { zero: true });
  for (const [title, names] of OTHERS) {
    charts[title]?.draw(names.map((name, at) => ({ label: name, colour: COLOURS[at], ...run.points(name) })), { zero: true });
  }
  const seconds = whole.ys.reduce((a, b) => a + b, 0);
  const tile = (text, value) => h("div", { class: "card" }, h("span", { class: "soft" }, text), h("b", {}, value));
  tiles.replaceChildren(
    tile("a step (median)", `${number(median(whole.ys))} s`), tile("tokens a second (median)", number(median(speed.map(([, y]) => y)) && Math.round(median(speed.map(([, y]) => y))))),
    tile("peak memory", `${number(run.last("memory/peak_gb"))} GB`), tile("so far", `${number(run.seconds / 60)} min`),
    ...shares.filter(([, sum]) => sum > 0.01 * seconds).map(([name, sum]) => tile(name.slice(5).replaceAll("_", " "), percent(sum / seconds))));
}
