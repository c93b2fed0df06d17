// The settings of each run, as its config.toml has them. Of several runs those that differ come first.

import { shownRuns } from "./data.js";
import { h } from "./dom.js";

export function show(root) {
  const runs = shownRuns();
  const settings = runs.map((run) => run.about.settings);
  const names = [...new Set(settings.flatMap((each) => Object.keys(each)))];
  const differ = names.filter((name) => new Set(settings.map((each) => each[name])).size > 1);
  root.replaceChildren(
    runs.length > 1 ? h("div", {}, h("h2", {}, "Settings that differ"), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "setting"), runs.map((run) => h("th", {}, run.label)))),
      h("tbody", {}, differ.map((name) => h("tr", {}, h("td", {}, name), settings.map((each) => h("td", { class: "text" }, each[name] ?? "–")))))))) : "",
    ...runs.flatMap((run) => [h("h2", {}, `${run.label}: config.toml`), h("pre", { class: "card" }, run.about.config || "This run has no config.toml.")]));
}
