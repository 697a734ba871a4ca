// In words and tables: the policy in force, what the figures rest on, and every worker.

import { workerColour } from "./charts.js";
import { byId, element, fillHead, fillReadout, setText } from "./dom.js";
import { count, integer, parameter, percent, seconds, UNKNOWN, watts } from "./format.js";

const DISPATCH = {
  pool: "pool: a request leaves when a slot is free",
  instant: "instant: a request leaves when it arrives",
};
const SOURCES = { snapshots: "snapshots", metrics: "engine metrics", own: "own counts" };
const BREAKERS = { closed: "up", half_open: "on trial: has failed requests", open: "ejected: fails requests" };
const STANDING = { good: "in order", fallback: "stands in", problem: "problem", unknown: "not known" };

export function showPolicy(group, past) {
  const host = byId("policy");
  if (!group.rule) {
    host.replaceChildren(element("p", { class: "about" }, "None: nothing is routed here, only observed."));
    return;
  }
  const { rule } = group;
  if (!host.querySelector("dl")) {
    host.replaceChildren(element("p", { class: "policy" }, element("b"), " ", element("span")), element("dl", { class: "settings" }));
  }
  setText(host.querySelector("b"), rule.policy);
  setText(host.querySelector("span"), rule.summary);
  const looks = rule.horizon === null ? [] : [
    ["Look-ahead", rule.horizon ? count(rule.horizon, "step") : "none"],
    ["Skill of the forecast", rule.skill === null ? "not known yet" : `${rule.skill.toFixed(2)} of 1`],
    ["Discount γ per step", parameter(rule.discount)],
    ["Tie weight μ", parameter(rule.tie_weight)],
    ["Lead", `${integer(rule.lead_tokens)} tokens`],
  ];
  fillSettings(host.querySelector("dl"), [
    ["Dispatch", DISPATCH[rule.dispatch]],
    ["May queue in an engine", count(rule.overcommit, "request")],
    ...looks,
    ...(past.average.cached === null ? [] : [["Prompt tokens cached", percent(past.average.cached)]]),
    ["Decisions", past.average.decisions === null ? UNKNOWN : `${past.average.decisions.toFixed(0)} a second, ${seconds(past.average.decision)} each`],
  ]);
}

function fillSettings(list, rows) {
  const names = [...list.querySelectorAll("dt")].map((each) => each.textContent);
  if (names.join() !== rows.map(([name]) => name).join()) list.replaceChildren();
  fillReadout(list, rows);
}

export function showFacts(group) {
  const list = byId("facts");
  while (list.children.length > group.facts.length) list.lastChild.remove();
  group.facts.forEach((fact, i) => {
    let item = list.children[i];
    if (!item) {
      item = element("li", {}, element("span", { class: "mark" }), element("b"), element("p"));
      list.append(item);
    }
    item.dataset.standing = fact.standing;
    setText(item.querySelector(".mark"), STANDING[fact.standing]);
    setText(item.querySelector("b"), fact.topic);
    setText(item.querySelector("p"), fact.text);
  });
}

const COLUMNS = ["Worker", "State", "Load, tokens", "Running", "Queued there", "Slots", "KV used", "Power", "Known by"];

export class WorkersTable {
  constructor(onPoint) {
    this.table = byId("workers");
    this.table.append(element("thead"), element("tbody"));
    fillHead(this.table.tHead, COLUMNS);
    this.body = this.table.tBodies[0];
    this.ids = "";
    this.onPoint = onPoint;
    this.body.addEventListener("pointerleave", () => onPoint(null));
  }

  build(group) {
    this.ids = group.workers.map((worker) => worker.id).join("\n");
    const count = group.workers.length;
    this.body.replaceChildren(...group.workers.map((worker, i) => {
      const swatch = element("i", { class: "swatch" });
      const name = element("th", { scope: "row" }, swatch, named(worker));
      const row = element("tr", {}, name, ...COLUMNS.slice(1).map(() => element("td")));
      row.addEventListener("pointerenter", () => this.onPoint(i));
      return row;
    }));
    this.paint(count);
  }

  paint(count = this.body.rows.length) {
    [...this.body.querySelectorAll(".swatch")].forEach((swatch, i) => {
      swatch.style.background = workerColour(i, count);
    });
  }

  show(group) {
    if (this.ids !== group.workers.map((worker) => worker.id).join("\n")) this.build(group);
    const fullest = Math.max(1, ...group.workers.map((worker) => (worker.up ? worker.load_tokens : 0)));
    group.workers.forEach((worker, i) => this.fill(this.body.rows[i], worker, fullest));
  }

  fill(row, worker, fullest) {
    const { up } = worker;
    row.classList.toggle("down", !up);
    row.classList.toggle("fullest", up && worker.load_tokens === fullest);
    const texts = [
      up ? (worker.draining ? "draining" : BREAKERS[worker.breaker]) : `down: ${worker.reason}`,
      up ? integer(worker.load_tokens) : UNKNOWN,
      up ? integer(worker.requests - worker.queued) : UNKNOWN,
      up ? integer(worker.queued) : UNKNOWN,
      integer(worker.slots),
      up ? percent(worker.kv_usage) : UNKNOWN,
      up && worker.power_w !== null ? watts(worker.power_w) : "unknown",
      known(worker),
    ];
    texts.forEach((text, j) => setText(row.cells[j + 1], text));
    row.cells[2].style.setProperty("--share", up ? worker.load_tokens / fullest : 0);
  }
}

// Given names need their rank beside them; the others end with it.
function named({ id, rank }) {
  return rank === null || id.endsWith(`#${rank}`) ? id : `${id}, rank ${rank}`;
}

function known(worker) {
  if (!worker.up) return UNKNOWN;
  const age = worker.age_s === null || worker.age_s < 2 ? "" : `, ${worker.age_s.toFixed(0)} s old`;
  const problem = worker.problem ? ` (${worker.problem})` : "";
  return SOURCES[worker.source] + age + problem;
}
