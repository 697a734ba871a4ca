"""What a key waits in the router beside another one that sends twenty times as many requests.

    python tests/bench/bench_fair_share.py [--repeats 3] [--seconds 60] [--json FILE]

4 emulated workers x 4 slots behind `evenstep serve`, policy bfio, a pool of 128. A request takes
0.5 to 1.5 s, so 16 a second can be served. Runs take turns: the slower key alone, both keys, and
both without keys.

bursts: the slower key sends 24 requests at once every 10 s, so it waits even alone; the other one
sends 48 a second (Poisson), three times the capacity. Limit: the slower key's p99 queue time is at
most twice that alone.

single: one a second, which alone never waits, and twenty; no limit.

Queue times come from the router's recording; prompt lengths tell the keys apart there.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from loadgen.traces.recordings import load_recording
from router.engines.http_client import HttpClient, bearer
from tests.support.figure_files import write_figures
from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import running_router, wait_until

CODE = (*SERVING, *EMULATION, "router/access", "tests/bench/bench_fair_share.py")

FLEET = ("--workers", "4", "--slots", "4", "--step-time", "5e-2,1e-8")
STEP_S = 0.05
STEPS = (10, 30)
ROUTER = ("--pool-size", "128", "--log-level", "warning")
TIMES = 20
# By these the recording tells them apart.
PROMPTS = {"slow": 100, "fast": 200}
KEYS = {"slow": "sk-slow-0123456789", "fast": "sk-fast-0123456789"}


@dataclass(frozen=True)
class Case:
    """The slower key's batches."""

    batch: int
    every_s: float


CASES = {"bursts": Case(24, 10.0), "single": Case(1, 1.0)}


def times(case: Case, seconds: float, seed: int, *, fast: bool) -> list[tuple[float, str]]:
    """When each request is sent, and whose it is."""
    chance = random.Random(seed)
    batches = int(seconds / case.every_s)
    sent = [((i + 0.5) * case.every_s, "slow") for i in range(batches) for _ in range(case.batch)]
    now_s = 0.0
    while (
        fast and (now_s := now_s + chance.expovariate(TIMES * case.batch / case.every_s)) < seconds
    ):
        sent.append((now_s, "fast"))
    return sorted(sent)


@dataclass
class Sent:
    """Answers by status, and lateness of the sendings."""

    answers: Counter[tuple[str, int]]
    late_s: list[float]


async def send(url: str, planned: Sequence[tuple[float, str]], seed: int) -> Sent:
    """Send requests at their times."""
    chance, sent, http = random.Random(seed), Sent(Counter(), []), HttpClient(10.0)

    async def ask(whose: str, steps: int) -> None:
        prompt = [7] * PROMPTS[whose]
        body = json.dumps({"prompt": prompt, "max_tokens": steps, "ignore_eos": True}).encode()
        headers = [(b"content-type", b"application/json"), *bearer(KEYS[whose])]
        answer = await http.request("POST", url, "/v1/completions", headers, body)
        await answer.read()
        sent.answers[whose, answer.status] += 1

    async with asyncio.TaskGroup() as asked:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        for at_s, whose in planned:
            await asyncio.sleep(max(0.0, began_s + at_s - clock()))
            sent.late_s.append(clock() - began_s - at_s)
            asked.create_task(ask(whose, chance.randint(*STEPS)))
    await http.aclose()
    return sent


def run(case: Case, seconds: float, seed: int, *, fast: bool, keys: bool) -> dict[str, Any]:
    """One run: queue times of each key, and how its requests were answered."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recording, file = folder / "run.jsonl", folder / "keys"
        file.write_text("".join(f"{whose} {key}\n" for whose, key in KEYS.items()))
        guarded = ("--api-key-file", str(file)) if keys else ()
        flags = (*ROUTER, *guarded, "--record", str(recording))
        with (
            running_fleet(folder, *FLEET) as fleet,
            running_router(folder, *flags, *worker_flags(fleet)) as router,
        ):
            wait_until(lambda: router.get("/health").is_success, 60, "workers are up")
            sent = asyncio.run(send(router.url, times(case, seconds, seed, fast=fast), seed))
        waited, answers = waits(recording), sent.answers
    by_key = {
        whose: {
            "requests": sum(n for (each, _), n in answers.items() if each == whose),
            "answers": {str(status): n for (each, status), n in answers.items() if each == whose},
            **told(waited[whose]),
        }
        for whose in (("slow", "fast") if fast else ("slow",))
    }
    late_s = sorted(sent.late_s)[int(0.99 * len(sent.late_s))]
    return {**by_key, "sent_late_p99_s": round(late_s, 4)}


def waits(recording: Path) -> dict[str, list[float]]:
    """Queue times in seconds of dispatched requests, by key."""
    whose = {tokens: name for name, tokens in PROMPTS.items()}
    found: dict[str, list[float]] = {name: [] for name in PROMPTS}
    for request in load_recording(recording).requests:
        if request.dispatched_s is not None:
            found[whose[request.prompt_tokens]].append(request.dispatched_s - request.arrival_s)
    return found


def told(waited: list[float]) -> dict[str, float]:
    ordered = sorted(waited)
    return {
        "sent_to_workers": len(ordered),
        "queue_p50_s": round(median(ordered), 4),
        "queue_mean_s": round(fmean(ordered), 4),
        "queue_p99_s": round(ordered[int(0.99 * len(ordered))], 4),
    }


def measured(case: Case, repeats: int, seconds: float) -> dict[str, Any]:
    """All runs of a case; the ratio is of medians."""
    runs: dict[str, list[dict[str, Any]]] = {"alone": [], "both": [], "without_keys": []}
    for seed in range(repeats):
        for name, taken in runs.items():
            fast, keys = name != "alone", name != "without_keys"
            taken.append(run(case, seconds, seed, fast=fast, keys=keys))
            print(name, seed, json.dumps(taken[-1]), flush=True)
    p99_s = {
        name: median(each["slow"]["queue_p99_s"] for each in taken) for name, taken in runs.items()
    }
    ratios = [
        round(both["slow"]["queue_p99_s"] / alone["slow"]["queue_p99_s"], 3)
        for alone, both in zip(runs["alone"], runs["both"], strict=True)
        if alone["slow"]["queue_p99_s"] > STEP_S
    ]
    return {
        "batch": case.batch,
        "every_s": case.every_s,
        "slow_queue_p99_s": p99_s,
        "ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "runs": runs,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    figures = {
        "times": TIMES,
        "fleet": " ".join(FLEET),
        "router": " ".join(ROUTER),
        "output_tokens": STEPS,
        "seconds": given.seconds,
        **{name: measured(case, given.repeats, given.seconds) for name, case in CASES.items()},
    }
    print(json.dumps(figures, indent=1))
    if given.json is not None:
        write_figures(
            given.json, figures, origin(Engines.EMULATED, CODE, EmulatorSettings().described())
        )


if __name__ == "__main__":
    main()
