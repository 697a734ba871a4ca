"""A small model of an engine, after the snapshot's contract alone: no time, no sockets."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from router.core.types import FREE_PLACE, RunningRequest, Snapshot
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


PLACES = 40
"""Places are taken in turns, as no engine does."""


class EngineModel:
    """Admits in order of arrival, computes a prompt in chunks, then one token a step or several."""

    def __init__(self, epoch: str, slots: int, chunk: int = 40) -> None:
        self.epoch = epoch
        self.running: dict[str, Part] = {}
        self.waiting: dict[str, Part] = {}
        self._slots = slots
        self._chunk = chunk
        self._sequence = 0
        self._step = 0
        self._told: dict[str, RunningRequest] = {}
        self._next_place = 0
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

    def step(
        self,
        finish: Collection[str] = (),
        preempt: Collection[str] = (),
        gains: Sequence[int] = (1,),
    ) -> Snapshot:
        """One step, in which some requests produce their last token and some lose their slot.

        Those in decode gain so many tokens, in turns.
        """
        for engine_id in [i for i in preempt if i in self.running]:
            self.waiting[engine_id] = self.running.pop(engine_id)
        self._admit(preempt)
        self._generate(gains)
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

    def _generate(self, gains: Sequence[int]) -> None:
        for index, one in enumerate(self.running.values()):
            if one.prefill_left:
                one.prefill_left = max(0, one.prefill_left - self._chunk)
                one.generated_tokens += one.prefill_left == 0
            else:
                one.generated_tokens += gains[index % len(gains)]

    def _delta(self, resident: dict[str, Part], preempted: tuple[str, ...]) -> Snapshot:
        before = self._told
        rows = {i: self._row(i, one) for i, one in resident.items()}
        gains = {
            i: rows[i].generated_tokens - old.generated_tokens if i in rows else 0
            for i, old in before.items()
        }
        just_grew = {i for i, row in rows.items() if i in before and not self._in_prefill(i, row)}
        changed = [row for i, row in rows.items() if i not in just_grew]
        finished, self._finished = tuple(self._finished), []
        self._told = {i: row for i, row in rows.items() if i in self.running}
        self._sequence += 1
        delta = snapshot(
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
        if all(gains[i] == 1 for i in just_grew):
            return delta
        growths = bytearray([FREE_PLACE] * PLACES)
        for i, old in before.items():
            assert old.place is not None
            growths[old.place] = gains[i] if i in just_grew else 1
        return msgspec.structs.replace(delta, kind="growth", growths=bytes(growths))

    def _row(self, engine_id: str, one: Part) -> RunningRequest:
        tokens = one.prompt_tokens, one.generated_tokens, 0, one.prefill_left
        return RunningRequest(engine_id, *tokens, place=self._place(engine_id))

    def _place(self, engine_id: str) -> int:
        if engine_id in self._told:
            place = self._told[engine_id].place
            assert place is not None
            return place
        taken = {row.place for row in self._told.values()}
        while self._next_place in taken:
            self._next_place = (self._next_place + 1) % PLACES
        place, self._next_place = self._next_place, (self._next_place + 1) % PLACES
        return place

    def _in_prefill(self, engine_id: str, row: RunningRequest) -> bool:
        return bool(row.prefill_left or self._told[engine_id].prefill_left)
