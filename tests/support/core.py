"""Short ways to make the values that the pure core works on."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import msgspec

from router.core.state.feed import Feed
from router.core.step_time import Work
from router.core.types import (
    DEFAULT_SLOTS,
    Assignment,
    KvGroup,
    Request,
    RunningRequest,
    Snapshot,
    WorkerView,
)


def token(number: int) -> str:
    """A router's token, as it is found again inside engine ids."""
    return f"es-{number:020x}"


def part(number: int, index: int = 0) -> str:
    """The engine's id of one part of a request, as vLLM writes it."""
    return f"{index}_cmpl-{token(number)}-0-1a2b3c4d"


def request(
    number: int, prompt_tokens: int = 100, *, slots: int = 1, priority: int = 0, arrival: float = 0
) -> Request:
    return Request(token(number), "default", prompt_tokens, slots, None, priority, arrival)


def requests(sizes: Iterable[int]) -> list[Request]:
    """One-slot requests of these sizes, in order of arrival."""
    return [request(number, size) for number, size in enumerate(sizes)]


def views(
    loads: Sequence[int], capacity: int | Sequence[int] = 1, counts: Sequence[int] = ()
) -> list[WorkerView]:
    """Workers a, b, c … with these loads."""
    capacities = [capacity] * len(loads) if isinstance(capacity, int) else capacity
    return [
        WorkerView(chr(ord("a") + i), load, counts[i] if counts else 0, capacities[i])
        for i, load in enumerate(loads)
    ]


def running(
    engine_id: str, prompt_tokens: int = 100, generated_tokens: int = 0, prefill_left: int = 0
) -> RunningRequest:
    return RunningRequest(engine_id, prompt_tokens, generated_tokens, 0, prefill_left)


def fed(
    step_tokens: int,
    held_tokens: int,
    running: int = 0,
    asked: Mapping[str, Work] | None = None,
    grown: int = 0,
) -> Feed:
    """A worker's feed after a step: KV tokens in it, and those left after it."""
    return Feed(
        step_load_tokens=step_tokens,
        load_tokens=held_tokens,
        step_running=running,
        step_asked=asked or {},
        step_grown=grown,
    )


def fields_of(told: Snapshot) -> dict[str, Any]:
    """A snapshot's fields as they travel."""
    content: dict[str, Any] = msgspec.to_builtins(told, builtin_types=(bytes,))
    return content


def snapshot(
    kind: Literal["full", "delta"],
    sequence: int,
    *told: RunningRequest,
    step: int | None = None,
    epoch: str = "e1",
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
    waiting: int = 0,
    slots: int = DEFAULT_SLOTS,
    power_w: float | None = None,
    step_s: float = 0.0,
    decoded: int = 0,
) -> Snapshot:
    """A snapshot whose step is its sequence, unless said otherwise."""
    return Snapshot(
        kind,
        "default",
        "a",
        0,
        epoch,
        sequence,
        sequence if step is None else step,
        0.0,
        step_s,
        running=told,
        finished=finished,
        preempted=preempted,
        waiting=waiting,
        slots=slots,
        power_w=power_w,
        scheduled_decode_tokens=decoded,
    )


LARGE_SNAPSHOT = Snapshot(
    "full",
    "group",
    "worker",
    3,
    "epoch",
    7,
    9,
    1.5,
    0.01,
    running=(RunningRequest("x", 10, 2, 4, 1, 0.25), running(part(1))),
    finished=("y",),
    preempted=("z",),
    waiting=2,
    waiting_tokens=30,
    slots=8,
    kv_groups=(KvGroup(16, 1, 2),),
    admissible_kv_tokens=5,
    scheduled_prefill_tokens=6,
    scheduled_decode_tokens=11,
    preemptions_total=12,
    power_w=300.0,
    energy_j=4.5,
)
"""No field but the version has its default, and no two counts are alike."""


def pairs(assignments: Iterable[Assignment], waiting: Sequence[Request]) -> list[tuple[int, str]]:
    """Assignments as (index in the pool, worker)."""
    number = dict(zip((r.id for r in waiting), count(), strict=False))
    return [(number[a.request_id], a.worker_id) for a in assignments]
