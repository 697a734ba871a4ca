"""Policies on workers of three speeds: over real HTTP, and in virtual time on the same requests.

    python tests/bench/bench_unequal_workers.py [--loads .5,.7,.9] [--requests 1000] [--seeds 1]
        [--jobs 2] [--json FILE]

Three emulated workers of 4 slots, relative speeds 0.25, 1 and 0.5; Poisson arrivals, exponential
lengths, mean 0.5 s on the fastest. jffc holds requests back, the others send each on arrival.
"""

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from tests.support.figure_files import write_figures
from tests.support.unequal import RULES, Response, Rule, out_of_order, respond

CODE = (
    *(*SERVING, *EMULATION, "loadgen/chains", "loadgen/replay", "tests/support/unequal.py"),
    "tests/bench/bench_unequal_workers.py",
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--loads", default=".5,.7,.9")
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--json", type=Path, help="file for what was measured")
    given = options.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for load in map(float, given.loads.split(",")):
        print(f"\nload {load:g}, {given.requests} requests, mean response time in s\n")
        print("| policy | simulated | live | live / simulated |\n|---|---|---|---|", flush=True)
        responses = of_load(load, given.requests, given.seeds, given.jobs)
        found[f"{load:g}"] = {
            str(each.rule): [round(each.live_s, 4), round(each.simulated_s, 4)]
            for each in responses
        }
        for each in sorted(responses, key=lambda each: each.simulated_s):
            print(
                f"| {each.rule} | {each.simulated_s:.3f} | {each.live_s:.3f} | "
                f"{each.live_s / each.simulated_s:.3f} |"
            )
        print(
            f"\nmore than 3 % apart and in another order: {out_of_order(responses, 0.03) or 'none'}"
        )
        if given.json:
            figures = {
                "requests": given.requests,
                "seeds": given.seeds,
                "live_and_simulated_s": found,
            }
            write_figures(given.json, figures, origin(Engines.EMULATED, CODE))


def of_load(load: float, requests: int, seeds: int, jobs: int) -> list[Response]:
    """Each rule's means over the seeds."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def run(rule: Rule, seed: int) -> Response:
            return respond(rule, load, requests, seed, Path(folder) / f"{rule}-{seed}")

        runs = {rule: [pool.submit(run, rule, seed) for seed in range(seeds)] for rule in RULES}
        return [
            Response(
                rule,
                fmean(each.result().simulated_s for each in done),
                fmean(each.result().live_s for each in done),
            )
            for rule, done in runs.items()
        ]


if __name__ == "__main__":
    main()
