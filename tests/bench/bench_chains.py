"""Policies on chains of unequal servers, over load: response times, paired differences, bounds.

    python tests/bench/bench_chains.py [--requests 20000] [--repeats 10] [--rate 0.8]
        [--json FILE]

BLOOM-176B on 20 servers, Poisson arrivals, exponential work. Prints the requests simulated in a
second; policies over load in both forms of dispatch; the draw of servers, rate and load in which
another policy is fastest against jffc; placements side by side; and the best number of reserved
slots by simulation and by the lower bound.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from loadgen.chains.chain_simulation import simulate_chains
from loadgen.chains.chains_config import Allocation, Blocks, ChainsOptions
from loadgen.chains.chains_results import ChainsResult, compare
from loadgen.chains.work import draw_work
from loadgen.report.origin import Engines, origin
from router.core.errors import EvenstepError
from router.core.placement.model import total_rate
from router.core.placement.tuning import compose
from router.core.types import Dispatch
from tests.support.figure_files import write_part

CODE = ("loadgen/chains", "router/core/placement", "tests/bench/bench_chains.py")
POLICIES = ("jffc", "sed", "sa_jsq", "jsq", "jiq")
LOADS = [tenth / 10 for tenth in range(1, 10)]


def over_load(config: ChainsOptions) -> dict[str, Any]:
    """How much slower than jffc each policy is (95 % intervals)."""
    kept: dict[str, Any] = {}
    print("load  jffc, s (95 %)   bounds, s       slower than jffc, %: at once / from one queue")
    for load in LOADS:
        forms = [compare(replace(config, load=load, dispatch=form)) for form in Dispatch]
        pool, instant = forms
        jffc, bounds = pool.policies[0].mean, pool.bounds
        assert bounds is not None
        others = ", ".join(
            f"{policy} {slower(instant, at)} / {slower(pool, at)}"
            for at, policy in enumerate(POLICIES)
            if at
        )
        kept[f"{load:g}"] = {
            "jffc_s": [jffc.mean, jffc.half_width],
            "bounds_s": [bounds.lower_s, bounds.upper_s],
            "slower": {
                policy: {
                    form.value: share(result, at)
                    for form, result in zip(Dispatch, forms, strict=True)
                }
                for at, policy in enumerate(POLICIES)
                if at
            },
        }
        print(
            f"{load:.1f}  {jffc.mean:6.3f} +- {jffc.half_width or 0:.3f}  "
            f"{bounds.lower_s:.3f}..{bounds.upper_s:.3f}  {others}"
        )
    return kept


def share(result: ChainsResult, at: int) -> list[float]:
    """By which a policy is slower than the first, and half of its interval."""
    against = result.against_first(result.policies[at])
    return [against.mean, against.half_width or 0.0]


def slower(result: ChainsResult, at: int) -> str:
    """Than the first policy, in percent."""
    against = result.against_first(result.policies[at])
    return f"{100 * against.mean:.2f} +- {100 * (against.half_width or 0):.2f}"


def worst(config: ChainsOptions) -> dict[str, Any]:
    """The fastest rival of jffc, over servers, planned rates and loads."""
    found, outside = [], 0
    for seed, rate, load in product(range(4), (0.4, 0.8, 1.2), LOADS):
        result = compare(
            replace(
                config,
                policy="jffc,sed,sa_jsq",
                seed=seed,
                rate=rate,
                load=load,
                dispatch=Dispatch.INSTANT,
            )
        )
        jffc, bounds = result.policies[0].mean, result.bounds
        assert bounds is not None
        margin_s = jffc.half_width or 0.0
        outside += not bounds.lower_s - margin_s <= jffc.mean <= bounds.upper_s + margin_s
        found += [
            (result.against_first(other).mean, other.policy, seed, rate, load)
            for other in result.policies[1:]
        ]
    least, policy, seed, rate, load = min(found)
    print(
        f"{len(found) // 2} cases: jffc outside its bounds in {outside}; at most "
        f"{-least:.2%} slower than another: {policy}, seed {seed}, {rate:g}/s, load {load:g}"
    )
    return {"cases": len(found) // 2, "outside": outside, "least": least, "policy": policy}


def speeds(config: ChainsOptions) -> dict[str, Any]:
    """Simulated requests per second of wall clock."""
    servers = config.deployment.drawn(0)
    chains = compose(config.deployment.model, servers, config.planned_rate).overlapping
    work = draw_work(0.7 * total_rate(chains), 200_000, 0)
    kept = {}
    for policy in POLICIES:
        begun_s = time.perf_counter()
        simulate_chains(chains, policy, work)
        per_s = len(work.size) / (time.perf_counter() - begun_s)
        print(f"{policy:8} {per_s:12,.0f} requests/s simulated")
        kept[policy] = round(per_s)
    return kept


def placements(config: ChainsOptions) -> dict[str, Any]:
    """The same requests on each placement."""
    kept: dict[str, Any] = {}
    for servers in (10, 20, 40):
        line, means_s = [], {}
        for blocks in (Blocks.GBP_CR, Blocks.PETALS, Blocks.BPRR):
            one = replace(config, servers=servers, placement=blocks, policy="jffc", rate=0.2)
            try:
                means_s[str(blocks)] = compare(one).policies[0].mean.mean
                line.append(f"{blocks} {means_s[str(blocks)]:.2f} s")
            except EvenstepError as error:
                line.append(f"{blocks}: {error}")
        print(f"{servers} servers: {', '.join(line)}")
        kept[str(servers)] = means_s
    return kept


def reserved(config: ChainsOptions) -> dict[str, Any]:
    """Best number of reserved slots by simulation, and the chosen one."""
    kept = {}
    for rate in (0.2, 0.4, 0.6, 0.8, 1.0):
        one = replace(config, rate=rate, policy="jffc", allocation=Allocation.GCA)
        chosen = compare(one)
        found = {}
        for count in range(1, 25):
            try:
                found[count] = compare(replace(one, reserved=count)).policies[0].mean.mean
            except EvenstepError:
                break
        best = min(found, key=found.__getitem__)
        mean_s = chosen.policies[0].mean.mean
        print(
            f"{rate:g}/s: best c {best} ({found[best]:.3f} s), by the lower bound "
            f"{chosen.composed.reserved_slots} ({mean_s:.3f} s, {mean_s / found[best] - 1:+.2%})"
        )
        kept[f"{rate:g}"] = {"chosen_s": mean_s, "best_s": found[best]}
    return kept


PARTS: dict[str, Callable[[ChainsOptions], dict[str, Any]]] = {
    "speeds": speeds,
    "over load": over_load,
    "worst": worst,
    "placements": placements,
    "reserved": reserved,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    parser.add_argument("--json", type=Path, help="file; takes a part for each")
    given = parser.parse_args()
    config = ChainsOptions(
        policy=",".join(POLICIES),
        rate=given.rate,
        requests=given.requests,
        warmup=given.requests // 10,
        repeats=given.repeats,
    )
    for name in PARTS if given.only is None else (given.only,):
        found = PARTS[name](config)
        if given.json:
            part = {"requests": given.requests, "repeats": given.repeats, "found": found}
            write_part(given.json, name, part, origin(Engines.SIMULATED, CODE))


if __name__ == "__main__":
    main()
