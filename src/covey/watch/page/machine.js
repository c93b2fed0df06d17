// Where the seconds and the memory go.

import { Chart } from "./chart.js";
import { pick, runChoice, runs } from "./data.js";
import { duration, h, median, number, percent } from "./dom.js";
import { plain } from "./names.js";

const PARTS = ["time/sampling", "time/scoring", "time/waiting_for_samples", "time/reference", "time/update", "time/publish"];
const SECTIONS = ["distributed", "vllm", "serving", "schedule"];
const COLOURS = ["#1f77c9", "#e07b1a", "#7a8793", "#9552b5", "#2b9a5d", "#c23b52"];
const OTHERS = [["Memory, GB", ["memory/peak_gb", "memory/peak_cuda_gb"]], ["Staleness, optimiser steps", ["staleness/mean", "staleness/max"]],
  ["Agents: share of time waiting for the environment", ["agent/waiting_share"]],
  ["Samplers: idle seconds", ["time/samplers_waiting"]], ["Samplers: restarts, repeated batches", ["samplers/restarts", "samplers/reissued_units"]],
  ["Version of the sampler's weights", ["policy_version"]]];
const PLAIN = { sampling: "sampling", scoring: "rewards", waiting_for_samples: "waiting for samples", reference: "reference", update: "training", publish: "weight sync" };
let root, chosen = 0, charts = {}, tiles, samplers;

export function show(into) {
  root = into;
  chosen = pick("Machine", chosen);
  const run = runs[chosen];
  charts = { parts: new Chart("Seconds of a step, by part", "stacked"), speed: new Chart("Tokens per second", "prompt and sampled tokens of a step over its seconds") };
  const panels = h("div", { class: "panels" }, charts.parts.card, charts.speed.card);
  for (const [title, names] of OTHERS) {
    if (!names.some((name) => run.series.has(name))) continue;
    charts[title] = new Chart(title, names.join(", "));
    panels.append(charts[title].card);
  }
  [tiles, samplers] = [h("div", { class: "tiles" }), h("div", {})];
  root.replaceChildren(
    h("div", { class: "bar" }, runChoice("Machine", chosen, (value) => { chosen = Number(value); show(root); })), tiles, panels, samplers, h("h2", {}, "Versions and machine"),
    h("table", {}, h("tbody", {}, Object.entries(run.about.versions).map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value))))));
  update();
}


/** What samples: as it is set, and what the run said of it. */
function drawSamplers(run) {
  const set = Object.entries(run.about.settings).filter(([name]) => SECTIONS.slice(0, 3).some((section) => name.startsWith(`${section}.`)) || name === "schedule.max_staleness");
  const events = run.events.filter(([, kind]) => kind === "sampler").slice(-50).reverse();
  const version = run.last("policy_version");
  samplers.replaceChildren(
    h("h2", {}, "Samplers and servers"),
    h("p", { class: "note" }, `Newest completions: sampled from version ${number(version)} of the weights${run.series.has("staleness/max") ? `, at most ${number(run.last("staleness/max"))} optimiser steps old` : ""}.`),
    members(run.tables),
    set.length ? h("details", {}, h("summary", {}, "settings"), h("table", {}, h("tbody", {}, set.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", { class: "text" }, value)))))) : "",
    events.length ? h("ul", {}, events.map(([time, , message]) => h("li", {}, time === null ? "" : `${new Date(1000 * time).toLocaleString("sv")}  `, message)))
      : h("p", { class: "note" }, "No sampler or server failed or was replaced."));
}

/** Those that the trainer knows: itself, actors, servers. */
function members({ samplers: all, samplers_step: step, samplers_left: left }) {
  if (!all?.length) return "";
  const held = ({ version, server, left }) => left ? "given up" : version === undefined ? "none: it is being replaced"
    : server === undefined || server === version ? number(version) : `${number(version)} (its own count: ${number(server)})`;
  return h("div", {}, h("p", { class: "note" }, `After step ${number(step)}${left ? `; ${number(left)} more are not listed` : ""}.`),
    h("table", {}, h("thead", {}, h("tr", {}, ["sampler or server", "version of its weights", "batches sampled", "failures"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, all.map((one) => h("tr", {}, h("td", { class: "text" }, one.name), h("td", {}, held(one)),
      h("td", {}, one.units === undefined ? "–" : number(one.units)), h("td", { class: one.failed ? "bad" : "" }, one.failed === undefined ? "–" : number(one.failed)))))));
}

export function update() {
  const run = runs[chosen];
  drawSamplers(run);
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
    return { label: PLAIN[name.slice(5)], colour: COLOURS[PARTS.indexOf(name)], xs: whole.steps, ys: below, fill: COLOURS[PARTS.indexOf(name)], told };
  });
  // The highest is drawn first, so that each shows above the one before.
  charts.parts.draw([{ label: "whole step", colour: "#59626e", xs: whole.steps, ys: whole.ys }, ...stacked.reverse()], { zero: true });
  const { steps, ys } = run.points("num_tokens");
  const speed = steps.map((step, at) => [step, (ys[at] - (at ? ys[at - 1] : 0)) / (step - (at ? steps[at - 1] : step - 1)) / (total.get(step) || NaN)]).filter(([, value]) => Number.isFinite(value));
  charts.speed.draw([{ label: "tokens per second", colour: COLOURS[0], xs: speed.map(([x]) => x), ys: speed.map(([, y]) => y) }], { zero: true });
  for (const [title, names] of OTHERS) charts[title]?.draw(names.map((name, at) => ({ label: plain(name), colour: COLOURS[at], ...run.points(name) })), { zero: true });
  const seconds = whole.ys.reduce((a, b) => a + b, 0);
  const tile = (text, value) => h("div", { class: "card" }, h("span", { class: "soft" }, text), h("b", {}, value));
  tiles.replaceChildren(
    tile("step time (median)", duration(median(whole.ys))), tile("tokens per second (median)", number(median(speed.map(([, y]) => y)) && Math.round(median(speed.map(([, y]) => y))))),
    tile("peak memory", `${number(run.last("memory/peak_gb"))} GB`), tile("elapsed", duration(run.seconds)),
    ...shares.filter(([, sum]) => sum > 0.01 * seconds).map(([name, sum]) => tile(PLAIN[name.slice(5)], percent(sum / seconds))));
}
