"""The live router on emulated workers that compute prompts against ``evenstep simulate serving``.

    python tests/bench/bench_serving_live.py [--prefixes] [--seeds 2] [--requests 800] [--rate 24]
        [--time-scale 4] [--without-plugin] [--only POLICY,…] [--json FILE]

8 ranks behind one barrier, t_p = 5e-5 s, 512 tokens a step, Azure conversation lengths, which share
no prefixes; real HTTP. Both get the same requests at the same times, and all of them count. The
bound: means of TTFT and TPOT within 15 % for least_tokens, least_prefill (on arrival) and bfio
(pool). With --prefixes engines cache the prefixes that the prompts of mooncake-synthetic share, at
7/s and 2,048 tokens a step; the router knows of them by the engines' snapshots.

With --without-plugin engines tell nothing of themselves: conversations of the demo's second world,
by policy, in alternating runs, and what engines found in their caches. Nothing is simulated.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.demo.conversations import write_conversations
from loadgen.demo.run import Fleet, RunPlan, execute, serving
from loadgen.demo.worlds import PROMPTS
from loadgen.replay.replay_results import shortfall
from loadgen.replay.workload import plan
from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from loadgen.run.child_processes import Child
from loadgen.simulator.decode.decode_config import SERVE
from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, load_trace
from router.core.step_time import StepTime
from router.core.types import Dispatch
from tests.support.figure_files import write_figures

CODE = (
    *SERVING,
    *EMULATION,
    "loadgen/replay",
    "loadgen/simulator/serving",
    "tests/bench/bench_serving_live.py",
)
POLICIES = (
    ("least_tokens", Dispatch.INSTANT),
    ("least_prefill", Dispatch.INSTANT),
    ("bfio", Dispatch.POOL),
)
WITH_PREFIXES = (
    ("prefix_score", Dispatch.INSTANT),
    ("barrier_time", Dispatch.INSTANT),
    *POLICIES,
)
WORKERS, SLOTS, KV_TOKENS, BLOCK = 8, 128, 1_000_000, 16
COST = StepTime(5e-3, 9.5e-8, per_prompt_token_s=5e-5)
CAP_TOKENS = 2048
TIMEOUT_S = 900.0
BOUND = 0.15


@dataclass(frozen=True)
class Setting:
    requests: int
    rate: float
    time_scale: float
    seed: int
    prefixes: bool

    @property
    def trace(self) -> str:
        return "mooncake-synthetic" if self.prefixes else "azure-conv"

    @property
    def batch_tokens(self) -> int:
        return 2048 if self.prefixes else 512


@dataclass(frozen=True)
class Row:
    """Means of one live run and of its simulation, in engine seconds."""

    policy: str
    seed: int
    live_ttft_s: float
    simulated_ttft_s: float
    live_tpot_s: float
    simulated_tpot_s: float
    lateness_s: float

    @property
    def off(self) -> tuple[float, float]:
        return (
            self.live_ttft_s / self.simulated_ttft_s - 1,
            self.live_tpot_s / self.simulated_tpot_s - 1,
        )


def live(
    policy: str, dispatch: Dispatch, setting: Setting, folder: Path
) -> tuple[dict[str, float], Mapping[str, object]]:
    """The replay's report, and the engines' features."""
    fleet = Fleet(
        WORKERS,
        SLOTS,
        0,
        str(COST),
        more=(
            *(() if setting.prefixes else ("--no-prefix-caching",)),
            *("--kv-tokens", str(KV_TOKENS), "--block-tokens", str(BLOCK)),
            *("--batch-tokens", str(setting.batch_tokens)),
        ),
    )
    scale = setting.time_scale
    run = RunPlan(policy, dispatch, setting.requests, CAP_TOKENS, setting.seed, scale, 0.0)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    patience = ("--starvation", f"{SERVE['starvation_s'] * scale:g}")
    with serving(run, fleet, folder / run.name, *patience) as (url, engines):
        replay = [
            *("replay", "--url", url, "--trace", setting.trace, "--seed", str(setting.seed)),
            *("--arrivals", f"poisson:{setting.rate:g}", "--requests", str(setting.requests)),
            *("--max-tokens", str(CAP_TOKENS), "--time-scale", f"{scale:g}"),
            *("--warmup", "0", "--json", str(report)),
        ]
        with Child(replay, folder / f"{run.name}.replay.log") as client:
            client.finish(TIMEOUT_S)
    found: dict[str, float] = json.loads(report.read_bytes())
    if found["completed"] != setting.requests:
        raise SystemExit(f"{run.name}: {shortfall(found)}")
    return found, engines


def simulated(policy: str, dispatch: Dispatch, setting: Setting) -> tuple[float, float]:
    trace = load_trace(setting.trace)
    rows = plan(trace, Arrivals("poisson", setting.rate), setting.requests, setting.seed)
    result = simulate_serving(
        ServingConfig(
            policy=policy,
            trace=Trace(trace.name, "planned", rows),
            arrivals=Arrivals("trace", 1.0),
            requests=setting.requests,
            workers=WORKERS,
            slots=SLOTS,
            kv_tokens=KV_TOKENS,
            block_tokens=BLOCK,
            batch_tokens=setting.batch_tokens,
            step_time=COST,
            dispatch=dispatch,
            warmup=0.0,
            seed=setting.seed,
        )
    )
    assert result.tpot_mean_s is not None
    return result.ttft_mean_s, result.tpot_mean_s


def rows_of(given: argparse.Namespace, folder: Path) -> Iterator[tuple[Mapping[str, object], Row]]:
    for seed in range(given.seeds):
        setting = Setting(
            given.requests, given.rate, given.time_scale, seed, prefixes=given.prefixes
        )
        for policy, dispatch in WITH_PREFIXES if given.prefixes else POLICIES:
            ttft_s, tpot_s = simulated(policy, dispatch, setting)
            found, engines = live(policy, dispatch, setting, folder)
            yield (
                engines,
                Row(
                    policy,
                    seed,
                    found["mean_ttft_ms"] / 1e3,
                    ttft_s,
                    found["mean_tpot_ms"] / 1e3,
                    tpot_s,
                    found.get("p99_lateness_ms", 0.0) / 1e3,
                ),
            )


def without_plugin(given: argparse.Namespace, folder: Path) -> Mapping[str, object]:
    """Figures of conversations before engines that tell nothing."""
    fleet = replace(PROMPTS.fleet, more=(*PROMPTS.fleet.more, "--no-snapshots"))
    trace = folder / "conversations.jsonl"
    order = [one for one in WITH_PREFIXES if one[0] in given.only.split(",")]
    rows, engines = list[dict[str, object]](), dict[str, object]()
    for seed in range(given.seeds):
        write_conversations(trace, given.requests, seed)
        for policy, dispatch in order:
            run = RunPlan(policy, dispatch, given.requests, CAP_TOKENS, seed, given.time_scale)
            run = replace(run, trace=str(trace), **PROMPTS.plan)
            outcome = execute(run, fleet, folder, TIMEOUT_S)
            if not outcome.complete:
                raise SystemExit(f"{run.name}: {shortfall(outcome.report)}")
            engines = dict(outcome.engines)
            names = "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "cached_prompt_share"
            rows.append({"policy": policy, "seed": seed} | {n: outcome.report[n] for n in names})
            print(json.dumps(rows[-1]), flush=True)
        order.reverse()
    figures = {"requests": given.requests, "time_scale": given.time_scale, "rows": rows}
    if given.json:
        write_figures(given.json, figures, origin(Engines.EMULATED, CODE, engines))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefixes", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--rate", type=float, default=24.0)
    parser.add_argument("--time-scale", type=float, default=4.0)
    parser.add_argument("--without-plugin", action="store_true")
    parser.add_argument("--only", default=",".join(policy for policy, _ in WITH_PREFIXES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, physics = list[Row](), dict[str, object]()
    with tempfile.TemporaryDirectory() as scratch:
        if given.without_plugin:
            without_plugin(given, Path(scratch))
            return
        for engines, row in rows_of(given, Path(scratch)):
            rows.append(row)
            physics = dict(engines)
            ttft, tpot = row.off
            print(
                f"{row.policy}, seed {row.seed}: TTFT {row.live_ttft_s:.3f} s live, "
                f"{row.simulated_ttft_s:.3f} simulated ({ttft:+.1%}); TPOT "
                f"{1e3 * row.live_tpot_s:.2f} ms, {1e3 * row.simulated_tpot_s:.2f} ({tpot:+.1%})",
                flush=True,
            )
    worst = max(abs(off) for row in rows for off in row.off)
    print(f"largest difference {worst:.1%}, bound {BOUND:.0%}")
    if given.json:
        figures = {
            "requests": given.requests,
            "rate": given.rate,
            "time_scale": given.time_scale,
            "rows": [row.__dict__ | {"off": row.off} for row in rows],
            "largest_difference": worst,
        }
        write_figures(given.json, figures, origin(Engines.EMULATED, CODE, physics))


if __name__ == "__main__":
    main()
