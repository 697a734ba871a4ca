// The load of every worker over time, as in Figure 6 of the BF-IO paper, and the gap that costs.

import { chart, colour, workerColour } from "./charts.js";
import { byId, element, fillHead, fillReadout, fillRows, setText } from "./dom.js";
import { compact, integer, percent } from "./format.js";

const HEIGHT = 320;
const ABOUT = new Map([
  [true, "All wait for the fullest: the shaded gap is what they wait for."],
  [false, "Workers do not step together: none waits for another."],
  [null, "Whether workers wait for the fullest is not known yet."],
]);

export class LoadsPanel {
  constructor() {
    this.host = byId("loads");
    this.plot = null;
    this.ids = [];
    this.table = element("table");
    this.table.append(element("thead"), element("tbody"));
    fillHead(this.table.tHead, ["Worker", "Now", "Least", "Mean", "Most"]);
    byId("loads-table").append(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Load of each worker, KV tokens" }, this.table));
  }

  build(ids) {
    this.plot?.discard();
    this.ids = ids;
    this.focused = null;
    this.width = ids.length > 24 ? 1 : 1.4;
    const each = ids.map((id, i) => ({
      label: id,
      stroke: () => workerColour(i, ids.length),
      width: this.width,
      alpha: ids.length > 24 ? 0.55 : 0.8,
      points: { show: false },
    }));
    const of = ids.length;
    this.plot = chart(this.host, {
      height: HEIGHT,
      format: compact,
      focus: true,
      series: [
        ...each,
        { label: "mean", stroke: () => colour("ink"), width: 1.5, dash: [5, 4], points: { show: false } },
        { label: "fullest", stroke: () => colour("ember"), width: 2, points: { show: false } },
      ],
      bands: [{ series: [of + 2, of + 1], fill: () => colour("ember-soft") }],
      onFocus: (series) => this.focus(series),
      read: (i) => this.read(i),
    });
  }

  show(past, seconds, barrier) {
    setText(byId("loads-about"), `Resident KV tokens. ${ABOUT.get(barrier)}`);
    if (this.ids.join("\n") !== past.ids.join("\n")) this.build(past.ids);
    this.past = past;
    const from = past.since(seconds);
    const cut = (column) => column.slice(from);
    this.shown = { times: cut(past.times), loads: past.loads.map(cut), mean: cut(past.mean), max: cut(past.max) };
    this.plot.setData([this.shown.times, ...this.shown.loads, this.shown.mean, this.shown.max]);
    this.describe(past);
    if (byId("loads-table").open) this.fill();
  }

  describe(past) {
    const { max, mean, live } = past.samples.at(-1).spread;
    const gap = max === null ? null : max - mean;
    const rows = [["fullest", integer(max)], ["mean", integer(mean)], ["gap", integer(gap)], ["gap / fullest", percent(max ? gap / max : null)]];
    fillReadout(byId("loads-readout"), rows);
    this.host.setAttribute("aria-label", `Load over time of ${live} workers. Now the fullest has ${integer(max)} KV tokens, the mean is ${integer(mean)}. Figures in the table below.`);
  }

  fill() {
    fillRows(this.table.tBodies[0], this.ids.map((id, i) => {
      const known = this.shown.loads[i].filter((load) => load !== null);
      const mean = known.length ? known.reduce((a, b) => a + b) / known.length : null;
      return [id, integer(this.shown.loads[i].at(-1)), integer(known.length ? Math.min(...known) : null), integer(mean), integer(known.length ? Math.max(...known) : null)];
    }));
  }

  // A worker's line stands out, while the others fade.
  highlight(i) {
    this.plot?.setSeries(i === null ? null : i + 1, { focus: true });
  }

  focus(series) {
    if (this.focused != null) this.plot.series[this.focused].width = this.width;
    const worker = series != null && series <= this.ids.length;
    this.focused = worker ? series : null;
    if (worker) this.plot.series[series].width = 2.5;
    // uPlot forgets a change of focus that comes while it draws.
    requestAnimationFrame(() => this.plot.redraw(false));
  }

  read(i) {
    const { loads, max, mean } = this.shown;
    const lines = [`fullest ${integer(max[i])}`, `mean ${integer(mean[i])}`];
    if (this.focused === null) return lines;
    return [`${this.ids[this.focused - 1]} ${integer(loads[this.focused - 1][i])}`, ...lines];
  }
}
