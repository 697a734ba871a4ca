// uPlot in the page's colours.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { element, setText } from "./dom.js";
import { clock } from "./format.js";

let palette = {};
const drawn = new Set();

// Colours of the theme, read once for all that is drawn.
export function readPalette() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "muted", "grid", "accent", "accent-soft", "ember", "ember-soft", "card"]) {
    palette[name] = style.getPropertyValue(`--${name}`).trim();
  }
  palette.dark = document.documentElement.dataset.theme === "dark";
}

export const colour = (name) => palette[name];

// Workers in a calm range of hues, neighbours apart where there are few.
export function workerColour(i, count) {
  const hue = count === 1 ? 200 : 150 + (150 * i) / (count - 1);
  return `oklch(${palette.dark ? "74%" : "60%"} 0.11 ${hue.toFixed(0)})`;
}

const WHOLE_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600];
const FONT = "11px system-ui, sans-serif";

function axes(format, tall) {
  const common = {
    stroke: () => colour("muted"),
    grid: { stroke: () => colour("grid"), width: 1 },
    ticks: { show: false },
    font: FONT,
  };
  return [
    { ...common, grid: { show: false }, space: 80, size: 24, incrs: WHOLE_S, values: (_, times) => times.map(clock) },
    { ...common, size: 46, space: tall ? 44 : 30, gap: 6, values: (_, values) => values.map(format) },
  ];
}

// From 0, since bars of waiting are compared; with room above.
const fromZero = (_, __, max) => [0, max > 0 ? max * 1.08 : 1];

// What the pointer is at, in lines of text beside it.
function follow(plot, tip, read) {
  const { left, idx } = plot.cursor;
  const lines = idx == null || left < 0 || !plot.data[0].length ? null : read(idx);
  tip.hidden = lines === null;
  if (lines === null) return;
  setText(tip, [clock(plot.data[0][idx]), ...lines].join("\n"));
  tip.classList.toggle("left", left > plot.over.clientWidth / 2);
  tip.style.left = `${left}px`;
}

// `read(i)` says in lines what there is at the i-th time; `onFocus(series)` which one is pointed at.
export function chart(host, { series, bands, format, height, focus = false, onFocus, read }) {
  const tip = element("div", { class: "tip", hidden: "" });
  const options = {
    width: Math.max(120, host.clientWidth),
    height,
    padding: [8, 28, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      drag: { x: false, y: false },
      points: { size: 7, one: focus },
      focus: { prox: focus ? 24 : -1 },
    },
    focus: { alpha: 0.25 },
    scales: { x: { time: true }, y: { range: fromZero } },
    axes: axes(format, height > 200),
    series: [{}, ...series],
    bands,
    hooks: {
      setCursor: [(shown) => follow(shown, tip, read)],
      setSeries: onFocus ? [(_, i) => onFocus(i)] : [],
    },
  };
  const plot = new uPlot(options, [[], ...series.map(() => [])], host);
  plot.over.append(tip);
  const resize = new ResizeObserver(() => {
    if (host.clientWidth) plot.setSize({ width: host.clientWidth, height });
  });
  resize.observe(host);
  drawn.add(plot);
  plot.discard = () => {
    resize.disconnect();
    drawn.delete(plot);
    plot.destroy();
  };
  return plot;
}

export function repaint() {
  readPalette();
  for (const plot of drawn) plot.redraw(false);
}
