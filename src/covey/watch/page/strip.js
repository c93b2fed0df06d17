// The strip on top: is it working? Held-out result before and now, progress, time left, what the doctor says.

import { runs, shownRuns } from "./data.js";
import { duration, h, number, percent } from "./dom.js";

const FEW = 5; // steps before which the doctor says nothing, and over which a training reward is averaged
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

/** What was measured on held-out questions, first and last; of a run without an evaluation the training reward. */
function result(run) {
  const name = ["eval/accuracy", "eval/reward"].find((each) => run.series.has(each));
  if (!name) {
    const { ys } = run.points("reward");
    return { label: "Training reward (no held-out evaluation)", say: number, before: mean(ys.slice(0, FEW)), now: mean(ys.slice(-FEW)), several: ys.length > FEW, more: `mean of ${FEW} steps` };
  }
  const { steps, ys } = run.points(name);
  const judged = name === "eval/accuracy";
  const found = { label: judged ? "Held-out accuracy" : "Held-out reward", say: judged ? percent : number, before: ys[0], now: ys.at(-1), several: ys.length > 1 };
  found.more = [h("span", { class: "steps" }, found.several ? `step ${number(steps[0])} → step ${number(steps.at(-1))}` : `step ${number(steps[0])}`)];
  const [low, high] = ["low", "high"].map((edge) => run.points(`${name}_${edge}`));
  if (!judged || low.steps.at(-1) !== steps.at(-1) || high.steps.at(-1) !== steps.at(-1)) return found;
  const between = (at) => `${number(100 * low.ys.at(at), 3)} to ${number(100 * high.ys.at(at), 3)} %`;
  found.more.push(h("span", { class: "steps" }, ", "), `95 % interval ${between(-1)}`);
  if (found.several && low.steps[0] === steps[0]) {
    found.tag = low.ys.at(-1) > high.ys[0] ? ["good", "improved"] : high.ys.at(-1) < low.ys[0] ? ["bad", "worse"] : ["", "within the noise"];
    found.why = `95 % interval of the first evaluation: ${between(0)}. Improved or worse: it does not overlap with the last one.`;
  }
  return found;
}

const tile = (kind, label, value, more) => h("div", { class: `tile ${kind}` }, h("span", { class: "soft" }, label), h("b", {}, value), h("span", { class: "note" }, more));

function verdict(run, go) {
  const now = run.doctor.filter((said) => said.now);
  if (!now.length) return [!run.diagnosed ? "…" : run.steps() < FEW ? "Too few steps to tell" : h("span", { class: "good" }, "No problems found"), ""];
  const first = now[0].message.charAt(0).toUpperCase() + now[0].message.slice(1);
  return [h("button", { class: "link", title: first, onclick: () => go("Doctor") }, first.split(/ \(last|[;:] /)[0]), now.length > 1 ? `and ${now.length - 1} more` : `since step ${number(now[0].step)}`];
}

/** The strip of a run, with its name where there are several. */
function row(run, go) {
  const found = result(run);
  const [total, left] = [run.total(), run.left()];
  const value = [...(found.several ? [found.say(found.before), " → "] : []), found.say(found.now)];
  if (found.tag) value.push(" ", h("span", { class: `tag ${found.tag[0]}`, title: found.why }, found.tag[1]));
  return h("section", { class: `strip ${runs.length > 1 ? "many" : ""}`, "aria-label": `Summary of ${run.label}` },
    runs.length > 1 ? h("div", { class: "tile whose" }, h("span", { class: "dot", style: { background: run.colour } }), " ", run.label) : null,
    tile("result", found.label, value, found.more), tile("progress", "Progress", `step ${number(run.step)}${total ? ` of ${number(total)}` : ""}`, run.status()),
    run.runs() ? tile("time", "Time left", left === null ? "–" : `about ${duration(left)}`, `${duration(run.seconds)} so far`)
      : tile("time", "Duration", duration(run.seconds), run.steps() ? `${duration(run.seconds / run.steps())} per step` : ""),
    tile("says", "Doctor", ...verdict(run, go)));
}

export function drawStrip(place, go) {
  if (place.contains(document.activeElement)) return;
  const rows = shownRuns().filter((run) => run.loaded || run.series.size).map((run) => row(run, go));
  place.replaceChildren(...(rows.length || !runs.length ? rows : [h("p", { class: "loading" }, runs.some((run) => run.shown) ? "Loading…" : "No run is chosen.")]));
}
