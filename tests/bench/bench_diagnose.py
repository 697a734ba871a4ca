"""What ``evenstep diagnose`` says of emulated clusters, and its predictions beside measurements.

    python tests/bench/bench_diagnose.py [--seconds 60] [--seeds 2] [--json FILE] [--example DIR]
        [--only kinds|plain|demo|prompts]

Every switch to bfio: the same fleet and load under the policy before and under bfio, each listened
to for so long; the gain is the difference of the two, the error predicted / measured gain - 1.
Then one cluster of every other kind. Only bfio is simulated. --example keeps what the command
printed and wrote before and after the first switch on the demo's fleet, of some policies. Real HTTP
and router, emulated engines: no GPU's figures.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.kept_figures import read_figures
from docs.stale_figures import changed
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.report.origin import EMULATION, KEY, SERVING, Engines, origin
from tests.support.diagnosed import Emulated, diagnosed, listen, under_load
from tests.support.figure_files import write_figures
from tests.support.fleet import running_fleet

CODE = (
    *(*SERVING, *EMULATION, "loadgen/diagnose", "loadgen/simulator/decode"),
    "tests/bench/bench_diagnose.py",
)
PLAIN = Emulated()
# The demo's fleet, step time and lengths.
DEMO = Emulated(
    workers=8,
    slots=32,
    clients=320,
    step_time="4.95e-3,9.5e-8",
    trace="burstgpt",
    warm_steps=800,
)
# Workers compute their prompts, with 512 tokens a step: a prompt token costs 100 resident ones.
PROMPTS = Emulated(step_time="2e-3,2e-7,0,2e-5", flags=("--batch-tokens", "512"))
FLEETS = {"plain": PLAIN, "demo": DEMO, "prompts": PROMPTS}
SWITCHES = {
    "plain": ("round_robin, instant", "jsq, instant", "least_tokens, pool"),
    "demo": ("jsq, instant",),
    "prompts": ("jsq, instant",),
}
KINDS = (
    ("balanced", PLAIN, ("--policy", "bfio")),
    ("no barrier", Emulated(flags=("--no-barrier",)), ("--policy", "round_robin")),
    ("KV-starved", Emulated(flags=("--kv-tokens", "9000")), ("--policy", "round_robin")),
    ("little load", Emulated(clients=12), ("--policy", "round_robin")),
)
PRICE = ("--price", "0.30")
SHOWN = "bfio,balance_route,fcfs,jsq,least_tokens,round_robin,vllm_score_2026"
FIGURES = ("imbalance_tokens", "idle_share", "throughput_tok_s", "step_s")


Said = tuple[dict[str, Any], str]


def switched(
    cluster: Emulated, policy: str, seconds: float, seed: int, policies: str
) -> tuple[Said, Said]:
    """Diagnoses before and after the switch, of these policies, with what was printed."""
    name, _, dispatch = policy.partition(", ")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with running_fleet(folder, *cluster.fleet_flags()) as fleet:
            flags = ("--policy", name, "--dispatch", dispatch)
            with under_load(folder, fleet, cluster, *flags, seed=seed) as admin:
                before = listen(folder, admin, cluster, seconds, *PRICE, "--policies", policies)
            earlier = folder / "before.json"
            earlier.write_text(json.dumps(before[0]))
            more = (*PRICE, "--policies", policies, "--before", str(earlier))
            with under_load(folder, fleet, cluster, "--policy", "bfio", seed=seed) as admin:
                then = listen(folder, admin, cluster, seconds, *more)
    return before, then


def row(policy: str, fleet: str, seed: int, before: Any, then: Any) -> dict[str, Any]:
    changes = then["comparison"]["changes"]
    return {
        "fleet": fleet,
        "before": policy,
        "seed": seed,
        "steps": [before["conditions"]["steps"], then["conditions"]["steps"]],
        "seconds": before["conditions"]["seconds"],
        "verdict_before": before["verdict"],
        "verdict_after": then["verdict"],
        "simulation_error": before["simulation_error"],
        **{name: changes[name] for name in FIGURES},
    }


def switches(fleet: str, seconds: float, seeds: int, example: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print("| fleet | before | seed | verdicts | imbalance | idle share | tok/s | errors of gains |")
    print("|---|---|---|---|---|---|---|---|")
    for policy in SWITCHES[fleet]:
        cluster = FLEETS[fleet]
        for seed in range(seeds):
            shown = example is not None and cluster is DEMO and seed == 0
            said = switched(cluster, policy, seconds, seed, SHOWN if shown else "bfio")
            if example and shown:
                keep(example, said)
            (before, _), (then, _) = said
            rows.append(found := row(policy, fleet, seed, before, then))
            figures = [
                " -> ".join(f"{found[name][key]:.4g}" for key in ("before", "predicted"))
                + f" ({found[name]['measured']:.4g})"
                for name in FIGURES[:3]
            ]
            errors = ", ".join(f"{found[name]['gain_error']:+.0%}" for name in FIGURES[:3])
            print(
                f"| {found['fleet']} | {policy} | {seed} | {found['verdict_before']}, "
                f"{found['verdict_after']} | {' | '.join(figures)} | {errors} |",
                flush=True,
            )
    return rows


def kinds(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for name, cluster, flags in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            report, _ = diagnosed(Path(folder), cluster, seconds, *flags)
        rows.append({"cluster": name, "verdict": report["verdict"], "reasons": report["reasons"]})
        print(f"{name}: {report['verdict']}: {' '.join(report['reasons'])}", flush=True)
    return rows


def keep(folder: Path, said: Sequence[Said]) -> None:
    """As the page shows it."""
    for name, (report, text) in zip(("before", "after"), said, strict=True):
        shown = folder / f"{name}.txt"
        shown.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
        header = origin(Engines.EMULATED, CODE, EmulatorSettings().described())
        write_figures(folder / f"{name}.json", report, header, shown)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seconds", type=float, default=60.0, help="of listening, wall")
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--only", choices=("kinds", *FLEETS), help="the rest is kept")
    options.add_argument("--json", type=Path)
    options.add_argument("--example", type=Path, metavar="DIR")
    given = options.parse_args()
    found: dict[str, Any] = {"time_scale": PLAIN.time_scale, "kinds": [], "switches": []}
    if given.only:
        if changed(json.loads(given.json.read_text())[KEY]):
            options.error("the rest is of other code: measure all of it, without --only")
        found = read_figures(given.json)
    header = origin(Engines.EMULATED, CODE, EmulatorSettings().described())
    if given.only in (None, "kinds"):
        found["kinds"] = kinds(given.seconds)
    for fleet in FLEETS:
        if given.only in (None, fleet):
            kept = [row for row in found["switches"] if row["fleet"] != fleet]
            rows = switches(fleet, given.seconds, given.seeds, given.example)
            found["switches"] = kept + [row | {"command": header["command"]} for row in rows]
    if given.json:
        write_figures(given.json, found, header)


if __name__ == "__main__":
    main()
