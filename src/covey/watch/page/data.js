// What the page knows of each run, and how it keeps up with the run folders: each file is asked for from the byte on
// up to which it is known.

import { archive, fromArchive } from "./archive.js";
import { choice, duration, median } from "./dom.js";

const COLOURS = ["#1f77c9", "#e07b1a", "#2b9a5d", "#9552b5", "#c23b52", "#7a8793", "#0f9aa8", "#a58a00"];
const KEY = "covey-watch-token";
const HAS = {
  Completions: ({ tables }) => tables.step.length || tables.eval.length, Tokens: ({ tables }) => tables.ledger.length, Questions: (run) => run.questions.size,
  Agents: ({ series }) => [...series.keys()].some((name) => name.replace("eval/", "").startsWith("agent/")), Machine: ({ series }) => series.has("step_time"),
  Doctor: (run) => run.doctor.length || run.events.length, Settings: (run) => run.about.config,
};

const given = /^#token=(.+)$/.exec(location.hash);
if (given) {
  sessionStorage.setItem(KEY, decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname);
}
const secret = sessionStorage.getItem(KEY) ?? "";
let waiting = 0;
const busy = (by) => document.body.classList.toggle("busy", (waiting += by) > 0);

/** Ask for what somebody waits for: the page shows that it is loading. */
export function ask(path, parameters = {}) {
  busy(1);
  return quietly(path, parameters).finally(() => busy(-1));
}

/** Ask the server; throws an Error with its sentence. */
export async function quietly(path, parameters = {}) {
  if (archive) return fromArchive(path, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) query.append(name, each);
  }
  const response = await fetch(`/api/${path}?${query}`, { headers: { Authorization: `Bearer ${secret}` } });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error ?? response.statusText);
  return found;
}

/** An address under which the page can show a picture of a run. */
export async function pictureAddress(run, sha256) {
  const path = `${run}/picture/${sha256}`;
  if (archive) return fromArchive(path, {});
  const response = await fetch(`/api/${path}`, { headers: { Authorization: `Bearer ${secret}` } });
  if (!response.ok) throw new Error("The picture is not there.");
  return URL.createObjectURL(await response.blob());
}

/** The numbers of `metrics.jsonl`, as far as they are read. */
class Metrics {
  series = new Map(); // name -> {steps, values}
  tokens = new Map(); // step -> tokens so far
  minutes = new Map();
  seconds = 0;
  step = 0;

  take({ names, rows }) {
    const columns = names.map((name) => {
      if (name !== "step" && name !== "_seconds" && !this.series.has(name)) this.series.set(name, { steps: [], values: [] });
      return this.series.get(name);
    });
    const place = Object.fromEntries(["step", "step_time", "eval/seconds", "num_tokens", "_seconds"].map((name) => [name, names.indexOf(name)]));
    for (const row of rows) {
      const value = (name) => (place[name] < 0 ? null : row[place[name]]);
      const step = value("step");
      // Where not all steps are here, each says what came before it.
      this.seconds = value("_seconds") ?? this.seconds + (value("step_time") ?? 0) + (value("eval/seconds") ?? 0);
      if (value("step_time") !== null || !this.minutes.has(step)) this.minutes.set(step, this.seconds / 60);
      if (value("num_tokens") !== null) this.tokens.set(step, value("num_tokens"));
      this.step = Math.max(this.step, step);
      for (let column = 0; column < row.length; column++) {
        const series = columns[column];
        if (!series || row[column] === null) continue;
        const last = series.steps.length - 1;
        if (last < 0 || series.steps[last] < step) {
          series.steps.push(step);
          series.values.push(row[column]);
        } else if (series.steps[last] === step) series.values[last] = row[column]; // of two lines the later counts
        // Steps that go back are those of a damaged file.
      }
    }
  }
}

class Run {
  constructor(index, about) {
    Object.assign(this, { index, about, label: about.label, colour: COLOURS[index % COLOURS.length], shown: true, events: [], doctor: [], diagnosed: false, loaded: false, damaged: 0, places: {} });
    this.questions = new Map(); // uid -> [[step, right, all], ...]
    this.tables = { step: [], eval: [], ledger: [], samplers: [] };
    this.texts = new Map(); // uid -> what the user asked
    this.heard = Date.now() - 1000 * (about.seconds_since_last_line ?? 0);
    this.metrics = this.reading = new Metrics();
  }

  get series() { return this.metrics.series; }
  get tokens() { return this.metrics.tokens; }
  get minutes() { return this.metrics.minutes; }
  get seconds() { return this.metrics.seconds; }
  get step() { return this.metrics.step; }

  /** Of a long run some steps at first; all of them take their place when they are read. */
  async look() {
    const found = await quietly(`${this.index}/overview`);
    if (!found.rows.length) return false;
    this.metrics = new Metrics();
    this.metrics.take(found);
    return true;
  }

  /** The file is another one by now: what was read of it goes. */
  forget(file) {
    if (file === "metrics") this.metrics = this.reading = new Metrics();
    else if (file === "questions") this.questions = new Map();
    else this.events = [];
  }

  takeMetrics(piece) {
    this.reading.take(piece);
    if (!piece.more) this.metrics = this.reading;
  }

  takeQuestions({ lines }) {
    for (const [step, answers] of lines) {
      for (const [uid, [right, all]] of Object.entries(answers)) {
        if (!this.questions.has(uid)) this.questions.set(uid, []);
        this.questions.get(uid).push([step, right, all]);
      }
    }
  }


