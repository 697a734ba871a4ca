"""A small model of an engine, after the snapshot's contract alone: no time, no sockets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from router.core.types import RunningRequest, Snapshot
from tests.support.core import snapshot


@dataclass
class Part:
    """An engine request: it waits, or runs with so many tokens."""

    prompt_tokens: int
    generated_tokens: int = 0
    prefill_left: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


class EngineModel:
    """Admits in order of arrival, computes a prompt in chunks, then one token a step."""

    def __init__(self, epoch: str, slots: int, chunk: int = 40) -> None:
        self.epoch = epoch
        self.running: dict[str, Part] = {}
        self.waiting: dict[str, Part] = {}
        self._slots = slots
        self._chunk = chunk
        self._sequence = 0
        self._step = 0
        self._told: dict[str, RunningRequest] = {}
        self._finished: list[str] = []

    @property
    def load_tokens(self) -> int:
        return sum(one.tokens for one in self.running.values())

    @property
    def ids(self) -> list[str]:
        """Everything that it has, in order of arrival."""
        return [*self.running, *self.waiting]

    def submit(self, engine_id: str, prompt_tokens: int) -> None:
        self.waiting[engine_id] = Part(prompt_tokens)

    def abort(self, engine_id: str) -> None:
        """Drop a request, wherever it is; the next snapshot says so."""
        if engine_id in self.ids:
            self.running.pop(engine_id, None)
            self.waiting.pop(engine_id, None)
            self._finished.append(engine_id)

    def step(self, finish: Collection[str] = (), preempt: Collection[str] = ()) -> Snapshot:
        """One step, in which some requests produce their last token and some lose their slot."""
        for engine_id in [i for i in preempt if i in self.running]:
            self.waiting[engine_id] = self.running.pop(engine_id)
        self._admit(preempt)
        self._generate()
        self._step += 1
        resident = dict(self.running)
        for engine_id in [i for i in finish if i in self.running]:
            del self.running[engine_id]
            self._finished.append(engine_id)
        return self._delta(resident, tuple(i for i in preempt if i in self._told))

    def full(self) -> Snapshot:
        """All that runs, as of the latest message."""
        told = self._told.values()
        return snapshot(
            "full",
            self._sequence,
            *told,
            step=self._step,
            epoch=self.epoch,
            waiting=len(self.waiting),
            slots=self._slots,
        )

    def _admit(self, preempted: Collection[str]) -> None:
        for engine_id in [i for i in self.waiting if i not in preempted]:
            if len(self.running) < self._slots:
                one = self.running[engine_id] = self.waiting.pop(engine_id)
                one.prefill_left = one.tokens

    def _generate(self) -> None:
        for one in self.running.values():
            one.prefill_left = max(0, one.prefill_left - self._chunk)
            one.generated_tokens += one.prefill_left == 0

    def _delta(self, resident: dict[str, Part], preempted: tuple[str, ...]) -> Snapshot:
        rows = {
            i: RunningRequest(i, one.prompt_tokens, one.generated_tokens, 0, one.prefill_left)
            for i, one in resident.items()
        }
        changed = [row for i, row in rows.items() if not self._just_grew(i, row)]
        finished, self._finished = tuple(self._finished), []
        self._told = {i: row for i, row in rows.items() if i in self.running}
        self._sequence += 1
        return snapshot(
            "delta",
            self._sequence,
            *changed,
            step=self._step,
            epoch=self.epoch,
            finished=finished,
            preempted=preempted,
            waiting=len(self.waiting),
            slots=self._slots,
        )

    def _just_grew(self, engine_id: str, row: RunningRequest) -> bool:
        old = self._told.get(engine_id)
        return old is not None and (
            (row.generated_tokens, row.prefill_left) == (old.generated_tokens + 1, old.prefill_left)
        )
