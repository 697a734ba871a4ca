"""How far admission is from the least total latency, known in hindsight, on tiny instances.

    python tests/bench/bench_hindsight.py [--instances 200] [--json FILE]

HiGHS solves each instance to its optimum. Every policy admits the same jobs to the simulated
engine; the lengths are true, but only memory_checked reads them. All steps take a second. The ratio
is total latency by the optimum's (mean with its 95 % interval). Regret is the mean latency above
the optimum's, in steps, as in arXiv 2502.07115. Where an evicted job begins anew, the optimum is a
lower bound. Where it keeps its tokens, an eviction is a free pause, and a ratio may be below 1.
alpha_beta's cleared jobs always begin anew.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from engine_patches.admission import read_admission
from loadgen.report.intervals import estimate
from loadgen.report.origin import Engines, origin
from tests.support.figure_files import write_figures

try:
    from tests.support.hindsight import Job, optimum, policy_engine, total_steps
except ImportError as error:
    sys.exit(
        f"the optimum needs HiGHS ({error}); install it with: pip install highspy "
        "(it is in the extra dev of evenstep)"
    )

CODE = (
    "engine_patches/admission",
    "loadgen/simulator/admission",
    "loadgen/engine",
    "tests/support/hindsight.py",
    "tests/bench/bench_hindsight.py",
)

POLICIES: Mapping[str, Mapping[str, object]] = {
    "off": {"policy": "off"},
    "headroom": {"policy": "headroom"},
    "wait": {"policy": "wait"},
    "nested_wait": {"policy": "nested_wait"},
    "memory_checked": {"policy": "memory_checked"},
    "memory_checked, no ageing": {"policy": "memory_checked", "ageing": 0.0},
    "alpha_beta": {"policy": "alpha_beta"},
}


@dataclass(frozen=True, slots=True)
class Family:
    """Instances of one kind, by ranges drawn from evenly; both ends included.

    Attributes:
        jobs: how many.
        last_arrival: jobs arrive in the steps from 0 to this one.
        prompt_tokens, output_tokens: of each job.
        kv_tokens: memory.
    """

    name: str
    jobs: tuple[int, int]
    last_arrival: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    kv_tokens: tuple[int, int]

    def draw(self, seed: int) -> tuple[list[Job], int]:
        """Jobs and memory."""
        rng = np.random.default_rng(seed)
        count, kv_tokens = (rng.integers(*each, endpoint=True) for each in self._sizes)
        arrived = rng.integers(0, self.last_arrival, count, endpoint=True)
        prompts = rng.integers(*self.prompt_tokens, count, endpoint=True)
        outputs = rng.integers(*self.output_tokens, count, endpoint=True)
        rows = np.stack([np.sort(arrived), prompts, outputs], axis=1)
        return [Job(*row) for row in rows.tolist()], int(kv_tokens)

    @property
    def _sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self.jobs, self.kv_tokens


FAMILIES = (
    Family("at once, s = 1", (5, 9), 0, (1, 1), (1, 8), (9, 18)),
    Family("at once", (5, 9), 0, (1, 4), (1, 8), (12, 20)),
    Family("over time", (6, 10), 12, (1, 4), (1, 8), (12, 16)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One instance: its optimum, and each policy's total by eviction and name."""

    seed: int
    jobs: Sequence[Job]
    kv_tokens: int
    least: int
    totals: Mapping[str, Mapping[str, int]]


def outcome(family: Family, seed: int) -> Outcome:
    jobs, kv_tokens = family.draw(seed)
    totals = {}
    for eviction in ("restart", "keep"):
        totals[eviction] = {
            name: total_steps(
                policy_engine(
                    read_admission(settings), kv_tokens, restart=eviction == "restart", seed=seed
                ),
                jobs,
            )
            for name, settings in POLICIES.items()
        }
    return Outcome(seed, jobs, kv_tokens, optimum(jobs, kv_tokens).total_steps, totals)


def half_width(values: Sequence[float]) -> float:
    width = estimate(values).half_width
    assert width is not None, "of two or more"
    return width


