// Charts over time, by uPlot. A chart is kept over updates, so that the pointer's position survives them.
/* global uPlot */

import { make, color, legend, number } from "./ui.js";

const height = 200;

// complete returns the steps without the newest one while it is incomplete, because its counts are too small.
export const complete = h => h.steps.filter((s, i) => i < h.steps.length - 1 || !(s.seconds < 0.9 * h.step_ms / 1000));

// times returns the labels of the time axis: the time of day, or the date if the marks are days apart. The first mark also has the date.
const times = (u, marks, axis, space, step) => marks.map((t, i) => {
  const d = new Date(t * 1000), two = n => String(n).padStart(2, "0");
  const date = `${d.getDate()} ${d.toLocaleString("en", { month: "short" })}`, time = `${two(d.getHours())}:${two(d.getMinutes())}`;
  return step >= 86400 ? date : i > 0 && new Date(marks[i - 1] * 1000).getDate() === d.getDate() ? time : `${time}\n${date}`;
});

// Chart draws series over time. Each series is {name, color, of: a function of a step, kind: "area", "line" or "bar"}. Series of the
// kind area and bar are stacked, the first one at the bottom. rate divides by the seconds of a step.
export class Chart {
  constructor(series, options = {}) {
    this.series = series;
    this.options = options;
    this.box = make("div", { className: "chart" });
    this.words = make("div");
    this.element = make("div", {}, this.box, this.words);
    this.resized = new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: this.height }));
    this.resized.observe(this.box);
  }

  get height() { return this.options.height ?? height; }

  // stacked returns the data of uPlot. Steps that are missing become gaps.
  stacked(h) {
    const times = [], values = this.series.map(() => []);
    const push = (t, step) => {
      times.push(t / 1000);
      this.series.forEach((s, i) => values[i].push(step ? s.of(step) : null));
    };
    let last;
    for (const step of complete(h)) {
      if (last !== undefined && step.start_ms - last > 1.5 * h.step_ms) push(last + h.step_ms, null);
      push(step.start_ms, step);
      last = step.start_ms;
    }
    this.raw = values;
    const tops = values.map((v, i) => this.series[i].kind === "line" ? v : v.map((n, k) => n === null ? null :
      values.slice(0, i + 1).reduce((sum, u, j) => sum + (this.series[j].kind === "line" ? 0 : u[k]), 0)));
    return [times, ...tops.reverse()]; // the largest is drawn first
  }

  draw(h) {
    const data = this.stacked(h);
    this.range = [h.from_ms / 1000, h.now_ms / 1000];
    if (this.plot) this.plot.setData(data);
    else this.create(data, h);
    this.say(null);
  }

  create(data, h) {
    const grid = { stroke: color("line"), width: 1 }, text = color("soft"), font = "12px system-ui, sans-serif";
    const bars = uPlot.paths.bars({ size: [0.8, 40], align: 1 });
    const stepped = uPlot.paths.stepped({ align: 1 });
    this.plot = new uPlot({
      width: this.box.clientWidth || 600, height: this.height, legend: { show: false }, drawOrder: ["series", "axes"], padding: [8, 22, 0, 0],
      scales: { x: { time: true, range: () => this.range }, y: { range: (u, low, high) => [0, Math.max(this.options.least ?? 1, high ?? 1) * 1.05] } },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      axes: [{ stroke: text, grid: { show: false }, ticks: grid, font, space: 60, values: times },
        { stroke: text, grid, ticks: { show: false }, font, size: 52, space: 36, values: (u, list) => list.map(n => number(n)) }],
      series: [{}, ...this.series.map(s => ({
        label: s.name, points: { show: false }, spanGaps: false, paths: s.kind === "bar" ? bars : s.kind === "area" ? stepped : undefined,
        stroke: color(s.color), width: s.kind === "line" ? 2 : 0, fill: s.kind === "line" ? undefined : color(s.color),
      })).reverse()],
      hooks: { setCursor: [u => this.say(u.cursor.idx)] },
    }, data, this.box);
  }

  // say shows the values below the chart: those at the pointer, else the newest.
  say(at) {
    const n = this.raw[0]?.length ?? 0;
    at ??= n - 1;
    this.words.replaceChildren(legend(...this.series.map((s, i) => [s.name, `var(--${s.color})`, n && this.raw[i][at] !== null ? number(this.raw[i][at]) : "–"])));
  }

  destroy() {
    this.resized.disconnect();
    this.plot?.destroy();
    this.plot = undefined;
  }
}

const rate = of => step => step.seconds > 0 ? of(step) / step.seconds : 0;

export const charts = {
  cores: () => new Chart([{ name: "harvested", color: "harvested", kind: "area", of: s => s.harvested }, { name: "idle", color: "idle", kind: "area", of: s => s.idle },
    { name: "batch", color: "batch", kind: "area", of: s => s.batch }], { height: 260 }),
  calls: () => new Chart([{ name: "calls a second", color: "calls", kind: "line", of: rate(s => s.calls) },
    { name: "failures a second", color: "bad", kind: "line", of: rate(s => s.failures) }]),
  starts: () => new Chart(["cached", "pooled", "seeded", "cold"].map(name => ({ name, color: name, kind: "bar", of: s => s.starts[name] }))),
  ends: () => new Chart([{ name: "revoked", color: "draining", kind: "bar", of: s => s.ended.revoked }, { name: "drained", color: "silent", kind: "bar", of: s => s.ended.drained },
    { name: "expired", color: "cold", kind: "bar", of: s => s.ended.expired }, { name: "worker deaths", color: "bad", kind: "bar", of: s => s.deaths + s.failed_starts }]),
  node: () => new Chart([{ name: "harvested", color: "harvested", kind: "area", of: s => s.harvested }, { name: "idle", color: "idle", kind: "area", of: s => s.idle }]),
  nodeCalls: () => new Chart([{ name: "calls a second", color: "calls", kind: "line", of: rate(s => s.calls) }, { name: "failures a second", color: "bad", kind: "line", of: rate(s => s.failures) }]),
  nodeStarts: () => new Chart([{ name: "worker starts", color: "cached", kind: "bar", of: s => s.starts }]),
  leaseCalls: () => new Chart([{ name: "calls a second", color: "calls", kind: "line", of: s => s.calls }, { name: "failures a second", color: "bad", kind: "line", of: s => s.failures }]),
};
