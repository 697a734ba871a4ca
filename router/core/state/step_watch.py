"""Details of each step by worker, for observers that need more than sums."""

from collections.abc import Callable, Mapping

import msgspec

from router.core.types import Snapshot


class StepPart(msgspec.Struct, frozen=True, gc=False):
    """One worker in a closed step.

    The load is as in the step's imbalance: 0 for an idle worker; for a busy one that did not make
    this step, the load after its last step. ``queued``, ``power_w``: at its last report.
    """

    load_tokens: int
    running: int
    queued: int
    power_w: float | None
    prompt_tokens: int = 0


class ClosedStep(msgspec.Struct, frozen=True, gc=False):
    """A closed step of a group."""

    step: int  # without a barrier, the number of the furthest rank
    step_s: float  # in the engine's seconds
    parts: Mapping[str, StepPart]  # by worker, without those that are down or silent
    together: bool  # true if all busy workers made it together
    # Modelled by the group's step time, summed over workers; None: unknown, or no barrier.
    waiting_s: float | None
    preemptions: int  # since the step before
    waited_s: float | None = None  # measured, summed over workers; None: not all engines measure it
    output_tokens: int = 0  # that requests gained


class Said(msgspec.Struct, frozen=True, gc=False):
    """Last report of a worker; ``running``: in its last step.

    ``preemptions`` counts from its engine's start; None: unknown. ``prompt_tokens``: computed in
    the step that is still open.
    """

    running: int
    queued: int
    power_w: float | None
    preemptions: int | None = None
    prompt_tokens: int = 0


class StepWatch:
    """Adds details to each step as it closes."""

    def __init__(self, tell: Callable[[ClosedStep], None], said: Mapping[str, Said]) -> None:
        self._tell = tell
        self._said = dict(said)
        self._preemptions = 0

    def report(self, worker_id: str, running: int, snapshot: Snapshot, *, stepped: bool) -> None:
        before = self._said.get(worker_id)
        if before is not None:
            running = running if stepped else before.running
            if before.preemptions is not None:
                self._preemptions += max(0, snapshot.preemptions_total - before.preemptions)
        prompts = snapshot.scheduled_prefill_tokens if stepped else 0
        if before is not None and not stepped:
            prompts = before.prompt_tokens
        told = "preemptions" not in snapshot.unreported
        preemptions = snapshot.preemptions_total if told else None
        self._said[worker_id] = Said(
            running, snapshot.waiting, snapshot.power_w, preemptions, prompts
        )

    def leave(self, worker_id: str) -> None:
        self._said.pop(worker_id, None)

    def close(self, step: ClosedStep, loads: Mapping[str, int]) -> None:
        parts = {}
        for worker_id, load in loads.items():
            said = self._said[worker_id]
            running = said.running if load else 0
            parts[worker_id] = StepPart(
                load, running, said.queued, said.power_w, said.prompt_tokens
            )
            if said.prompt_tokens:
                self._said[worker_id] = msgspec.structs.replace(said, prompt_tokens=0)
        told = {"parts": parts, "preemptions": self._preemptions}
        self._tell(msgspec.structs.replace(step, **told))
        self._preemptions = 0