def figures(outcomes: Sequence[Outcome], eviction: str, name: str) -> dict[str, Any]:
    totals = [each.totals[eviction][name] for each in outcomes]
    ratios = [total / each.least for total, each in zip(totals, outcomes, strict=True)]
    regrets = [
        (total - each.least) / len(each.jobs) for total, each in zip(totals, outcomes, strict=True)
    ]
    worst = outcomes[int(np.argmax(ratios))]
    return {
        "ratio_mean": round(fmean(ratios), 4),
        "ratio_half_width": round(half_width(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "regret_mean_steps": round(fmean(regrets), 4),
        "optimal_share": fmean(ratio == 1 for ratio in ratios),
        "below_share": fmean(ratio < 1 for ratio in ratios),
        "worst_seed": worst.seed,
    }


def measured(family: Family, instances: int) -> dict[str, Any]:
    outcomes = [outcome(family, seed) for seed in range(instances)]
    latencies = [each.least / len(each.jobs) for each in outcomes]
    unhurried = [sum(job.output_tokens for job in each.jobs) == each.least for each in outcomes]
    return {
        **asdict(family),
        "seeds": [0, instances - 1],
        "instances": instances,
        "optimum_latency_mean_steps": round(fmean(latencies), 4),
        "optimum_without_waiting_share": fmean(unhurried),
        "policies": {
            name: {
                "settings": dict(settings),
                **{kind: figures(outcomes, kind, name) for kind in ("restart", "keep")},
            }
            for name, settings in POLICIES.items()
        },
    }


def theorem_4_2() -> list[dict[str, Any]]:
    """Exact optimality, which section 4 of arXiv 2502.07115 claims for requests all at once.

    By its (1) a request holds s, s + 1, …, s + o and has a latency of o: one token and one step
    more on the engine. By its Appendix B.1, and on the engine, it holds s, …, s + o - 1.
    """
    mc_sf = read_admission(POLICIES["memory_checked, no ageing"])
    instances = []
    for convention, outputs, kv_tokens, more in (
        ("(1): s to s + o", (3, 3, 4, 5, 6), 11, 1),
        ("B.1, the engine: s to s + o - 1", (3, 3, 4, 5, 6), 11, 0),
        ("B.1, the engine: s to s + o - 1", (2, 2, 3, 3), 4, 0),
    ):
        jobs = [Job(0, 1, output + more) for output in outputs]
        total = total_steps(policy_engine(mc_sf, kv_tokens, restart=True), jobs)
        instances.append(
            {
                "convention": convention,
                "s": 1,
                "o": outputs,
                "M": kv_tokens,
                "mc_sf": total - more * len(jobs),
                "optimum": optimum(jobs, kv_tokens).total_steps - more * len(jobs),
            }
        )
    return instances


def table(family: Mapping[str, Any]) -> str:
    waits = 1 - family["optimum_without_waiting_share"]
    lines = [
        f"\n{family['name']}: {family['instances']} instances, mean latency of the optimum "
        f"{family['optimum_latency_mean_steps']:.2f} steps, somebody waits in {waits:.0%}",
        f"{'':27}{'evicted: begins anew':>30}{'evicted: keeps its tokens':>49}",
        f"{'policy':27}{'mean':>8}{'':6}{'max':>8}{'regret':>10}{'optimal':>10}"
        f"{'mean':>10}{'max':>8}{'min':>8}{'below 1':>10}",
    ]
    for name, row in family["policies"].items():
        anew, keep = row["restart"], row["keep"]
        lines.append(
            f"{name:27}{anew['ratio_mean']:8.3f} ±{anew['ratio_half_width']:.2f}"
            f"{anew['ratio_max']:8.2f}{anew['regret_mean_steps']:10.2f}{anew['optimal_share']:10.0%}"
            f"{keep['ratio_mean']:10.3f}{keep['ratio_max']:8.2f}{keep['ratio_min']:8.2f}"
            f"{keep['below_share']:10.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the tables, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=200, help="of each family")
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    options = parser.parse_args()
    if options.instances < 2:
        parser.error("--instances must be at least 2: one instance has no interval")
    theorem = theorem_4_2()
    print("Theorem 4.2 of arXiv 2502.07115, exact optimality of MC-SF with all requests at once:")
    for each in theorem:
        verdict = "optimal" if each["mc_sf"] == each["optimum"] else "not optimal"
        print(
            f"s = 1, o = {each['o']}, M = {each['M']}, memory by {each['convention']}: "
            f"MC-SF {each['mc_sf']}, optimum {each['optimum']}: {verdict}"
        )
    families = []
    for family in FAMILIES:
        families.append(measured(family, options.instances))
        print(table(families[-1]), flush=True)
    if options.json:
        kept = {"theorem_4_2": theorem, "families": families}
        write_figures(options.json, kept, origin(Engines.SIMULATED, CODE))


if __name__ == "__main__":
    main()
