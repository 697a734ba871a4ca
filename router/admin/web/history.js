// What has been seen since the page was opened, a column per figure, and what follows from it.

const KEPT_S = 900;
const GAP_S = 3.5;
const AVERAGE_SAMPLES = 10;

export const FIGURES = ["idle", "imbalance", "tokens", "requests", "pool", "power", "ttft"];

const per = (amount, of) => (of > 0 ? amount / of : null);

function loadsOf(group) {
  return group.workers.map((worker) => (worker.up ? worker.load_tokens : null));
}

function spread(loads) {
  const live = loads.filter((load) => load !== null);
  if (!live.length) return { max: null, mean: null, live: 0 };
  return { max: Math.max(...live), mean: live.reduce((a, b) => a + b) / live.length, live: live.length };
}

function powerOf(group) {
  const told = group.workers.filter((worker) => worker.up && worker.power_w !== null);
  return told.length ? told.reduce((sum, worker) => sum + worker.power_w, 0) : null;
}

// Between two samples; what nobody tells is null, never 0.
function rates(now, before, group) {
  const d = (name) => now.sums[name] - before.sums[name];
  const elapsed = now.clock - before.clock;
  const { max, mean, live } = now.spread;
  const counted = max === null ? null : live * (max - mean);
  return {
    idle: group.barrier === false ? null : per(d("waiting_s"), d("timed_s")),
    measured: per(d("measured_s"), d("timed_s")),
    imbalance: now.sums.steps ? per(d("imbalance_tokens"), d("steps")) : counted,
    tokens: now.sums.steps ? per(d("output_tokens"), elapsed) : null,
    requests: group.pool_requests === null ? null : per(d("completed"), elapsed),
    pool: group.pool_requests,
    power: powerOf(group),
    ttft: per(d("first_token_s"), d("first_tokens")),
    met: per(d("targets_met"), d("targets")),
    cached: per(d("prefix_found_tokens"), d("prefix_prompt_tokens")),
    steps: per(d("steps"), elapsed),
    decision: group.rule && before.rule
      ? per(group.rule.decision_s - before.rule.decision_s, group.rule.decisions - before.rule.decisions)
      : null,
    decisions: group.rule && before.rule ? per(group.rule.decisions - before.rule.decisions, elapsed) : null,
    joules: { useful: d("useful_j"), waiting: d("waiting_j"), idle: d("idle_j"), undivided: d("undivided_j") },
  };
}

// Whether they are of another router: sums only grow.
const fell = (now, before) => Object.keys(now).some((name) => now[name] < before[name]);

// One group's past.
export class Past {
  constructor(ids) {
    this.ids = ids;
    this.forget();
  }

  forget() {
    this.samples = [];
    this.times = [];
    this.loads = this.ids.map(() => []);
    this.max = [];
    this.mean = [];
    this.figures = Object.fromEntries(FIGURES.map((name) => [name, []]));
  }

  // Workers have come or gone: each that is there has its own past, the group as a whole goes on.
  follow(ids) {
    const columns = new Map(this.ids.map((id, i) => [id, this.loads[i]]));
    this.loads = ids.map((id) => columns.get(id) ?? this.times.map(() => null));
    this.ids = ids;
  }

  push(time, clock, group) {
    const last = this.samples.at(-1);
    if (last && clock === last.clock) return; // told again, to a viewer that came back
    if (last && time <= last.time) this.forget(); // the router's clock was set back
    else if (last && (time - last.time > GAP_S || clock < last.clock || fell(group.sums, last.sums))) {
      this.breakLines(last.time);
      this.samples = [];
    }
    this.barrier = group.barrier;
    const loads = loadsOf(group);
    const sample = { time, clock, sums: group.sums, rule: group.rule, spread: spread(loads) };
    this.samples.push(sample);
    if (this.samples.length > AVERAGE_SAMPLES + 1) this.samples.shift();
    this.latest = rates(sample, this.samples.at(-2) ?? sample, group);
    this.average = rates(sample, this.samples[0], group);
    this.append(time, loads, sample.spread, this.latest);
    this.trim(time - KEPT_S);
  }

  append(time, loads, { max, mean }, figures) {
    this.times.push(time);
    this.loads.forEach((column, i) => column.push(loads[i]));
    this.max.push(max);
    this.mean.push(mean);
    for (const name of FIGURES) this.figures[name].push(figures[name]);
  }

  breakLines(time) {
    this.append(time + 0.5, this.ids.map(() => null), { max: null, mean: null }, Object.fromEntries(FIGURES.map((name) => [name, null])));
  }

  trim(oldest) {
    const old = this.times.findIndex((time) => time >= oldest);
    if (old < 60) return; // not a shift at every second
    const columns = [this.times, ...this.loads, this.max, this.mean, ...Object.values(this.figures)];
    for (const column of columns) column.splice(0, old);
  }

  // Where the last `seconds` begin.
  since(seconds) {
    const oldest = this.times.at(-1) - seconds;
    return Math.max(0, this.times.findIndex((time) => time >= oldest));
  }
}

// All groups' pasts.
export class History {
  constructor() {
    this.pasts = new Map();
  }

  push(state) {
    for (const group of state.groups) {
      const ids = group.workers.map((worker) => worker.id);
      let past = this.pasts.get(group.name);
      if (!past) this.pasts.set(group.name, (past = new Past(ids)));
      if (past.ids.join("\n") !== ids.join("\n")) past.follow(ids);
      past.push(state.time_s, state.clock_s, group);
    }
  }
}
