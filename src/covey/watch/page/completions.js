// What was sampled: groups side by side, and evaluations before and after.

import { ask, pick, pictureAddress, runChoice, runs } from "./data.js";
import { choice, h, number, setter, tick, visible } from "./dom.js";

const state = { run: 0, kind: "step", step: null, search: "", shown: "all", uid: "", ended: "", reward_from: "", reward_to: "", length_from: "", length_to: "", everywhere: false, before: null, after: null, changed: "changed" };
const SHOWN = [["all", "all completions"], ["right", "right"], ["wrong", "wrong"], ["truncated", "cut off"],
  ["masked", "masked"], ["tied", "equal rewards in group"], ["mixed", "mixed rewards in group"]];
const FILTERS = ["ended", "reward_from", "reward_to", "length_from", "length_to"];
const CHANGED = [["changed", "changed"], ["gained", "gained"], ["lost", "lost"], ["all", "all"]];
export const ENDS = { stop: "ended by itself", length: "cut off at the length limit", eos: "end token", done: "finished", turns: "cut off at the turn limit", context: "cut off at the context limit", failed: "environment failed" };
export const CUT = ["length", "failed", "turns", "context"];
let root, bar, body, visit = 0, goTo, newest = true;

export function show(into, where = {}, go) {
  Object.assign(state, where);
  goTo = go;
  root = into;
  bar = h("div", { class: "bar" });
  body = h("div", {}, h("p", { class: "loading" }, "Loading…"));
  root.replaceChildren(bar, body);
  state.run = pick("Completions", state.run);
  load();
}

export function update(changed) {
  if (!changed.has("tables") || root.contains(document.activeElement)) return;
  if (newest) state.step = null; // who looks at the newest step stays with it
  load();
}

function controls() {
  const run = runs[state.run];
  const set = setter(state, load);
  const search = h("input", { type: "search", value: state.search, placeholder: "text in prompt or completion", "aria-label": "Search",
    onchange: () => set("search")(search.value) });
  const steps = run.tables[state.kind] ?? [];
  const parts = [runChoice("Completions", state.run, set("run", Number)),
    choice("from", [["step", "training"], ["eval", "one evaluation"], ["compare", "two evaluations"]], state.kind, (kind) => { state.step = null; set("kind")(kind); })];
  if (state.kind === "compare") {
    const evals = run.tables.eval;
    parts.push(choice("before: step", evals, state.before, set("before", Number)), choice("after: step", evals, state.after, set("after", Number)),
      choice("show", CHANGED, state.changed, set("changed")));
  } else {
    const at = steps.indexOf(state.step);
    const move = (by) => h("button", { disabled: steps[at + by] === undefined, "aria-label": by < 0 ? "Step before" : "Step after",
      onclick: () => set("step", Number)(steps[at + by]) }, by < 0 ? "‹" : "›");
    const field = h("input", { type: "number", value: state.step ?? "", min: 0, style: { width: "6.5rem" }, "aria-label": "Step",
      onchange: () => set("step", Number)(nearest(steps, Number(field.value))) });
    const slider = h("input", { type: "range", min: 0, max: Math.max(0, steps.length - 1), value: Math.max(0, at), "aria-label": "Step",
      onchange: () => set("step", Number)(steps[Number(slider.value)]) });
    parts.push(h("label", {}, h("span", { class: "soft" }, "step"), move(-1), field, move(1)), slider,
      choice("show", SHOWN, state.shown, set("shown")), search);
    const bound = (name, label) => {
      const input = h("input", { type: "number", step: "any", value: state[name], style: { width: "5.5rem" }, "aria-label": label, onchange: () => set(name)(input.value) });
      return input;
    };
    parts.push(h("details", { class: "more", open: FILTERS.some((name) => state[name] !== "") }, h("summary", {}, "more filters"),
      h("div", { class: "bar" },
        h("span", {}, "reward ", bound("reward_from", "Least reward"), " to ", bound("reward_to", "Highest reward")),
        h("span", {}, "tokens ", bound("length_from", "Fewest tokens"), " to ", bound("length_to", "Most tokens")),
        choice("ended by", [["", "anything"], ...Object.entries(ENDS)], state.ended, set("ended")))));
    if (state.kind === "step") parts.push(tick("in all steps", state.everywhere, set("everywhere", Boolean)));
    if (state.uid) parts.push(h("button", { onclick: () => set("uid")("") }, `only question ${state.uid} ×`));
  }
  bar.replaceChildren(...parts.filter(Boolean));
}

const nearest = (steps, wanted) => steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]);

