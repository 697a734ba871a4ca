"""What the router does to one engine: the prompt budget, without and with it, and prefix hits.

Requests come from ``evenstep replay``, through a router, in a closed loop. No two prompts begin
alike, but for the turns of a conversation.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from loadgen.traces.trace_files import BLOCK_TOKENS
from router.core.types import Snapshot
from tests.gpu.parts import Values
from tests.gpu.serving import Engine, Machine
from tests.gpu.steps import NeverSeenError
from tests.support.engine import metric
from tests.support.rank_steps import SnapshotLog
from tests.support.replays import run_replay
from tests.support.server import Server, free_port, running_router, wait_until

WAIT_S, SWITCH_S = 60, 30
WITHOUT, WITH = "without", "with"
TALKS = "conversations"
LATENCIES = (
    *("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"),
    *("median_tpot_ms", "p99_tpot_ms", "p99_itl_ms", "duration"),
)
FIGURES = ("completed", "failed", *LATENCIES)
# What the router counts of prefixes, by a part of its metrics' names.
COUNTED = (
    *("prompt_tokens", "found_tokens", "foretold_tokens", "error_tokens"),
    *("requests", "right_requests"),
)

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent.

    Attributes:
        clients: that wait for their answers.
        requests: of a run, beside the budget; one of ``every`` is a long prompt with an answer of
            one token, so that TPOT is that of the others.
        short, long: tokens of their prompts.
        answer: tokens of the others' answers.
        pairs: of runs without and with the budget.
        talks, turns: conversations, and requests of each. A turn repeats what the one before asked.
        added: blocks of 512 tokens by which each turn is longer than the one before.
        question: tokens after these that no other turn repeats.
    """

    clients: int = 32
    requests: int = 120
    every: int = 8
    short: int = 512
    long: int = 8192
    answer: int = 150
    pairs: int = 2
    talks: int = 40
    turns: int = 4
    added: int = 2
    question: int = 100


SMALL = Traffic(
    clients=6, requests=40, short=64, long=2000, answer=24, talks=12, turns=3, added=1, question=40
)


def names(traffic: Traffic) -> list[str]:
    """Runs without and with the budget; each is the first of its pair in turn."""
    pairs = ((WITHOUT, WITH) if n % 2 else (WITH, WITHOUT) for n in range(1, traffic.pairs + 1))
    return [f"{n} {how}" for n, pair in enumerate(pairs, 1) for how in pair]


@contextlib.contextmanager
def routed(where: Machine, engine: Engine) -> Iterator[tuple[Server, str]]:
    """A router before the engine, and the URL of its settings."""
    admin = free_port()
    worker = f"--worker={engine.server.url},snapshots={engine.endpoint}"
    # One worker leaves no choice, and this policy takes no time to compile.
    flags = ("--policy", "least_tokens", "--admin-port", str(admin))
    with running_router(where.folder, worker, *flags) as router:
        wait_known(router)
        yield router, f"http://127.0.0.1:{admin}/settings"


def wait_known(router: Server) -> None:
    """Wait until the router hears every worker of its only group."""

    def all_known() -> bool:
        (group,) = router.get("/health").json()["groups"].values()
        return all(worker["up"] and worker["snapshots"] == "fresh" for worker in group["workers"])

    wait_until(all_known, WAIT_S, "all workers are known")


def replayed(
    where: Machine, router: Server, log: SnapshotLog, traffic: Traffic, rows: Sequence[object]
) -> dict[str, Any]:
    """Send the rows of a trace; what the clients have measured."""
    trace = where.folder / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log.drop()
    ended = log.ended
    flags = ("--trace", str(trace), "--arrivals", f"closed:{traffic.clients}", "--reveal-lengths")
    report = run_replay(router.url, where.folder / "replay.json", *flags)
    log.rest(ended + report["completed"])
    return report


