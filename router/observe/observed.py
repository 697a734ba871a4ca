"""What an observer makes of what engines show: requests, and what the barrier costs meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from router.barrier import StepTotals, is_barrier
from router.group import Group
from router.signals import Departure
from router.types import Snapshot


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that an engine has ended, or shows no more.

    Attributes:
        first_s: when it was seen first, running.
        first_token_s: when it was seen to have a token first, None: never.
        complete: its engine has said that it ended.
    """

    worker_id: str
    first_s: float
    first_token_s: float | None
    prompt_tokens: int
    output_tokens: int
    complete: bool


@dataclass(slots=True)
class _Open:
    first_s: float
    first_token_s: float | None = None


@dataclass(slots=True)
class _Engine:
    """Requests of one worker since its engine's start.

    Attributes:
        open: by id, those that run or are to come back.
        missing: those of them that ran when the engine fell silent, as they were then.
    """

    epoch: str
    open: dict[str, _Open] = field(default_factory=dict)
    missing: dict[str, Departure] = field(default_factory=dict)


class SeenRequests:
    """The requests of one group, from the snapshots of its engines.

    Args:
        group: applies the snapshots; its departures are taken from here.
        tell: takes each request as it ends.
    """

    def __init__(self, group: Group, tell: Callable[[Seen], None]) -> None:
        self._group = group
        self._tell = tell
        self._engines: dict[str, _Engine] = {}

    def look(self, worker_id: str, snapshot: Snapshot, now_s: float) -> None:
        """Look who is new and who has left, after the snapshot of a worker has been applied."""
        engine = self._engines.setdefault(worker_id, _Engine(snapshot.epoch))
        self._leave(worker_id, engine, snapshot, now_s)
        if snapshot.epoch != engine.epoch:
            self._give_up(worker_id, engine)
            engine = self._engines[worker_id] = _Engine(snapshot.epoch)
        for engine_id in snapshot.finished:
            seen, departure = engine.open.pop(engine_id, None), engine.missing.pop(engine_id, None)
            if seen is not None and departure is not None:
                self._end(worker_id, seen, departure, complete=True)
        for told in snapshot.running:
            if told.id not in snapshot.finished:
                engine.missing.pop(told.id, None)
                seen = engine.open.setdefault(told.id, _Open(now_s))
                if seen.first_token_s is None and told.generated_tokens:
                    seen.first_token_s = now_s
        if snapshot.kind == "full":
            self._give_up(worker_id, engine)

    def lose(self, worker_id: str) -> None:
        """A worker says nothing: whether its requests go on is seen when it speaks again."""
        departures = self._group.departures
        self._engines[worker_id].missing.update({each.engine_id: each for each in departures})
        departures.clear()

    def end(self) -> None:
        """Nobody looks any more: what is still missing is lost."""
        for worker_id, engine in self._engines.items():
            self._give_up(worker_id, engine)

    def _leave(self, worker_id: str, engine: _Engine, snapshot: Snapshot, now_s: float) -> None:
        """Tell who has left; those who are to come back go on."""
        for departure in self._group.departures:
            engine_id = departure.engine_id
            if engine_id not in snapshot.preempted:
                complete = engine_id in snapshot.finished
                seen = engine.open.pop(engine_id, None) or _Open(now_s)
                if complete and seen.first_token_s is None and departure.generated_tokens:
                    seen.first_token_s = now_s
                self._end(worker_id, seen, departure, complete=complete)
        self._group.departures.clear()

    def _give_up(self, worker_id: str, engine: _Engine) -> None:
        for engine_id, departure in engine.missing.items():
            self._end(worker_id, engine.open.pop(engine_id), departure, complete=False)
        engine.missing.clear()

    def _end(self, worker_id: str, seen: _Open, departure: Departure, *, complete: bool) -> None:
        tokens = departure.prompt_tokens, departure.generated_tokens
        self._tell(Seen(worker_id, seen.first_s, seen.first_token_s, *tokens, complete))


@dataclass(frozen=True, slots=True)
class Share:
    """What the barrier of a group has cost over some of its steps.

    Attributes:
        steps: how many.
        step_s: mean time of one, in the engine's seconds; None without any.
        imbalance_tokens: mean of G max L - sum L.
        load_tokens: mean load of a worker.
        max_load_tokens: mean load of the fullest worker.
        idle_share: of the workers' time in steps, waiting for the fullest one; None: not known,
            since no engine times it and steps do not tell what a token costs, or there is no
            barrier.
        measured_share: of the workers' time in steps, that in which engines have timed it.
        modelled_share: that for which it is modelled.
        throughput_tok_s: output tokens per second of steps.
        together_share: of the steps in which two workers or more had something to run, those that
            all of these made together; None: there was no such step.
    """

    steps: int
    step_s: float | None
    imbalance_tokens: float | None
    load_tokens: float | None
    max_load_tokens: float | None
    idle_share: float | None
    measured_share: float | None
    modelled_share: float | None
    throughput_tok_s: float | None
    together_share: float | None

    @property
    def barrier(self) -> bool | None:
        """Workers wait for each other; None: not known."""
        return is_barrier(self.together_share)

    @property
    def idle_share_source(self) -> Literal["measured", "modelled", "both"]:
        """What the idle share rests on."""
        if not self.measured_share:
            return "modelled"
        return "both" if self.modelled_share else "measured"


def share(now: StepTotals, before: StepTotals) -> Share:
    """What the barrier has cost between two moments."""
    delta = now - before
    steps, worker_steps = delta.steps, delta.worker_steps
    worker_s = delta.step_s * worker_steps / steps if steps else 0.0
    apart = is_barrier(delta.together_share) is False
    return Share(
        steps=steps,
        step_s=_ratio(delta.step_s, steps),
        imbalance_tokens=_ratio(delta.imbalance_tokens, steps),
        load_tokens=_ratio(delta.load_tokens, worker_steps),
        max_load_tokens=_ratio(delta.max_load_tokens, steps),
        idle_share=None if apart else _ratio(delta.waiting_s, delta.timed_s),
        measured_share=_ratio(min(delta.measured_s, worker_s), worker_s),
        modelled_share=_ratio(min(delta.timed_s - delta.measured_s, worker_s), worker_s),
        throughput_tok_s=_ratio(delta.output_tokens, delta.step_s),
        together_share=delta.together_share,
    )


def total(group: Group) -> Share:
    """What the barrier has cost in all steps so far."""
    return share(group.every_step, StepTotals())


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