/** What is asked for, without what is not set. */
function asked() {
  const found = { search: state.search, shown: state.shown, uid: state.uid };
  for (const name of FILTERS) if (state[name] !== "") found[name] = state[name];
  return found;
}

const asks = () => Object.entries(asked()).some(([name, value]) => value !== "" && value !== "all" && name !== "uid");

/** Through the steps, the newest first, in portions that take a second or two. */
async function searchAll(before = null, looked = 0) {
  const run = runs[state.run];
  const mine = ++visit;
  if (before === null) controls();
  try {
    const found = await ask(`${run.index}/search`, { kind: state.kind, ...asked(), ...(before === null ? {} : { before }) });
    if (mine !== visit) return;
    looked += found.looked;
    const open = (hit) => () => { Object.assign(state, { everywhere: false, step: hit.step, uid: hit.uid }); load(); };
    const rows = found.hits.map((hit) => h("tr", {},
      h("td", {}, h("button", { class: "link", onclick: open(hit) }, `step ${number(hit.step)}`)), h("td", {}, hit.uid),
      h("td", { class: `number ${hit.correct === null ? "" : hit.correct ? "good" : "bad"}` }, number(hit.reward)), h("td", { class: "number" }, number(hit.length)),
      h("td", {}, hit.ended), h("td", { class: "text" }, hit.excerpt)));
    if (before === null) {
      body.replaceChildren(h("p", { class: "note", role: "status" }), h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, ["step", "question", "reward", "tokens", "ended by", "found"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}))), "");
    }
    body.querySelector("tbody").append(...rows);
    const hits = body.querySelectorAll("tbody tr").length;
    body.firstChild.textContent = `${number(hits)} completions in ${number(looked)} steps${found.left ? `; ${number(found.left)} older steps not searched` : ""}${found.unread ? `; ${number(found.unread)} tables cannot be read` : ""}.`;
    body.lastChild.remove();
    body.append(found.left ? h("button", { onclick: () => searchAll(found.before, looked) }, "search older steps") : "");
    if (found.left && hits < 20 && looked < 20_000) searchAll(found.before, looked);
  } catch (error) {
    if (mine === visit) body.replaceChildren(h("p", { class: "failed" }, error.message));
  }
}

async function load(offset = 0) {
  if (state.everywhere && state.kind === "step") return void searchAll();
  const run = runs[state.run];
  const mine = ++visit;
  const evals = run.tables.eval;
  if (!evals.includes(state.before)) state.before = evals[0] ?? null;
  if (!evals.includes(state.after)) state.after = evals.at(-1) ?? null;
  const steps = run.tables[state.kind] ?? evals;
  if (!steps.includes(state.step)) state.step = steps.at(-1) ?? null;
  newest = state.step === steps.at(-1);
  if (!offset) controls();
  if (!steps.length) return void (body.textContent = "No completions are recorded yet, or run.log_completions is false.");
  try {
    const compares = state.kind === "compare";
    const found = compares
      ? await ask(`${run.index}/compare`, { before: state.before, after: state.after, shown: state.changed, offset })
      : await ask(`${run.index}/completions`, { kind: state.kind, step: state.step, ...asked(), offset });
    if (mine !== visit) return;
    const page = compares ? found.pairs : found.groups;
    if (offset) body.lastChild.remove();
    else body.replaceChildren(compares ? counted(found.counts)
      : h("p", { class: "note" }, `${number(found.completions)} completions${asks() ? `; ${number(found.found)} prompts have some that match` : ` for ${number(found.found)} prompts`}.`));
    body.append(...page.map(compares ? pair : group));
    const next = offset + page.length;
    body.append(next < found.found ? h("button", { onclick: () => load(next) }, `show more (${number(found.found - next)} left)`) : "");
  } catch (error) {
    if (mine === visit) body.replaceChildren(h("p", { class: "failed" }, error.message));
  }
}

function counted({ gained, lost, both, neither, unjudged }) {
  return h("p", {}, h("span", { class: "tag good" }, `${gained} gained`), " ", h("span", { class: "tag bad" }, `${lost} lost`), " ",
    h("span", { class: "tag" }, `${both} right in both`), " ", h("span", { class: "tag" }, `${neither} in neither`), " ",
    unjudged ? h("span", { class: "tag warn" }, `${unjudged} not judged`) : "");
}

/** The pictures of messages or turns; each has its place until it is loaded. */
export function pictures(run, messages) {
  return messages.flatMap((message) => message.pictures ?? []).map((sha256) => {
    const image = h("img", { class: "picture", alt: `picture ${sha256.slice(0, 8)}` });
    pictureAddress(run, sha256).then((address) => { image.src = address; }, (error) => image.replaceWith(error.message));
    return image;
  });
}