def row(ids: Sequence[int], prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A request as Mooncake's traces have it: which blocks its prompt begins with."""
    lengths = {"input_length": prompt_tokens, "output_length": output_tokens}
    return {"timestamp": 0, **lengths, "hash_ids": list(ids)}


# --- the prompt budget ----------------------------------------------------------------------------


def prompt_budgets(
    where: Machine, engine: Engine, log: SnapshotLog, traffic: Traffic, wanted: Iterable[str]
) -> Iterator[tuple[str, Values]]:
    """Runs without and with ``--prompt-budget auto``, by one router that knows the steps' cost.

    Raises:
        NeverSeenError: no budget came into force, or one did not end.
    """
    with routed(where, engine) as (router, settings):
        replayed(where, router, log, traffic, mixture(traffic))
        for name in wanted:
            switch(settings, engine, log, name.partition(" ")[2])
            report = replayed(where, router, log, traffic, mixture(traffic))
            yield name, {**{key: report[key] for key in FIGURES}, **bounds(log.snapshots[0])}


def switch(settings: str, engine: Engine, log: SnapshotLog, how: str) -> None:
    """Change the router's budget, and wait until it bounds steps or, once its lease ends, none."""
    # An engine alone has a budget only for a target; this one no step misses.
    wanted = ("auto", 60.0) if how == WITH else ("off", None)
    asked = dict(zip(("prompt_budget", "target_tpot_s"), wanted, strict=True))
    httpx.patch(settings, json=asked, timeout=WAIT_S).raise_for_status()

    def seen() -> bool:
        engine.decode_together(1, 16, 2)
        return bool(log.snapshots[0][-1].prompt_budget) == (how == WITH)

    try:
        wait_until(seen, SWITCH_S, f"a step {how} the budget")
    except TimeoutError as error:
        raise NeverSeenError(str(error)) from None


def mixture(traffic: Traffic) -> list[dict[str, Any]]:
    """Short prompts with answers, and long ones among them."""
    return [
        row([next(_ids)], traffic.long, 1)
        if number % traffic.every == 0
        else row([next(_ids)], traffic.short, traffic.answer)
        for number in range(1, traffic.requests + 1)
    ]


def bounds(told: Sequence[Snapshot]) -> dict[str, Any]:
    """What prompts had of the steps that computed some; a budget of 0 is none."""
    steps = [one for one in told if one.step_s and one.scheduled_prefill_tokens]
    return {
        "steps_with_prompts": len(steps),
        "bounded_steps": sum(bool(one.prompt_budget) for one in steps),
        "steps_above_budget": sum(
            0 < (one.prompt_budget or 0) < one.scheduled_prefill_tokens for one in steps
        ),
        "median_budget_tokens": statistics.median(one.prompt_budget or 0 for one in steps),
        "most_prompt_tokens": max(one.scheduled_prefill_tokens for one in steps),
        "longest_step_s": max(one.step_s for one in steps),
    }


def budget_figures(runs: Mapping[str, Values]) -> dict[str, Any] | None:
    """Medians of each figure, and of its ratio in pairs; None before the first whole pair."""
    pairs = [
        (run, runs[f"{number} {WITH}"])
        for number, _, how in (name.partition(" ") for name in runs)
        if how == WITHOUT and f"{number} {WITH}" in runs
        for run in (runs[f"{number} {WITHOUT}"],)
    ]
    if not pairs:
        return None
    return {
        "pairs": len(pairs),
        **{
            key: {
                WITHOUT: statistics.median(without[key] for without, _ in pairs),
                WITH: statistics.median(bounded[key] for _, bounded in pairs),
                "ratio": statistics.median(b[key] / without[key] for without, b in pairs),
            }
            for key in LATENCIES
        },
    }


# --- prefix hits ----------------------------------------------------------------------------------


def prefix_hits(
    where: Machine, engine: Engine, log: SnapshotLog, traffic: Traffic, wanted: Iterable[str]
) -> Iterator[tuple[str, Values]]:
    """What the router foretells of conversations, beside what the engine finds in its cache."""
    for name in wanted:
        with routed(where, engine) as (router, _):
            before = vllm_counts(engine)
            report = replayed(where, router, log, traffic, conversations(traffic))
            asked, hit = (b - a for a, b in zip(before, vllm_counts(engine), strict=True))
            counted = router_counts(router, report["completed"])
        yield (
            name,
            {
                **{key: report[key] for key in FIGURES},
                **counted,
                "vllm_prompt_tokens": asked,
                "vllm_found_tokens": hit,
                "repeated_tokens": repeated(traffic),
                "found_share": hit / asked,
                "foretold_by_found": counted["foretold_tokens"] / hit if hit else None,
            },
        )


def router_counts(router: Server, requests: int) -> dict[str, int]:
    """What it foretold and was then told, once that is known of so many requests."""

    def counted(what: str) -> int:
        return int(metric(router, f"evenstep_prefix_{what}_total"))

    wait_until(lambda: counted("requests") >= requests, WAIT_S, "all requests were compared")
    return {what: counted(what) for what in COUNTED}


def conversations(traffic: Traffic) -> list[dict[str, Any]]:
    """The first turns of all, then the second ones, and so on."""
    ids = [[next(_ids) for _ in range(traffic.turns * traffic.added)] for _ in range(traffic.talks)]
    lengths = [turn * traffic.added for turn in range(1, traffic.turns + 1)]
    return [
        row(talk[:blocks], blocks * BLOCK_TOKENS + traffic.question, traffic.answer)
        for blocks in lengths
        for talk in ids
    ]


def repeated(traffic: Traffic) -> int:
    """Prompt tokens that an earlier turn had: what a cache that forgets nothing would find."""
    blocks = traffic.added * sum(range(traffic.turns))
    return traffic.talks * blocks * BLOCK_TOKENS


def vllm_counts(engine: Engine) -> tuple[int, int]:
    """Prompt tokens that were looked up in the cache, and those found."""
    queries, hits = (
        int(metric(engine.server, f"vllm:prefix_cache_{what}_total"))
        for what in ("queries", "hits")
    )
    return queries, hits