  /** Read on in one file; true if there was anything new. */
  async read(file, take) {
    let changed = false;
    for (let more = true; more; ) {
      const { end = 0, mark = "" } = this.places[file] ?? {};
      const piece = await quietly(`${this.index}/${file}`, { start: end, mark });
      if (piece.restarted) this.forget(file);
      this.places[file] = piece;
      this.damaged += piece.damaged;
      changed ||= piece.restarted || piece.end !== end;
      more = piece.more;
      take.call(this, piece);
    }
    return changed;
  }

  /** Read on; `tell` is called with the name of what changed. */
  async update(tell) {
    const before = this.loaded && this.step;
    if (await this.read("metrics", this.takeMetrics)) tell("metrics");
    if (this.loaded && this.step !== before) this.heard = Date.now();
    if (await this.read("events", ({ lines }) => this.events.push(...lines))) tell("events");
    const tables = await quietly(`${this.index}/tables`, { mark: this.tables.mark ?? "" });
    if (tables.mark !== this.tables.mark) {
      this.tables = tables;
      tell("tables");
    }
    if (await this.read("questions", this.takeQuestions)) tell("questions");
    this.loaded = true;
  }

  /** Asked for by itself: of a long run the doctor reads for a while. */
  async askDoctor() {
    for (let more = true; more; ) {
      const found = await quietly(`${this.index}/doctor`);
      [this.doctor, more] = [found.said, found.more];
    }
    this.diagnosed = true;
  }

  /** Whether a view has anything of it. */
  has(view) { return Boolean(HAS[view]?.(this)); }

  end() { return this.events.filter(([, kind]) => kind === "run").at(-1)?.[2] ?? ""; }
  runs() { return /^(started|resumed)/.test(this.end()); }
  steps() { return this.series.get("step_time")?.steps.length ?? 0; }

  /** Running, or how it ended; of a run that is silent for long, since when. */
  status() {
    if (!this.runs()) return this.end() || "not started";
    const silent = archive ? 0 : (Date.now() - this.heard) / 1000;
    return silent > Math.max(300, 10 * (this.stepTime() ?? 0)) ? `no new step for ${duration(silent)}` : archive ? "unfinished" : "running";
  }

  /** Median seconds of the last steps. */
  stepTime() { return median((this.series.get("step_time")?.values ?? []).slice(-20)); }

  /** Steps that the run is to have, as far as its settings tell. */
  total() {
    if (this.about.max_steps > 0) return this.about.max_steps;
    const epoch = this.last("epoch");
    return epoch && this.about.epochs > 0 ? Math.max(this.step, Math.ceil((this.step * this.about.epochs) / epoch - 1e-6)) : null;
  }

  /** Seconds until the end, by the last steps and the evaluations so far; null where the end is not known. */
  left() {
    if (!this.total() || this.stepTime() === null) return null;
    const evaluations = (this.series.get("eval/seconds")?.values ?? []).reduce((a, b) => a + b, 0) / Math.max(1, this.step);
    return (this.total() - this.step) * (this.stepTime() + evaluations);
  }

  /** Read what some questions ask, from at most `most` tables of steps that asked them; true if any was read. */
  async readTexts(uids, most = 10) {
    const recorded = new Set(this.tables.step);
    let read = 0;
    for (const uid of uids) {
      const step = this.texts.has(uid) ? undefined : this.questions.get(uid).map(([each]) => each).filter((each) => recorded.has(each)).at(-1);
      if (step === undefined || read >= most) continue;
      this.texts.set(uid, "");
      read++;
      for (const [other, text] of Object.entries(await ask(`${this.index}/prompts`, { step }))) this.texts.set(other, text);
    }
    return read > 0;
  }

  /** The values of a metric over "step", "tokens" or "minutes". */
  points(name, x = "step") {
    const found = this.series.get(name);
    if (!found) return { xs: [], ys: [], steps: [] };
    return { xs: found.steps.map((step) => this.place(step, x)), ys: found.values, steps: found.steps };
  }

  place(step, x) { return x === "step" ? step : this[x].get(step) ?? 0; }
  last(name) { return this.series.get(name)?.values.at(-1) ?? null; }

  /** Steps worth a line in a curve: phases that begin, and what the doctor said. */
  marks() {
    const found = this.doctor.map((said) => ({ step: said.step, kind: "doctor", text: said.message, run: this }));
    const phases = this.series.get("phase");
    (phases?.values ?? []).forEach((phase, at) => {
      if (at > 0 && phase !== phases.values[at - 1]) found.push({ step: phases.steps[at], kind: "phase", text: `phase ${phase + 1} begins`, run: this });
    });
    return found.sort((a, b) => a.step - b.step);
  }
}

export const runs = [];

export async function load() {
  (await quietly("runs")).forEach((about, index) => runs.push(new Run(index, about)));
}

export const shownRuns = () => runs.filter((run) => run.shown);

/** The run that a view shows: the one that was chosen, or the first of which it has anything. */
export function pick(view, chosen) {
  const fit = shownRuns().filter((run) => run.has(view));
  return (fit.find((run) => run.index === chosen) ?? fit[0] ?? shownRuns()[0] ?? runs[0]).index;
}

export function runChoice(view, chosen, onchange) {
  return runs.length > 1 ? choice("run", runs.filter((run) => run.has(view) || run.index === chosen).map((run) => [run.index, run.label]), chosen, onchange) : null;
}