function question(messages, label) {
  const [asked, before] = [messages.at(-1), messages.slice(0, -1)];
  return h("div", {}, label, pictures(state.run, messages),
    h("div", { class: "question text" }, asked.content),
    before.length ? h("details", {}, h("summary", { class: "note" }, before.length === 1 ? `${before[0].role} message` : `${before.length} messages before it`),
      before.map((message) => h("div", { class: "text soft" }, `${message.role}: ${message.content}`))) : null);
}

function group(each) {
  const facts = h("div", { class: "facts" },
    h("span", {}, `group ${number(each.group)}`), each.kind ? h("span", {}, each.kind) : null,
    h("span", {}, "mean reward ", h("b", {}, number(each.mean))), each.size > 1 ? h("span", {}, `standard deviation ${number(each.std)}`) : null,
    each.tied ? h("span", { class: "tag warn" }, "equal rewards") : null,
    each.rows.length < each.size ? h("span", {}, `${each.rows.length} of ${each.size} shown`) : null,
    each.uid ? h("span", { class: "soft" }, `question ${each.uid}`) : null);
  return h("section", { class: "card group" }, question(each.prompt, facts), h("div", { class: "side" }, each.rows.map((row) => one(row, state.step, state.kind, each.group))));
}

function pair({ uid, prompt, what, before, after }) {
  const kinds = { gained: "good", lost: "bad" };
  const label = h("div", { class: "facts" }, h("span", { class: `tag ${kinds[what] ?? ""}` }, what), h("span", {}, uid));
  return h("section", { class: "card group" }, question(prompt, label),
    h("div", { class: "side" }, one(before, state.before, "eval"), one(after, state.after, "eval")));
}

/** One completion with what it got. */
function one(row, step, kind, group = null) {
  const mark = row.correct === null ? "" : row.correct ? "good" : "bad";
  const text = h("pre", {}, row.turns === null ? row.completion : conversation(row.completion));
  const ends = row.finish_reason || row.ended;
  const parts = Object.entries(row.parts);
  const facts = [
    h("b", { class: mark }, number(row.reward)),
    row.correct === null ? null : h("span", { class: mark }, row.correct ? "right" : "wrong"),
    row.advantage === null ? null : h("span", {}, `advantage ${number(row.advantage)}`),
    h("span", {}, `${number(row.length)} tokens`),
    row.turns === null ? null : h("span", {}, `${row.turns} turns, ${row.no_actions} invalid`),
    ends ? h("span", { class: CUT.includes(ends) ? "tag warn" : "" }, ENDS[ends] ?? ends) : null,
    row.masked_by ? h("span", { class: "tag bad" }, `masked: ${row.masked_by}`) : null,
    parts.length > 1 ? h("span", {}, "= ", parts.map(([name, value]) => `${name} ${number(value)}`).join(", ")) : null,
    kind === "eval" && state.kind === "compare" ? h("span", {}, `step ${step}`) : null,
  ];
  const [verdicts, others] = [true, false].map((wanted) => Object.entries(row.others).filter(([name]) => name.startsWith("verdict/") === wanted));
  const card = h("article", { class: `one ${mark}` }, h("div", { class: "facts" }, facts), text,
    verdicts.map(([name, said]) => h("div", { class: "verdict text" }, h("span", { class: "soft" }, `${name.slice(8)}: `), said)),
    row.error ? h("div", { class: "bad text" }, row.error) : null,
    others.length ? h("div", { class: "note text" }, others.map(([name, value]) => `${name}: ${value}`).join("\n")) : null);
  if (row.characters > row.completion.length) {
    const more = h("button", { class: "small", onclick: async () => {
      try {
        const whole = await ask(`${state.run}/completion`, { kind, step, row: row.row });
        text.textContent = visible(whole.completion);
        more.replaceWith(whole.characters > whole.completion.length ? `cut at ${number(whole.completion.length)} characters` : "");
      } catch (error) {
        more.replaceWith(h("span", { class: "failed" }, error.message));
      }
    } }, `all ${number(row.characters)} characters`);
    card.append(more);
  }
  if (row.has_turns) card.append(h("button", { class: "small", onclick: () => goTo("Agents", { run: state.run, kind, step, group }) }, "turn by turn"));
  if (kind === "step" && row.turns === null && runs[state.run].tables.ledger.includes(step)) {
    card.append(h("button", { class: "small", onclick: () => goTo("Tokens", { run: state.run, step, row: row.row }) }, "tokens"));
  }
  return card;
}

/** An agent's episode: what it did stands out from what it saw. */
const conversation = (text) => text.split("\n").map((line) => h("span", { class: line.startsWith("> ") ? "" : "soft" }, `${line}\n`));
