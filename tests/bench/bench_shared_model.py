"""Tokens per second of one model on one group of ranks, and on three.

    python tests/bench/bench_shared_model.py [--seconds 20] [--runs 3]

Emulated engines over real HTTP: groups of 8 ranks in lockstep, 8 slots each, steps of 0.1 s or more
by their load. Half as many requests again as there are slots are always under way; answers come
whole. Runs take turns. The client's lateness is the longest that its event loop stood still.
"""

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import httpx

from tests.support.fleet import running_fleet
from tests.support.server import Server, running_router, wait_until

RANKS, SLOTS = 8, 8
FLEET = ("--workers", str(RANKS), "--slots", str(SLOTS), "--step-time", "0.1,1e-6")
WARMUP_S = 8.0


def tokens(router: Server) -> dict[str, float]:
    """Output tokens that workers decoded, by group."""
    rows = re.findall(
        r'^evenstep_output_tokens_total{group="(\w+)",.*} (\S+)$',
        router.get("/metrics").text,
        re.MULTILINE,
    )
    sums: Counter[str] = Counter()
    for group, number in rows:
        sums[group] += float(number)  # type: ignore[assignment]
    return dict(sums)


def up(router: Server) -> int:
    return len(re.findall(r"^evenstep_worker_up{.*} 1", router.get("/metrics").text, re.MULTILINE))


async def load(router: Server, requests: int, seconds: float) -> tuple[dict[str, float], float]:
    """Tokens per second by group, and the client's lateness."""
    rng, late_s = random.Random(0), 0.0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=router.url, timeout=120.0, limits=limits) as http:

        async def client() -> None:
            while True:
                prompt = [rng.randrange(3, 2000)] * rng.randrange(100, 2000)
                body = {"model": "emulated", "prompt": prompt, "ignore_eos": True}
                body["max_tokens"] = rng.randrange(10, 60)
                (await http.post("/v1/completions", json=body)).raise_for_status()

        clients = [asyncio.ensure_future(client()) for _ in range(requests)]
        await asyncio.sleep(WARMUP_S)
        before, began_s = await asyncio.to_thread(tokens, router), time.perf_counter()
        while time.perf_counter() < began_s + seconds:
            slept_s = time.perf_counter()
            await asyncio.sleep(0.05)
            late_s = max(late_s, time.perf_counter() - slept_s - 0.05)
        after, took_s = await asyncio.to_thread(tokens, router), time.perf_counter() - began_s
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return {group: (after[group] - before[group]) / took_s for group in after}, late_s


def measured(groups: str, seconds: float) -> tuple[dict[str, float], float]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = [
            part
            for name in groups
            for spec in stack.enter_context(running_fleet(folder, *FLEET)).workers
            for part in ("--worker", spec.replace("group=default", f"group={name}"))
        ]
        router = stack.enter_context(running_router(folder, *flags, "--log-level", "warning"))
        wait_until(lambda: up(router) == RANKS * len(groups), 60.0, "all workers are up")
        requests = len(groups) * RANKS * SLOTS * 3 // 2
        return asyncio.run(load(router, requests, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[float]] = {"a": [], "abc": []}
    for _ in range(given.runs):
        for groups, rates in found.items():
            by_group, late_s = measured(groups, given.seconds)
            rates.append(sum(by_group.values()))
            shown = {name: round(rate) for name, rate in by_group.items()}
            print(json.dumps({"tokens_per_s": shown, "late_s": round(late_s, 3)}), flush=True)
    ratio = fmean(found["abc"]) / (3 * fmean(found["a"]))
    print(json.dumps({"of_three_times_one": round(ratio, 3)}))


if __name__ == "__main__":
    main()
