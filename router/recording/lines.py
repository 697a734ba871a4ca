"""Recordings as JSON lines: lengths and times of steps and requests, without texts and ids.

Of prompts they have numbers that tell which ones begin alike (``block_numbers``).

The header comes first, other lines as they happen. Unknown keys are ignored; another schema is
rejected.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Annotated, Literal

import msgspec

from router.core.errors import InputError
from router.core.state.closed_step import ClosedStep

SCHEMA = 1

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


class RecordedWorker(msgspec.Struct, frozen=True):
    """A worker; None: not reported. ``block_tokens``: of a numbered block of its requests."""

    id: str
    rank: int | None = None
    slots: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None


class RecordedGroup(msgspec.Struct, frozen=True):
    """Workers in the order of steps' lists; ``lockstep``: None from an observer."""

    lockstep: bool | None
    workers: tuple[RecordedWorker, ...]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Data common to all other lines."""

    recording: int = SCHEMA
    evenstep: str
    source: Literal["serve", "observe"]  # "serve" if the router dispatched the requests itself
    started_unix_s: float  # wall clock at the start; all other times count from there
    # None from an observer.
    policy: str | None = None
    dispatch: str | None = None
    # Calibrated watts of a worker when idle, waiting in a step, and computing.
    power_levels: tuple[float, float, float] | None = None
    groups: dict[str, RecordedGroup]


class WorkerLine(msgspec.Struct, frozen=True):
    """New or changed data of a worker; from here on its group's steps list a new one last."""

    worker: str
    group: str
    slots: int | None
    kv_tokens: int | None
    rank: int | None = None
    lockstep: bool | None = None
    block_tokens: int | None = None


class StepLine(msgspec.Struct, frozen=True, gc=False):
    """A completed step; lists have an entry per worker: the header's, then later ones."""

    step: int  # of the furthest rank, without a barrier
    group: str
    time_s: float  # its end
    step_s: float  # duration, in the engine's seconds
    # Resident KV tokens as the imbalance counts them: 0 for an idle worker, the last load for a
    # busy one that did not make this step, None for one that is down or silent.
    loads: list[Count | None]
    running: list[Count | None]  # engine requests that ran, None as in ``loads``
    # Requests waiting in the router, and in the engines.
    pool: Count = 0
    queued: Count = 0
    together: bool = True  # all workers with something to run made this step together
    # Modelled time spent waiting for the fullest worker, summed over workers.
    waiting_s: float | None = None
    waited_s: float | None = None  # the same, as engines measured it
    power_w: list[float | None] | None = None  # of each worker's GPUs
    preemptions: Count = 0  # since the step before
    # Prompt tokens computed in this step, None as in ``loads``; None in recordings that do not have
    # them.
    prompts: list[Count | None] | None = None
    tokens: Count | None = None  # output tokens of the step; None as ``prompts``

    @property
    def imbalance_tokens(self) -> int:
        """G max L - sum L, over the G workers that count."""
        loads = [load for load in self.loads if load is not None]
        return len(loads) * max(loads, default=0) - sum(loads)


