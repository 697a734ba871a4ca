"""Requests for a real data-parallel group: alone, heavy beside light, and a trace's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from tests.support.engine import MODEL
from tests.support.moe_lockstep.ranks import SLOTS, Group
from tests.support.moe_lockstep.trace import write_slice
from tests.support.rank_steps import (
    GroupFigures,
    Ranks,
    RankStep,
    group_figures,
    reading,
)
from tests.support.replays import run_replay
from tests.support.server import Server, running_router, wait_until

WAIT_S = 120
CLIENTS = 48
CAP_TOKENS = 128
HEAVY_PROMPT_TOKENS = 7000
ROUTER_KEYS = ("steps", "avg_imbalance_tokens", "mean_load_tokens")
HEAVY_PROMPTS = 3 * SLOTS
HEAVY_STEP_TOKENS = 1500


# --- alone ----------------------------------------------------------------------------------------


def complete(
    url: str, prompt: Sequence[int], max_tokens: int, headers: Mapping[str, str] | None = None
) -> list[int]:
    """Tokens of one answer, the likeliest ones."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    return [int(token) for token in choice["token_ids"]]


def outputs(url: str, headers: Mapping[str, str] | None = None) -> list[list[int]]:
    """Answers to a few prompts, one after the other."""
    return [complete(url, tokens(length), 40, headers) for length in (3, 33, 300)]


def tokens(count: int, first: int = 0) -> list[int]:
    """A prompt; no two of different ``first`` begin alike."""
    return [100 + (first + position * position) % 101 for position in range(count)]


# --- heavy beside light ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Barrier:
    """How long steps took, seconds, means.

    Attributes:
        alone_s: of the light rank, when the other had nothing to compute.
        light_s: of the light rank, in steps in which the other computed long prompts.
        heavy_s: of the heavy rank, in the same steps.
        steps: number of these steps.
    """

    alone_s: float
    light_s: float
    heavy_s: float
    steps: int


def heavy_beside_light(group: Group) -> tuple[Ranks, Barrier]:
    """One rank decodes a single request, at first alone, then while the other has long prompts."""
    heavy, light = (server.url for server in group.servers)
    with reading(group.endpoints) as log, ThreadPoolExecutor(SLOTS) as pool:
        complete(light, tokens(20), 150)
        log.rest(ended=1)
        alone = log.ranks()[1]
        answers = [
            pool.submit(complete, heavy, tokens(HEAVY_PROMPT_TOKENS, first), 2)
            for first in range(HEAVY_PROMPTS)
        ]
        wait_until(lambda: log.snapshots[0][-1].waiting > 0, WAIT_S, "the heavy rank is full")
        complete(light, tokens(20), 100)
        for answer in answers:
            answer.result()
        log.rest(ended=2 + HEAVY_PROMPTS)
        ranks = log.ranks()
    together = both(ranks)
    return ranks, Barrier(
        alone_s=_mean_s(list(alone.values())),
        light_s=_mean_s([light for _, light in together]),
        heavy_s=_mean_s([heavy for heavy, _ in together]),
        steps=len(together),
    )


def both(ranks: Ranks) -> list[tuple[RankStep, RankStep]]:
    """Steps in which the first rank computed long prompts and the second one something too."""
    return [
        (ranks[0][number], ranks[1][number])
        for number in sorted(ranks[0].keys() & ranks[1].keys())
        if ranks[0][number].tokens > HEAVY_STEP_TOKENS
    ]


def overtakings(ranks: Ranks) -> list[int]:
    """Steps that one rank had ended before another one had ended the step before them."""
    numbers = sorted({number for steps in ranks for number in steps})
    return [
        number
        for before, number in pairwise(numbers)
        for steps in ranks
        for others in ranks
        if number in steps and before in others and steps[number].time_s < others[before].time_s
    ]


def _mean_s(steps: Sequence[RankStep]) -> float:
    return fmean(step.step_s for step in steps)


# --- a trace --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """A replay against a group, as its client and as its ranks saw it.

    Attributes:
        report: of ``evenstep replay``.
        figures: over the steps from the warm-up to the last sending.
        whole: over all steps.
        ranks: the steps themselves.
    """

    report: Mapping[str, Any]
    figures: GroupFigures
    whole: GroupFigures
    ranks: Ranks

    @property
    def overtakings(self) -> int:
        """Their number."""
        return len(overtakings(self.ranks))

    def summary(self) -> dict[str, Any]:
        """What is worth keeping."""
        keys = (
            "completed",
            "failed",
            "errors",
            "output_throughput",
            "mean_ttft_ms",
            "mean_tpot_ms",
        )
        cluster = self.report["cluster"]  # None where no router counts
        return {
            **asdict(self.figures),
            **{key: self.report[key] for key in keys},
            "whole": asdict(self.whole),
            "router_whole": cluster and {key: cluster["whole"][key] for key in ROUTER_KEYS},
            "pool_waiting_share": cluster and _share_waiting(cluster["steady"]),
        }


def _share_waiting(window: Mapping[str, Any] | None) -> float | None:
    """Of the steps that the router counted, those with requests waiting in its pool.

    None where the router was too busy to be asked at the window's ends.
    """
    if window is None:
        return None
    return float(window["pool_waiting"]["steps"] / window["steps"])


def replay(url: str, group: Group, folder: Path, requests: int, seed: int) -> Trial:
    """A slice of BurstGPT's lengths from ``CLIENTS`` clients, more than the group has slots."""
    trace = write_slice(folder / f"burstgpt-{seed}.csv", requests, seed)
    flags = ["--trace", str(trace), "--seed", str(seed)]
    flags += ["--arrivals", f"closed:{CLIENTS}", "--max-tokens", str(CAP_TOKENS)]
    with reading(group.endpoints) as log:
        log.rest(ended=0)
        report = run_replay(url, folder / "replay.json", *flags)
        log.rest(ended=report["completed"])
        ranks = log.ranks()
    begin_s = report["start_unix_s"] + report["steady"]["start_s"]
    end_s = begin_s + report["steady"]["duration"]
    return Trial(
        report,
        group_figures(ranks, SLOTS, begin_s, end_s),
        group_figures(ranks, SLOTS, 0.0, math.inf),
        ranks,
    )


@contextlib.contextmanager
def routing(group: Group, folder: Path, *flags: str) -> Iterator[Server]:
    """A router before a group's ranks until the block ends, once it knows them."""
    flags = (*(f"--worker={worker}" for worker in group.workers), *flags)
    with running_router(folder, *flags) as router:
        wait_until(lambda: states(router) == [("fresh", True)] * 2, WAIT_S, "both ranks are known")
        yield router


def states(router: Server) -> list[tuple[str, bool]]:
    """Of each worker: its stream, and whether it may be used."""
    return [(worker["snapshots"], worker["up"]) for worker in workers(router)]


def workers(router: Server) -> list[dict[str, Any]]:
    """What the router says of each worker of its only group."""
    (group,) = router.get("/health").json()["groups"].values()
    found: list[dict[str, Any]] = group["workers"]
    return found
