from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from router.core.forecast.end_signals import Departure
from router.core.state.barrier import StepTotals, is_barrier
from router.core.state.group import Group
from router.core.types import Snapshot


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that an engine ended (``complete``) or no longer shows, and its first times."""

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
    """``open`` requests run or are preempted; ``missing`` ones ran when the engine fell silent."""

    epoch: str
    open: dict[str, _Open] = field(default_factory=dict)
    missing: dict[str, Departure] = field(default_factory=dict)


class SeenRequests:
    """The requests of one group, from its engines' snapshots; consumes its departures."""

    def __init__(self, group: Group, tell: Callable[[Seen], None]) -> None:
        self._group = group
        self._tell = tell
        self._engines: dict[str, _Engine] = {}

    def look(self, worker_id: str, snapshot: Snapshot, now_s: float) -> None:
        """Call it after the cluster has applied the snapshot."""
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
        """The worker fell silent; its next snapshot shows whether its requests continue."""
        departures = self._group.departures
        self._engines[worker_id].missing.update({each.engine_id: each for each in departures})
        departures.clear()

    def end(self) -> None:
        for worker_id, engine in self._engines.items():
            self._give_up(worker_id, engine)

    def _leave(self, worker_id: str, engine: _Engine, snapshot: Snapshot, now_s: float) -> None:
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
    """Cost of a group's barrier over some of its steps."""

    steps: int
    step_s: float | None  # mean duration in the engine's seconds; None without steps
    imbalance_tokens: float | None  # mean of G max L - sum L
    load_tokens: float | None
    max_load_tokens: float | None
    # Part of the workers' step time spent waiting for the fullest one; None: not known, or no
    # barrier.
    idle_share: float | None
    # Parts of the step time whose waiting engines measured, and whose waiting is modelled.
    measured_share: float | None
    modelled_share: float | None
    throughput_tok_s: float | None  # output tokens per second of step time
    # Of the steps with two or more busy workers, the share that all of them made together; None: no
    # such step.
    together_share: float | None

    @property
    def barrier(self) -> bool | None:
        return is_barrier(self.together_share)

    @property
    def idle_share_source(self) -> Literal["measured", "modelled", "both"]:
        if not self.measured_share:
            return "modelled"
        return "both" if self.modelled_share else "measured"


def share(now: StepTotals, before: StepTotals) -> Share:
    """The barrier's cost between two samples."""
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
    """The barrier's cost over all steps so far."""
    return share(group.every_step, StepTotals())


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
