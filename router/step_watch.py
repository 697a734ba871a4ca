"""What a step was like for each worker, for whoever wants every step and not their sums alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from router.types import Snapshot


class StepPart(msgspec.Struct, frozen=True, gc=False):
    """One worker in a step that is over.

    Attributes:
        load_tokens: as the imbalance of the step counts it: 0 for an idle worker, and what its
            last step left for one that has something to run and has not made this step.
        running: engine requests that ran.
        queued: those that wait in the engine, as it said last.
        power_w: of its GPUs, as it said last; None: unknown.
    """

    load_tokens: int
    running: int
    queued: int
    power_w: float | None


class ClosedStep(msgspec.Struct, frozen=True, gc=False):
    """A step of a group that is over.

    Attributes:
        step: its number; ranks that do not step together: of the furthest of them.
        step_s: how long it took, in the engine's seconds.
        parts: by worker; those that are down or say nothing are missing.
        together: all workers with something to run have made it together.
        waiting_s: time that workers waited for the fullest, summed, modelled:
            t_l (G max L - sum L); None: not known, or they did not step together.
        preemptions: since the step before.
        waited_s: the same as the engines have timed it; None: not all of them do.
    """

    step: int
    step_s: float
    parts: Mapping[str, StepPart]
    together: bool
    waiting_s: float | None
    preemptions: int
    waited_s: float | None = None


class Said(msgspec.Struct, frozen=True, gc=False):
    """What a worker said of itself last.

    Attributes:
        running: engine requests that ran in its last step.
        queued: those that wait in the engine.
        power_w: of its GPUs.
        preemptions: since its engine's start; None: not known.
    """

    running: int
    queued: int
    power_w: float | None
    preemptions: int | None = None


class StepWatch:
    """Keeps what a ledger does not, and tells each step as it closes.

    Args:
        tell: who wants to know.
        said: by worker, what they said before.
    """

    def __init__(self, tell: Callable[[ClosedStep], None], said: Mapping[str, Said]) -> None:
        self._tell = tell
        self._said = dict(said)
        self._preemptions = 0

    def report(self, worker_id: str, running: int, snapshot: Snapshot, *, stepped: bool) -> None:
        """A worker has spoken.

        Args:
            worker_id: who.
            running: engine requests that ran in its step.
            snapshot: what it said.
            stepped: whether this is a further step; else its last one is as it was.
        """
        before = self._said.get(worker_id)
        if before is not None:
            running = running if stepped else before.running
            if before.preemptions is not None:
                self._preemptions += max(0, snapshot.preemptions_total - before.preemptions)
        self._said[worker_id] = Said(
            running, snapshot.waiting, snapshot.power_w, snapshot.preemptions_total
        )

    def leave(self, worker_id: str) -> None:
        """A worker is gone."""
        self._said.pop(worker_id, None)

    def close(self, step: ClosedStep, loads: Mapping[str, int]) -> None:
        """A step is over; its parts, with these loads, and its preemptions are added to it."""
        parts = {worker_id: self._part(worker_id, load) for worker_id, load in loads.items()}
        told = {"parts": parts, "preemptions": self._preemptions}
        self._tell(msgspec.structs.replace(step, **told))
        self._preemptions = 0

    def _part(self, worker_id: str, load_tokens: int) -> StepPart:
        said = self._said[worker_id]
        return StepPart(load_tokens, said.running if load_tokens else 0, said.queued, said.power_w)
