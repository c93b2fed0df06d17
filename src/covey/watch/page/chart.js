// One chart: lines, bands and marks on a uPlot canvas, with what is under the pointer in words.

import { download, h, number } from "./dom.js";

const { uPlot } = window;
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Centred moving average; near the ends the window shrinks on both sides alike. */
export function smooth(values, reach) {
  if (reach === 0) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, at) => {
    const width = Math.min(reach, at, values.length - 1 - at);
    return (sums[at + width + 1] - sums[at - width]) / (2 * width + 1);
  });
}

/**
 * A card with a chart. `draw(lines, options)` shows lines `{label, colour, xs, ys, thin, points, fill, low, high}`.
 * `tools` are buttons beside those for PNG and CSV; with the `unit` "%" shares are shown in percent.
 */
export class Chart {
  constructor(title, hint, { tools = [], csv = null, height = 190, unit = "", name = "" } = {}) {
    this.title = title;
    this.name = [name === title ? "" : name, unit === "%" ? "" : unit].filter(Boolean).join(", ");
    this.say = (value, digits) => (unit === "%" ? `${number(100 * value, digits)} %` : number(value, digits));
    this.height = height;
    this.readout = h("div", { class: "readout" });
    this.box = h("div", {});
    const png = h("button", { class: "small", onclick: () => this.savePicture() }, "PNG");
    const table = csv && h("button", { class: "small", onclick: () => download(`${title}.csv`, new Blob([csv()])) }, "CSV");
    this.card = h("section", { class: "card", "aria-label": title },
      h("header", {}, h("h2", { title: hint }, title), h("span", { class: "tools" }, png, " ", table, " ", ...tools)), this.readout, this.box);
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: this.height }));
    this.observer.observe(this.box);
  }

  draw(lines, { xLabel = "step", log = false, logX = false, marks = [], zero = false } = {}) {
    const usable = lines.map((line) => (log || logX ? positive(line, log, logX) : line)).filter((line) => line.xs.length);
    const [tables, series, bands] = [[], [{ label: xLabel }], []];
    for (const line of usable) {
      if (line.low) {
        bands.push({ series: [series.length, series.length + 1], fill: `${line.colour}33` });
        for (const edge of [line.high, line.low]) {
          tables.push([line.xs, edge]);
          series.push({ stroke: "transparent", points: { show: false }, edge: true });
        }
      }
      tables.push([line.xs, line.ys]);
      const { label, fill, dash, thin } = line;
      series.push({ label, fill, dash, thin, stroke: thin ? `${line.colour}66` : line.colour, width: thin ? 0.7 : 1.8, spanGaps: true,
        points: { show: Boolean(line.points) || line.xs.length === 1, size: 6, fill: colour("--card") },
        told: line.told && new Map(line.xs.map((x, place) => [x, line.told[place]])) });
    }
    this.lines = usable;
    const data = tables.length ? uPlot.join(tables) : [[]];
    const shape = JSON.stringify([series, bands, xLabel, log, logX, zero]);
    this.marks = marks;
    if (this.plot && shape === this.shape) {
      series.forEach(({ told }, at) => { this.plot.series[at].told = told; }); // new values, for lines that stay
      this.plot.setData(data);
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    // Zeros alone would get an axis from 0 to 100.
    const range = (_, low, high) => (low === null || (low === 0 && high === 0) ? [0, 1] : zero ? [Math.min(0, low), high > 0 ? high * 1.05 : 1] : uPlot.rangeNum(low, high, 0.1, true));
    this.plot = new uPlot({
        width: this.box.clientWidth || 400, height: this.height, legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, sync: { key: "covey" }, points: { size: 6 } },
        scales: { x: { time: false, ...(logX ? { distr: 3 } : {}) }, y: log ? { distr: 3 } : { range } },
        axes: [
          { ...axis, size: 30, ...(xLabel === "step" ? { incrs: WHOLE } : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
          { ...axis, size: 62, values: (_, ticks) => this.tickTexts(ticks) },
        ],
        series, bands,
        hooks: { draw: [(plot) => this.drawMarks(plot)], setCursor: [(plot) => this.tell(plot, xLabel)] },
      }, data, this.box);
    this.nameLines();
  }

  /** As many digits as it takes to tell the ticks of an axis apart. */
  tickTexts(ticks) {
    const known = ticks.filter((tick) => tick !== null);
    const digits = Math.ceil(Math.log10(Math.max(...known.map(Math.abs)) / Math.abs(known[1] - known[0]))) + 2;
    return ticks.map((tick) => (tick === null ? "" : this.say(tick, Math.max(4, Math.min(12, digits || 0)))));
  }

  /** What the lines are called, while nothing is pointed at. */
  nameLines() {
    const names = this.lines.filter((line) => line.label && !line.thin);
    this.readout.replaceChildren(...(names.length < 2 ? [this.name] : names.flatMap((line) =>
      [h("span", { class: "dot", style: { background: line.colour } }), ` ${line.label}   `])));
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ends = []; // where the last name in each row of names ends: those that would overlap go a row lower
    ctx.save();
    for (const mark of [...this.marks].sort((a, b) => a.x - b.x)) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = mark.colour || colour(mark.kind === "doctor" ? "--warn" : "--soft");
      ctx.setLineDash([4, 4]);
      ctx.stroke(new Path2D(`M${x} ${bbox.top}v${bbox.height}`));
      ctx.font = `${11 * devicePixelRatio}px sans-serif`;
      const wide = ctx.measureText(mark.name).width + 5 * devicePixelRatio;
      const fits = x + wide < bbox.left + bbox.width; // at the right end the name stands before its line
      const from = fits ? x : x - wide;
      let row = ends.findIndex((end) => end <= from);
      if (row < 0) row = ends.length;
      ends[row] = from + wide;
      ctx.textAlign = fits ? "left" : "right";
      ctx.fillText(mark.name, x + (fits ? 3 : -3) * devicePixelRatio, bbox.top + (11 + 12 * (row % 8)) * devicePixelRatio);
    }
    ctx.restore();
  }

  tell(plot, xLabel) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) return this.nameLines();
    const parts = [`${xLabel} ${number(plot.data[0][at])}`];
    plot.series.forEach((series, index) => {
      const value = series.told ? series.told.get(plot.data[0][at]) : plot.data[index]?.[at];
      if (index && series.label && !series.edge && !series.thin && value !== null && value !== undefined) parts.push(`${series.label} ${this.say(value)}`);
    });
    this.readout.textContent = this.readout.title = parts.join("   ");
  }

  /** The picture with its title and the names of its lines, on paper. */
  savePicture() {
    const [from, scale] = [this.plot.ctx.canvas, devicePixelRatio];
    const names = this.lines.filter((line) => line.label && !line.thin);
    const canvas = h("canvas", { width: from.width, height: from.height + (30 + 16 * names.length) * scale });
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = colour("--card");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = colour("--ink");
    ctx.font = `600 ${14 * scale}px sans-serif`;
    ctx.fillText(this.title, 10 * scale, 20 * scale);
    ctx.drawImage(from, 0, 28 * scale);
    ctx.font = `${12 * scale}px sans-serif`;
    names.forEach((line, row) => {
      ctx.fillStyle = line.colour;
      ctx.fillText(line.label, 10 * scale, from.height + (40 + 16 * row) * scale);
    });
    canvas.toBlob((blob) => download(`${this.title}.png`, blob));
  }

  remove() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.card.remove();
  }
}


/** What a logarithmic axis can show. */
function positive(line, log, logX) {
  const keep = line.ys.map((value, at) => (!log || (value > 0 && (!line.low || line.low[at] > 0))) && (!logX || line.xs[at] > 0));
  const left = (values) => values?.filter((_, at) => keep[at]);
  return { ...line, told: left(line.told), xs: left(line.xs), ys: left(line.ys), low: left(line.low), high: left(line.high) };
}
