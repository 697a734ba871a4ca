"""Routers that stand in the league: how each is started, and what it is told of the engines."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines that every router of a workload stands before.

    Attributes:
        urls: of each engine.
        workers: the same engines as ``evenstep serve --worker`` takes them.
        kv_events: port of each engine's KV events; empty where engines publish none.
        slots: of each engine.
        block_tokens: of a KV block.
        model: what requests name.
        time_scale: wall seconds per engine second.
        step_time: C, t_l, t_r and t_p of the engines, in engine seconds; empty: not told.
        control: the emulator's fault port; empty: real engines.
        hidden_lengths: whether an answer ends at the request's hidden length.
        used: whether engines have served before, and may have prompts in their caches.
    """

    urls: Sequence[str]
    workers: Sequence[str]
    kv_events: Sequence[int]
    slots: int
    block_tokens: int
    model: str
    time_scale: float
    step_time: Sequence[float] = ()
    control: str = ""
    hidden_lengths: bool = True
    used: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A router that is ready.

    Attributes:
        url: where requests go.
        pids: its processes, for CPU and memory; what belongs to the bench is not among them.
        evidence: read after the requests: figures of its own that show which state reached it.
    """

    url: str
    pids: Callable[[], Sequence[int]]
    evidence: Callable[[], Mapping[str, float]] = dict


@dataclass(frozen=True, slots=True)
class Entrant:
    """A router with its flags.

    Attributes:
        name: in tables, such as ``vllm-router cache_aware``.
        peer: the product, a key of ``peers.toml``, or ``evenstep``.
        flags: what was set besides addresses, as a user writes it.
        what: one sentence on how it chose.
        start: starts it before engines, with files in a folder; ends it with the block.
        cannot: by the workload's name, why it is left out of that.
        code: files that decide how it is started, besides what its process runs.
    """

    name: str
    peer: str
    flags: str
    what: str
    start: Callable[[Engines, Path], AbstractContextManager[Running]]
    cannot: Mapping[str, str] = field(default_factory=dict)
    code: Sequence[str] = ()
