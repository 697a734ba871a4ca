"""Requests of a simulation of whole engines: when they come, and which prompts they share."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.traces.request_classes import RequestClass, deal
from loadgen.traces.trace_files import TraceRequest


@dataclass(slots=True, eq=False)
class Turn:
    """One request."""

    number: int
    prompt_tokens: int
    output_tokens: int
    # None until the answer that it waits for has ended, or with closed clients any.
    arrival_s: float | None
    # Ids of its full blocks of known content: the prompt, and with sessions as much of the answer
    # as the next turn repeats.
    chain: Sequence[Hashable]
    class_: RequestClass
    think_s: float = 0.0  # from that answer's end to its arrival
    following: list[Turn] = field(default_factory=list)  # turns that wait for its answer


def turns_of(config: ServingConfig) -> list[Turn]:
    """The requests; the same configuration, whatever the policy, gives the same ones."""
    rows = config.rows
    classes = deal(config.classes, len(rows), config.seed)
    turns = [
        Turn(n, row.prompt_tokens, row.output_tokens, None, _chain(config, row), class_)
        for n, (row, class_) in enumerate(zip(rows, classes, strict=True))
    ]
    if config.think is not None:
        rng = random.Random(f"think {config.seed}")
        waits_s = [rng.expovariate(1) * config.think for _ in rows]
        for before, after in _continued(rows):
            turns[before].following.append(turns[after])
            turns[after].think_s = waits_s[after]
            answered = turns[before].prompt_tokens + turns[before].output_tokens
            turns[before].chain = _chain(config, replace(rows[after], prompt_tokens=answered))
    waiting = {turn.number for before in turns for turn in before.following}
    first = [turn for turn in turns if turn.number not in waiting]
    if config.arrivals.kind == "closed":
        first = turns[: int(config.arrivals.value)]
    for turn, at_s in zip(first, _times(config, [rows[t.number] for t in first]), strict=True):
        turn.arrival_s = at_s
    return turns


def _times(config: ServingConfig, rows: Sequence[TraceRequest]) -> list[float]:
    if config.arrivals.kind == "trace":
        return [(row.arrival_s or 0.0) * config.arrivals.value for row in rows]
    if config.arrivals.kind == "closed":
        return [0.0] * len(rows)
    rng = random.Random(config.seed)
    return list(accumulate(rng.expovariate(config.arrivals.value) for _ in rows))


def _chain(config: ServingConfig, row: TraceRequest) -> Sequence[Hashable]:
    """Ids of a prompt's full blocks, from the trace's ids of larger ones."""
    parts = range(row.block_tokens // config.block_tokens)
    return list(product(row.blocks, parts))[: row.prompt_tokens // config.block_tokens]


def _continued(rows: Sequence[TraceRequest]) -> Iterator[tuple[int, int]]:
    """Pairs of a request and the one that continues it.

    A prompt continues the latest request whose full blocks it begins with, if it is longer than
    that one's prompt and answer. Each request is continued once.
    """
    latest: dict[int, int] = {}  # by the last full block, which stands for all before it
    for number, row in enumerate(rows):
        full = row.blocks[: row.prompt_tokens // row.block_tokens]
        for id_ in reversed(full):
            before = latest.get(id_)
            if before is None:
                continue
            whole = rows[before].prompt_tokens + rows[before].output_tokens
            if whole < row.prompt_tokens:
                yield before, number
                del latest[id_]
                break
        if full:
            latest[full[-1]] = number