class RequestLine(msgspec.Struct, frozen=True, gc=False):
    """A completed request; times count from the start."""

    request: int  # number in the order of completion
    group: str
    arrival_s: float  # arrival at the router, or an observer's first sight
    dispatched_s: float | None  # to the worker that ended it; None: never, or not seen
    first_token_s: float | None
    ended_s: float
    worker: str | None  # the one that ended it; None: it never left the pool
    prompt_tokens: Count  # of each of its prompts, preferably as the engine counted them
    output_tokens: Count  # of all its engine requests together, as far as known
    outcome: str  # an ``Outcome``, or "lost" if an observer did not see its end
    slots: Annotated[int, msgspec.Meta(ge=1)] = 1  # engine requests that it became
    # Runs of numbers (``BlockNumbers``) of the prompt's full blocks, as far as they are known;
    # equal numbers stand for equal prompts up to the block's end. Without a content or a cache that
    # is known there are none.
    blocks: list[Count] | msgspec.UnsetType = msgspec.UNSET

    @property
    def block_numbers(self) -> Iterator[int]:
        runs = self.blocks or ()
        pairs = zip(runs[::2], runs[1::2], strict=False)
        numbers = chain.from_iterable(range(first, first + more) for first, more in pairs)
        return islice(numbers, self.prompt_tokens)

    @property
    def outputs(self) -> Iterator[int]:
        parts = max(1, min(self.slots, self.output_tokens))
        return ((self.output_tokens + part) // parts for part in range(parts))


class PolicyLine(msgspec.Struct, frozen=True, gc=False):
    """Change of the router's policy or dispatch mode at ``changed_s``."""

    changed_s: float
    policy: str | None
    dispatch: str | None


class DroppedLine(msgspec.Struct, frozen=True):
    """Number of lines missing here: the listener was too slow."""

    dropped: Count


Line = Header | WorkerLine | StepLine | RequestLine | PolicyLine | DroppedLine


@dataclass(frozen=True, slots=True)
class Recording:
    """A complete recording; its header has later workers, too, and the last report of each.

    Each step has an entry for every worker. ``complete``: false if it breaks off within a line.
    ``changes``: of the policy; the header has the first.
    """

    header: Header
    steps: tuple[StepLine, ...]
    requests: tuple[RequestLine, ...]
    complete: bool = True
    dropped: int = 0
    changes: tuple[PolicyLine, ...] = ()


class _Kind(msgspec.Struct):
    """Each kind has a key that the kinds before it lack."""

    recording: int | None = None
    step: int | None = None
    request: int | None = None
    worker: str | None = None
    changed_s: float | None = None
    dropped: int | None = None


_encoder = msgspec.json.Encoder()
_kind = msgspec.json.Decoder(_Kind)
_header = msgspec.json.Decoder(Header)
# After the header, by their kind's key.
_LINES: dict[str, msgspec.json.Decoder[Line]] = {
    "dropped": msgspec.json.Decoder(DroppedLine),
    "changed_s": msgspec.json.Decoder(PolicyLine),
    "step": msgspec.json.Decoder(StepLine),
    "request": msgspec.json.Decoder(RequestLine),
    "worker": msgspec.json.Decoder(WorkerLine),
}


def encode(line: Line) -> bytes:
    """The line with its newline."""
    return _encoder.encode(line) + b"\n"


def step_line(
    group: str, workers: Iterable[str], closed: ClosedStep, time_s: float, pool: int
) -> StepLine:
    """The line of a step."""
    parts = [closed.parts.get(worker) for worker in workers]
    power_w = [
        None if part is None or part.power_w is None else round(part.power_w, 1) for part in parts
    ]
    return StepLine(
        step=closed.step,
        group=group,
        time_s=round(time_s, 6),
        step_s=round(closed.step_s, 9),
        loads=[None if part is None else part.load_tokens for part in parts],
        running=[None if part is None else part.running for part in parts],
        pool=pool,
        queued=sum(part.queued for part in parts if part is not None),
        together=closed.together,
        waited_s=None if closed.waited_s is None else round(closed.waited_s, 9),
        waiting_s=None if closed.waiting_s is None else round(closed.waiting_s, 9),
        power_w=None if power_w.count(None) == len(power_w) else power_w,
        preemptions=closed.preemptions,
        prompts=[None if part is None else part.prompt_tokens for part in parts],
        tokens=closed.output_tokens,
    )


def read(lines: Iterable[bytes], name: str) -> Recording:
    """Read a whole recording; InputError as from ``LineReader.read``."""
    reader = LineReader(name)
    header: Header | None = None
    dropped = 0
    steps: list[StepLine] = []
    requests: list[RequestLine] = []
    changes: list[PolicyLine] = []
    for line in reader.read(lines):
        match line:
            case Header():
                header = line
            case StepLine():
                steps.append(line)
            case RequestLine():
                requests.append(line)
            case PolicyLine():
                changes.append(line)
            case DroppedLine():
                dropped += line.dropped
            case _:
                assert header is not None
                header = _with_worker(header, line)
    assert header is not None
    return Recording(
        header,
        tuple(_widened(step, len(header.groups[step.group].workers)) for step in steps),
        tuple(requests),
        reader.complete,
        dropped,
        tuple(changes),
    )


class LineReader:
    """Reads one recording; ``complete``: false if it broke off within a line, which is left out."""

    def __init__(self, name: str) -> None:
        self.complete = True
        self._name = name

    def read(self, lines: Iterable[bytes]) -> Iterator[Line]:
        """The decoded lines, the header first; an InputError names line and remedy."""
        workers: dict[str, set[str]] | None = None
        for number, raw in enumerate(lines, start=1):
            try:
                if workers is None:
                    schema = _kind.decode(raw).recording
                    if schema is None:
                        raise ValueError("is not the header of a recording")
                    if schema != SCHEMA:
                        raise ValueError(
                            f"schema {schema} of recordings, while this evenstep reads {SCHEMA}"
                        )
                    header = _header.decode(raw)
                    workers = {
                        name: {worker.id for worker in each.workers}
                        for name, each in header.groups.items()
                    }
                    yield header
                else:
                    yield _decoded(raw, workers)
            except ValueError as error:  # includes msgspec's and Unicode's errors
                if workers is None:
                    mend = "give a file that --record wrote"
                elif raw.endswith(b"\n"):
                    mend = "remove the line, or record anew"
                else:
                    self.complete = False
                    return
                raise InputError(f"{self._name}: line {number}: {error}; {mend}") from None
        if workers is None:
            raise InputError(f"{self._name}: is empty; give a file that --record wrote")


def _decoded(raw: bytes, workers: dict[str, set[str]]) -> Line:
    kind = _kind.decode(raw)
    decoder = next((_LINES[key] for key in _LINES if getattr(kind, key) is not None), None)
    if decoder is None:
        raise ValueError("is not a step, a request, a worker or a change of policy")
    line = decoder.decode(raw)
    if isinstance(line, WorkerLine):
        workers.setdefault(line.group, set()).add(line.worker)
    elif isinstance(line, StepLine | RequestLine) and line.group not in workers:
        raise ValueError(f"group {line.group!r} is not in the header")
    if isinstance(line, StepLine):
        for values in (line.loads, line.running, line.power_w, line.prompts):
            if values is not None and len(values) != (number := len(workers[line.group])):
                raise ValueError(f"{len(values)} values for {number} workers")
    return line


def _with_worker(header: Header, line: WorkerLine) -> Header:
    group = header.groups.get(line.group) or RecordedGroup(line.lockstep, ())
    workers = {each.id: each for each in group.workers}
    before = workers.get(line.worker) or RecordedWorker(line.worker, line.rank)
    workers[line.worker] = msgspec.structs.replace(
        before, slots=line.slots, kv_tokens=line.kv_tokens, block_tokens=line.block_tokens
    )
    lockstep = None if group.lockstep is None else line.lockstep
    changed = RecordedGroup(lockstep, tuple(workers.values()))
    return msgspec.structs.replace(header, groups={**header.groups, line.group: changed})


def _widened(step: StepLine, workers: int) -> StepLine:
    later = [None] * (workers - len(step.loads))
    if not later:
        return step
    return msgspec.structs.replace(
        step,
        loads=[*step.loads, *later],
        running=[*step.running, *later],
        power_w=None if step.power_w is None else [*step.power_w, *later],
        prompts=None if step.prompts is None else [*step.prompts, *later],
    )
