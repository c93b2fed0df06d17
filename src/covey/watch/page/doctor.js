// What the doctor says of the runs, since when, and the curves behind it.

import { Chart } from "./chart.js";
import { runs, shownRuns } from "./data.js";
import { h } from "./dom.js";
import { plain, unit } from "./names.js";

const BEHIND = {
  not_finite: ["loss", "grad_norm"], rewards_none: ["frac_reward_none"], reward_never_nonzero: ["reward"], reward_constant: ["reward", "reward_std"],
  groups_all_right: ["frac_reward_zero_std", "reward"], groups_all_wrong: ["frac_reward_zero_std", "reward"], groups_tied: ["frac_reward_zero_std", "reward"],
  gradient_zero: ["grad_norm"], learning_rate_zero: ["learning_rate"], policy_does_not_move: ["kl", "learning_rate"],
  completions_truncated: ["completions/clipped_ratio", "completions/max_length"], completions_short: ["completions/mean_length"],
  no_answer: ["completions/no_answer_ratio"], mask_ratio_low: ["mask_ratio"], mask_ratio_high: ["mask_ratio"], kl_high: ["kl"],
  clip_fraction_high: ["clip_ratio/region_mean"], entropy_collapse: ["entropy"], entropy_fell: ["entropy"], actions_alike: ["agent/same_action_ratio", "agent/success"], sampler_mismatch: ["sampling/sampling_logp_difference/mean"],
  reward_falling: ["reward"], reward_flat: ["reward"],
};
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
let root;

export function show(into) {
  root = into;
  update(new Set(["doctor"]));
}

export function update(changed) {
  if (!changed.has("doctor") && !changed.has("events")) return;
  const parts = [];
  const draws = [];
  for (const run of shownRuns()) {
    parts.push(h("h2", {}, runs.length > 1 ? `${run.label}: diagnoses` : "Diagnoses"));
    if (!run.doctor.length) parts.push(h("p", { class: "note" }, run.diagnosed ? "No problems found." : "Loading…"));
    for (const said of [...run.doctor].reverse()) {
      const names = BEHIND[said.code] ?? (said.code.startsWith("masked_") ? [`mask/${said.code.slice(7)}`] : []);
      const charts = names.filter((name) => run.series.has(name)).map((name) => {
        const chart = new Chart(plain(name), name, { height: 130, unit: unit(name), name });
        const marks = [{ x: said.step, kind: "doctor", name: `step ${said.step}` }];
        draws.push(() => chart.draw([{ label: name, colour: run.colour, ...run.points(name) }], { marks }));
        return chart.card;
      });
      parts.push(h("section", { class: "card group" },
        h("div", { class: "facts" }, h("span", { class: `tag ${said.now ? "warn" : ""}` }, said.now ? "now" : "resolved"), h("b", {}, `since step ${said.step}`),
          h("span", {}, said.code)),
        h("p", {}, `${sentence(said.message)}.`), h("p", { class: "good" }, `${said.fix}.`), h("div", { class: "panels" }, charts)));
    }
    const events = run.events.filter(([, kind]) => kind !== "diagnosis").slice(-200).reverse();
    parts.push(h("h2", {}, "Events"), h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, events.map(([time, kind, message]) =>
      h("tr", {}, h("td", { class: "soft" }, time === null ? "" : new Date(1000 * time).toLocaleString("sv")), h("td", {}, kind), h("td", { class: "text" }, message)))))));
  }
  root.replaceChildren(...parts);
  for (const draw of draws) draw();
}
