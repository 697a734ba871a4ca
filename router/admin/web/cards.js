// One figure a card: what it is now, what it means, and how it went.

import { chart, colour } from "./charts.js";
import { byId, element, fillHead, fillRows, setText } from "./dom.js";
import { axisPercent, axisSeconds, axisWhole, clock, compact, integer, percent, seconds, watts } from "./format.js";

const HEIGHT = 112;
const ROWS = 30;

function energy({ average }) {
  const { useful, waiting, idle, undivided } = average.joules;
  const all = useful + waiting + idle + undivided;
  if (average.power === null) return "no worker tells its power";
  if (!all || undivided > 0.5 * all) return "what for is not known";
  const rest = undivided > 0.01 * all ? `, ${percent(undivided / all)} not known` : "";
  return `${percent(useful / all)} useful, ${percent(waiting / all)} waiting, ${percent(idle / all)} idle${rest}`;
}

function timed({ average, barrier }) {
  if (barrier === false) return "workers do not step together: none waits for another";
  if (!average.measured) return "";
  const how = average.measured > 0.999 ? "timed by engines" : `${percent(average.measured)} of it timed by engines`;
  return `of step time is waiting for the fullest (${how})`;
}

const CARDS = [
  {
    name: "idle", title: "Idle share", tone: "ember", format: percent, axis: axisPercent,
    about: "of step time is waiting for the fullest (modelled)", note: timed,
    missing: ({ barrier }) => (barrier === false ? "none" : null),
  },
  {
    name: "imbalance", title: "Imbalance", tone: "ember", format: compact, unit: "tokens",
    about: "KV tokens that the others are short of the fullest, together",
    note: ({ samples }) => (samples.at(-1).sums.steps ? "" : "short of the fullest, together, by the router's own counts"),
  },
  {
    name: "tokens", title: "Throughput", tone: "accent", format: compact, unit: "tokens/s",
    note: ({ average }) => (average.requests === null ? "" : `${average.requests.toFixed(1)} requests/s completed`),
    about: "output tokens that all workers decode",
  },
  {
    name: "pool", title: "Waiting in the pool", tone: "accent", format: integer, axis: axisWhole, unit: "requests", momentary: true, routed: true,
    about: "requests that the router holds until a slot is free",
  },
  {
    name: "ttft", title: "Time to first token", tone: "accent", format: seconds, axis: axisSeconds, routed: true,
    note: ({ average }) => (average.met === null ? "" : `mean; ${percent(average.met)} of requests with targets met them`),
    about: "mean, from a request's arrival here",
  },
  {
    name: "power", title: "Power", tone: "accent", format: watts, axis: compact, momentary: true, note: energy,
    about: "of all workers that tell it",
  },
];

class Card {
  constructor(row) {
    this.row = row;
    const id = `card-${row.name}`;
    this.value = element("span", { class: "value" });
    this.note = element("p", { class: "note" });
    this.host = element("div", { class: "plot", role: "img" });
    this.unknown = element("p", { class: "unknown" }, "nothing to draw");
    this.table = element("table", {}, element("thead"), element("tbody"));
    fillHead(this.table.tHead, ["Time", row.title]);
    this.figures = element("details", { class: "figures" }, element("summary", { "aria-label": `${row.title} as a table` }, "As a table"),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${row.title}, last samples` }, this.table));
    this.root = element("section", { class: "card", id, "aria-labelledby": `${id}-title` },
      element("h2", { id: `${id}-title` }, row.title),
      element("p", { class: "now" }, this.value, element("span", { class: "unit" }, row.unit ?? "")),
      this.note, this.host, this.unknown, this.figures);
  }

  build() {
    const tone = this.row.tone;
    this.plot = chart(this.host, {
      height: HEIGHT,
      format: this.row.axis ?? this.row.format,
      read: (i) => [this.row.format(this.plot.data[1][i])],
      series: [{ stroke: () => colour(tone), fill: () => colour(`${tone}-soft`), width: 1.5, points: { show: false } }],
    });
  }

  show(past, window_s) {
    this.root.hidden = Boolean(this.row.routed) && past.latest.pool === null;
    if (this.root.hidden) return;
    if (!this.plot) this.build();
    const { name, format, momentary, note, about } = this.row;
    const column = past.figures[name];
    const value = (momentary ? past.latest : past.average)[name];
    const ever = column.some((each) => each !== null);
    setText(this.value, value === null ? this.row.missing?.(past) ?? "unknown" : format(value));
    this.root.classList.toggle("is-unknown", value === null);
    this.root.dataset.ever = ever;
    setText(this.note, note?.(past) || about);
    this.host.setAttribute("aria-label", `${this.row.title} over time, now ${format(value)} ${this.row.unit ?? ""}; ${about}`);
    const from = past.since(window_s);
    this.plot.setData([past.times.slice(from), column.slice(from)]);
    if (this.figures.open) {
      const rows = past.times.map((time, i) => [clock(time), format(column[i])]);
      fillRows(this.table.tBodies[0], rows.slice(-ROWS).reverse());
    }
  }
}

export class Cards {
  constructor() {
    this.cards = CARDS.map((row) => new Card(row));
    byId("cards").append(...this.cards.map((card) => card.root));
  }

  show(past, window_s) {
    for (const card of this.cards) card.show(past, window_s);
  }
}
