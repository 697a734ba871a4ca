// The page: a stream of states in, all panels of the chosen group out.

import { Cards } from "./cards.js";
import { readPalette, repaint } from "./charts.js";
import { byId, element, setText } from "./dom.js";
import { History } from "./history.js";
import { LoadsPanel } from "./loads.js";
import { showFacts, showPolicy, WorkersTable } from "./panels.js";
import { follow } from "./stream.js";
import { bindThemeButton } from "./theme.js";

const STATUS = { connecting: "connecting", live: "live", lost: "no answer, trying again", paused: "paused" };

readPalette();
const history = new History();
const loads = new LoadsPanel();
const cards = new Cards();
const workers = new WorkersTable((i) => loads.highlight(i));
const chooser = byId("group");
let state = null;
let heard = "connecting";
let paused = false;

// The group that the address names; anybody may have typed it.
function chosen() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

const window_s = () => Number(byId("window").querySelector(":checked").value);

function listGroups(names) {
  if ([...chooser.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  chooser.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  chooser.disabled = names.length < 2;
}

function tags(group) {
  const found = [];
  if (state.replica) found.push(state.replica);
  if (group.emulated) found.push("emulated engines, no GPU");
  if (group.serves) found.push(`computes prompts for ${group.serves}`);
  if (group.lockstep) found.push(`in lockstep (by ${group.lockstep_by}): all up or all down`);
  if (!group.rule) found.push("observed, not routed");
  return found;
}

// The gap to the fullest is drawn as an alarm only where workers wait for it.
function showBarrier(barrier) {
  const { dataset } = document.documentElement;
  if (dataset.barrier === String(barrier)) return;
  dataset.barrier = barrier;
  repaint();
}

function show() {
  if (!state || paused || document.hidden) return;
  listGroups(state.groups.map((group) => group.name));
  const group = state.groups.find((each) => each.name === chosen()) ?? state.groups[0];
  if (!group) return; // all workers have been removed
  const past = history.pasts.get(group.name);
  chooser.value = group.name;
  byId("tags").replaceChildren(...tags(group).map((text) => element("li", {}, text)));
  const up = group.workers.filter((worker) => worker.up).length;
  document.title = `${up} of ${group.workers.length} up · Evenstep`;
  showBarrier(group.barrier);
  loads.show(past, window_s(), group.barrier);
  cards.show(past, window_s());
  showPolicy(group, past);
  showFacts(group);
  workers.show(group);
  setText(byId("footer"), `Evenstep ${state.version}. Figures are means of the last ten seconds, lines of each second. Metrics for Prometheus are at /metrics.`);
}

function showStatus(name) {
  heard = name;
  const shown = paused && name === "live" ? "paused" : name;
  byId("status").dataset.state = shown;
  setText(byId("status"), STATUS[shown]);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
  setText(byId("pause"), paused ? "Go on" : "Pause");
  showStatus(heard);
  show();
});
byId("window").addEventListener("change", show);
chooser.addEventListener("change", () => {
  location.hash = encodeURIComponent(chooser.value);
});
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", show);
document.addEventListener("themechange", () => {
  repaint();
  workers.paint();
});
bindThemeButton(byId("theme"));

follow("/events", (next) => {
  state = next;
  history.push(next);
  show();
}, showStatus);
