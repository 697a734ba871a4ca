"""Who decodes what other workers have prefilled: policies at the hand-off, on emulated workers.

    python tests/bench/bench_disaggregated.py [--traces burstgpt,azure-conv] [--requests 3000]
        [--seeds 1] [--time-scale 2] [--policies jsq,least_tokens,bfio,whole] [--json FILE]

2 prefill and 8 decode workers of 32 slots, more requests than slots in a closed loop, real HTTP
with vLLM's hand-off (kv_transfer_params). `whole`: bfio on ten workers that compute their prompts
themselves. Baselines run in both forms of dispatch; the better one by throughput counts. `steady`:
the fleet's record while clients keep the slots full; bench_disaggregated_model.py simulates it.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from loadgen.demo.figures import steady_steps, step_figures
from loadgen.demo.run import STARVATION_S, Fleet, Outcome, RunPlan
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.emulator.record import read_record
from loadgen.engine.prefill_settings import PrefillSettings
from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from loadgen.run.child_processes import Child, free_ports
from router.core.types import Dispatch
from tests.support.figure_files import write_figures

PHYSICS = EmulatorSettings(prefill=PrefillSettings()).described()
CODE = (
    *SERVING,
    *EMULATION,
    "loadgen/replay",
    "loadgen/traces",
    "tests/bench/bench_disaggregated.py",
)

PREFILLS, DECODES, SLOTS, POOL = 2, 8, 32, 96
STEP_TIME = "4.95e-3,9.5e-8"
PREFILL_STEP_TIME = "4.95e-3,4e-6"
PREFILL_CHUNK = "8192"
CAP_TOKENS = 400
TIMEOUT_S = 900.0
PARTS = ("pool_wait_seconds", "service_seconds", "time_to_first_token_seconds")


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    name: str
    policy: str
    dispatch: str
    split: bool = True

    @property
    def workers(self) -> tuple[int, int]:
        """Prefill workers, and others."""
        return (PREFILLS, DECODES) if self.split else (0, PREFILLS + DECODES)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all policies have in common."""

    trace: str
    requests: int
    seed: int
    time_scale: float


def plans(policies: str) -> Iterator[Plan]:
    for policy in policies.split(","):
        if policy == "whole":
            yield Plan("whole", "bfio", "pool", split=False)
            continue
        for dispatch in ("pool",) if policy == "bfio" else ("pool", "instant"):
            yield Plan(f"{policy}-{dispatch}", policy, dispatch)


def run(plan: Plan, setting: Setting, folder: Path) -> dict[str, Any]:
    """One replay; figures from the router's metrics and from the clients."""
    prefills, decodes = plan.workers
    ports = free_ports(3 * (prefills + decodes) + 2)
    started, report, record = (folder / name for name in ("fleet.json", "report.json", "steps.csv"))
    for file in (started, report):
        file.unlink(missing_ok=True)
    scale, seed = setting.time_scale, str(setting.seed)
    url = f"http://127.0.0.1:{ports + 3 * (prefills + decodes) + 1}"
    fleet = [
        *("emulate", "--workers", str(decodes), "--prefill-workers", str(prefills)),
        *("--slots", str(SLOTS), "--port", str(ports), "--time-scale", f"{scale:g}"),
        *("--step-time", STEP_TIME, "--prefill-step-time", PREFILL_STEP_TIME),
        *("--prefill-chunk", PREFILL_CHUNK),
        *("--stream-interval", "16", "--seed", seed, "--json", str(started)),
        *("--record", str(record)),
    ]
    with Child(fleet, folder / f"{plan.name}.fleet.log") as child:
        told = child.until(lambda: _read(started), TIMEOUT_S)
        specs = [worker["spec"] for worker in told["workers"]]
        router = [
            *("serve", "--port", url.rpartition(":")[2], "--log-level", "warning"),
            *("--policy", plan.policy, "--dispatch", plan.dispatch),
            *("--starvation", f"{STARVATION_S * scale:g}", "--queue-timeout", f"{60 * scale:g}"),
            *("--kv-expiry", f"{30 * scale:g}"),
            *(part for spec in specs for part in ("--worker", spec)),
        ]
        with Child(router, folder / f"{plan.name}.router.log") as serving:
            serving.until(lambda: _all_up(url, len(specs)), TIMEOUT_S)
            replay = [
                *("replay", "--url", url, "--trace", setting.trace, "--seed", seed),
                *("--arrivals", f"closed:{(prefills + decodes) * SLOTS + POOL}"),
                *("--requests", str(setting.requests), "--max-tokens", str(CAP_TOKENS)),
                *("--time-scale", f"{scale:g}", "--warmup", "0.3", "--json", str(report)),
            ]
            with Child(replay, folder / f"{plan.name}.replay.log") as client:
                client.finish(TIMEOUT_S)
            metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    found = _read(report)
    if found is None:
        raise SystemExit(f"{plan.name}: no report; see {folder}")
    return {
        **asdict(plan),
        **asdict(setting),
        "completed": found["completed"],
        "output_tok_s": found["steady"]["output_throughput"],
        **_figures(metrics, scale),
        "steady": _steady(plan, setting, found, record),
        "report": found,
    }


