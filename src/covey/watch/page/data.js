// What the page knows of each run, and how it keeps up with the run folders: each file is asked for from the byte on
// up to which it is known.

import { archive, fromArchive } from "./archive.js";

const COLOURS = ["#1f77c9", "#e07b1a", "#2b9a5d", "#9552b5", "#c23b52", "#7a8793", "#0f9aa8", "#a58a00"];
const KEY = "covey-watch-token";

function token() {
  const given = /^#token=(.+)$/.exec(location.hash);
  if (given) {
    sessionStorage.setItem(KEY, decodeURIComponent(given[1]));
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

const secret = token();

/** Ask the server; throws an Error with its sentence. */
export async function ask(path, parameters = {}) {
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

/** The numbers of `metrics.jsonl`, as far as they are read. */
class Metrics {
  constructor() {
    this.series = new Map(); // name -> {steps, values}
    this.tokens = new Map(); // step -> tokens so far
    this.minutes = new Map();
    this.seconds = 0;
    this.step = 0;
  }

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
    this.index = index;
    this.about = about;
    this.label = about.label;
    this.colour = COLOURS[index % COLOURS.length];
    this.shown = true;
    this.events = [];
    this.questions = new Map(); // uid -> [[step, right, all], ...]
    this.tables = { step: [], eval: [], ledger: [], samplers: [] };
    this.doctor = [];
    this.damaged = 0;
    this.places = {};
    this.metrics = this.reading = new Metrics();
  }

  get series() { return this.metrics.series; }
  get tokens() { return this.metrics.tokens; }
  get minutes() { return this.metrics.minutes; }
  get seconds() { return this.metrics.seconds; }
  get step() { return this.metrics.step; }

  /** Of a long run some steps at first; all of them take their place when they are read. */
  async look() {
    const found = await ask(`${this.index}/overview`);
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

  takeEvents({ lines }) {
    this.events.push(...lines);
  }

  /** Read on in one file; true if there was anything new. */
  async read(file, take) {
    let changed = false;
    for (let more = true; more; ) {
      const { end = 0, mark = "" } = this.places[file] ?? {};
      const piece = await ask(`${this.index}/${file}`, { start: end, mark });
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
    if (await this.read("metrics", this.takeMetrics)) tell("metrics");
    if (await this.read("events", this.takeEvents)) tell("events");
    const tables = await ask(`${this.index}/tables`, { mark: this.tables.mark ?? "" });
    if (tables.mark !== this.tables.mark) {
      this.tables = tables;
      tell("tables");
    }
    if (await this.read("questions", this.takeQuestions)) tell("questions");
  }

  /** Asked for by itself: of a long run the doctor reads for a while. */
  async askDoctor() {
    for (let more = true; more; ) {
      const found = await ask(`${this.index}/doctor`);
      [this.doctor, more] = [found.said, found.more];
    }
  }

  status() {
    const ends = this.events.filter(([, kind]) => kind === "run");
    return ends.length ? ends.at(-1)[2] : "not begun";
  }

  /** The values of a metric over "step", "tokens" or "minutes". */
  points(name, x = "step") {
    const found = this.series.get(name);
    if (!found) return { xs: [], ys: [], steps: [] };
    return { xs: found.steps.map((step) => this.place(step, x)), ys: found.values, steps: found.steps };
  }

  place(step, x) {
    if (x === "tokens") return this.tokens.get(step) ?? 0;
    if (x === "minutes") return this.minutes.get(step) ?? 0;
    return step;
  }

  last(name) {
    return this.series.get(name)?.values.at(-1) ?? null;
  }

  /** Steps worth a line in a curve: phases that begin, and what the doctor said. */
  marks() {
    const found = this.doctor.map((said) => ({ step: said.step, kind: "doctor", text: said.message, run: this }));
    const phases = this.series.get("phase");
    (phases?.values ?? []).forEach((phase, at) => {
      if (at > 0 && phase !== phases.values[at - 1]) {
        found.push({ step: phases.steps[at], kind: "phase", text: `phase ${phase + 1} begins`, run: this });
      }
    });
    return found.sort((a, b) => a.step - b.step);
  }
}

export const runs = [];

export async function load() {
  const found = await ask("runs");
  found.forEach((about, index) => runs.push(new Run(index, about)));
}

export const shownRuns = () => runs.filter((run) => run.shown);