def _steady(plan: Plan, setting: Setting, report: Any, record: Path) -> dict[str, Any] | None:
    """Averages of the steady window; None if the run is too short."""
    of_demo = RunPlan(
        plan.policy,
        Dispatch(plan.dispatch),
        setting.requests,
        CAP_TOKENS,
        setting.seed,
        setting.time_scale,
    )
    steps = steady_steps(Outcome(of_demo, report, read_record(record), record))
    fleet = Fleet(plan.workers[1], SLOTS, POOL, STEP_TIME)
    figures = step_figures(steps, fleet)
    if figures is None:
        return None
    return {"first": steps[0].step, "stop": steps[-1].step + 1, **asdict(figures)}


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _all_up(url: str, workers: int) -> bool | None:
    try:
        health = httpx.get(f"{url}/health", trust_env=False).json()
    except httpx.TransportError:
        return None
    up = [
        w["up"] and w["snapshots"] == "fresh"
        for g in health["groups"].values()
        for w in g["workers"]
    ]
    return True if len(up) == workers and all(up) else None


def _figures(metrics: str, scale: float) -> dict[str, Any]:
    """Of the whole run, in engine seconds."""
    values = {}
    for line in metrics.splitlines():
        if line.startswith("evenstep_"):
            name, _, value = line.rpartition(" ")
            values[name.removeprefix("evenstep_")] = float(value)
    figures: dict[str, Any] = {}
    waiting = '{group="default",pool="waiting"}'
    steps = values[f"barrier_steps_total{waiting}"]
    figures["steps_waiting"] = steps
    figures["imbalance_tokens"] = (
        values[f"imbalance_tokens_total{waiting}"] / steps if steps else None
    )
    for group in ("default/prefill", "default"):
        for part in PARTS:
            count = values.get(f'{part}_count{{group="{group}"}}', 0)
            if count:
                total = values[f'{part}_sum{{group="{group}"}}']
                figures[f"{group} {part}"] = total / count / scale
    for name in ("kv_expired_tokens_total", "prefills_repeated_total", "prefill_fallbacks_total"):
        figures[name] = values.get(f'{name}{{group="default/prefill"}}')
    figures["overcommit"] = values['overcommit_requests{group="default"}']
    figures["estimated"] = values['requests_estimated_total{group="default"}']
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", default="burstgpt")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--time-scale", type=float, default=2.0)
    parser.add_argument("--policies", default="jsq,least_tokens,bfio,whole")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        for trace, seed in product(given.traces.split(","), range(given.seeds)):
            setting = Setting(trace, given.requests, seed, given.time_scale)
            for plan in plans(given.policies):
                row = run(plan, setting, Path(folder))
                rows.append(row)
                print(json.dumps({k: v for k, v in row.items() if k != "report"}), flush=True)
    if given.json:
        write_figures(given.json, {"rows": rows}, origin(Engines.EMULATED, CODE, PHYSICS))


if __name__ == "__main__":
    main()
