"""An engine's requests as reported to the router, and the changes of each step.

A message lists requests that are new, in prefill or otherwise changed. The others have grown by one
token, which costs nothing, or by several, which costs a byte each. Independent of vLLM, clocks and
sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from engine_patches.stream.rows import PlacedRow, Places
from router.core.wire import request_token

_FIRST_PLACES = 64


class EngineRequest(Protocol):
    """Fields read of an engine's request."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int  # generated so far; tokens only scheduled are not output yet
    num_computed_tokens: int  # their KV is computed, or will be by the steps scheduled so far


class Step(NamedTuple):
    """One step of the engine, with its results."""

    running: Sequence[EngineRequest]
    # Tokens that requests got, by id; None: each scheduled one got exactly one.
    gained: Mapping[str, int] | None
    alive: Mapping[str, EngineRequest]  # requests that have not ended
    # Ids that ended lately; one may recur until ``flushed`` was called with it.
    ended: Collection[str]
    scheduled: Mapping[str, int]  # number of tokens that the step computed, by id
    # The same for steps scheduled since, whose results are still to come.
    ahead: Sequence[Mapping[str, int]] = ()
    end_probabilities: Mapping[str, float] = {}  # changed ones, by id

    @property
    def output_tokens(self) -> int:
        return len(self.scheduled) if self.gained is None else sum(self.gained.values())

    def output_of(self, id_: str) -> int:
        return id_ in self.scheduled if self.gained is None else self.gained.get(id_, 0)


@dataclass(frozen=True, slots=True)
class Changes:
    """Content of a step's message."""

    rows: list[PlacedRow]  # requests that are new or did not just grow; some may have finished
    finished: tuple[str, ...]  # ids that ended, whether they ran or only waited
    preempted: tuple[str, ...]  # ids that lost their slot and wait again
    # Tokens of the step that computed prompts, or recomputed after a preemption.
    prefill_tokens: int
    decode_tokens: int  # output tokens of the others; rejected drafts do not count
    growths: bytes  # tokens of the others, by place; empty: one each


class _Told(NamedTuple):
    """Data that is constant while a request just grows."""

    prompt_tokens: int
    cached_tokens: int
    prefill_left: int


class EngineState:
    """The running requests as known to a router that has read every message.

    ``lists_all``: which requests entered, or what they gained, is unknown; each step lists all.
    """

    def __init__(self, *, lists_all: bool = False) -> None:
        self._lists_all = lists_all
        self.waiting_tokens = 0  # prompt and generated tokens of the waiting requests
        self.waiting_routed = 0  # number of waiting requests that came from routers
        self._places = Places()
        self._ticks = 0  # steps in which all grew by one
        # Generated tokens less ticks, by place.
        self._generated = np.zeros(_FIRST_PLACES, dtype=np.int64)
        self._told: dict[str, _Told] = {}
        self._prefilling: set[str] = set()
        self._entered: set[str] = set()
        self._requests: dict[str, EngineRequest] = {}
        self._waiting: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._end_probabilities: dict[str, float] = {}
        self._ended: set[str] = set()
        self._unseen: set[str] = set()

    @property
    def running(self) -> int:
        return len(self._told)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def rows(self) -> list[PlacedRow]:
        """All running requests, as a full snapshot lists them."""
        places, ends = self._places, self._end_probabilities
        generated = (self._generated + self._ticks).tolist()
        rows: list[PlacedRow] = []
        for id_, (prompt, cached, left) in self._told.items():
            place = places[id_]
            grown = generated[place]
            rows.append((id_, prompt, grown, cached, left, ends.get(id_) if grown else None, place))
        return rows

    def arrived(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request
        if request.request_id not in self._told:  # else a session's next input
            self._wait(request)

    def admitted(self, id_: str, cached_tokens: int) -> None:
        """Note a request that got a slot."""
        self._cached[id_] = cached_tokens
        self._entered.add(id_)

    def flushed(self, ids: Iterable[str]) -> None:
        """Note that the engine will not report these ends again."""
        for id_ in ids:
            if id_ in self._ended:
                self._ended.discard(id_)
            else:
                self._unseen.add(id_)

    def changed(self, step: Step) -> bool:
        """Whether a step that computed nothing still needs a message."""
        return bool(
            self._unseen
            or self._entered
            or not self._ended.issuperset(step.ended)
            or len(step.running) != len(self._told)
            or (self._lists_all and not self._told.keys() >= _ids(step.running))
        )

    def advance(self, step: Step) -> Changes:
        """Apply a step; it counts as one more message."""
        self._places.settle()
        odd = self._prefilling | self._entered
        if self._lists_all:
            odd |= step.scheduled.keys() | self._told.keys()
        self._entered.clear()
        if step.end_probabilities:
            self._end_probabilities.update(step.end_probabilities)
            odd |= self._told.keys() & step.end_probabilities.keys()
        growths = self._grow(step, odd)
        same = len(self._told) == len(step.running)
        if same and not (odd or step.ended or self._unseen):
            return Changes([], (), (), 0, step.output_tokens, growths)
        in_prefill = self._prefilling
        prefilled = [id_ for id_ in odd if id_ in in_prefill or id_ not in self._told]
        prefill_tokens = sum(step.scheduled.get(id_, 0) for id_ in prefilled)
        decode_tokens = step.output_tokens - sum(map(step.output_of, prefilled))
        finished = [*self._unseen, *(id_ for id_ in step.ended if id_ not in self._ended)]
        self._unseen.clear()
        self._ended.update(step.ended)
        rows: list[PlacedRow] = []
        if finished:
            rows = [
                self._row(self._requests[id_], step.ahead)
                for id_ in sorted(odd.intersection(finished))
                if id_ in step.scheduled and id_ in self._requests
            ]
            for id_ in finished:
                self._forget(id_)
            odd.difference_update(finished)
        preempted: list[str] = []
        told = len(self._told) + len(odd - self._told.keys())
        if self._lists_all or told != len(step.running):
            running = _ids(step.running)
            lost, preempted = self._drop_gone(running, step.alive)
            finished += lost
            # A session that got a slot, answered in one step and waits with its next input.
            for id_ in (odd - running) & self._waiting.keys() & step.alive.keys():
                self._wait(step.alive[id_])
            odd = (odd & running) | (running - self._told.keys())
        rows += [self._tell(step.alive[id_], step.ahead) for id_ in sorted(odd)]
        gone = tuple(finished), tuple(preempted)
        return Changes(rows, *gone, prefill_tokens, decode_tokens, growths)

    def _grow(self, step: Step, listed: set[str]) -> bytes:
        """Let all grow; see ``Places.growths``."""
        gained, growths = step.gained, b""
        if gained is not None or not self._told.keys() <= step.scheduled.keys():
            gained = dict.fromkeys(step.scheduled, 1) if gained is None else gained
            growths = self._places.growths(gained, listed)
        if growths:
            self._generated[: len(growths)] += np.frombuffer(growths, dtype=np.uint8)
        else:
            self._ticks += 1
        return growths

    def _row(self, request: EngineRequest, ahead: Sequence[Mapping[str, int]]) -> PlacedRow:
        id_ = request.request_id
        prompt, generated = request.num_prompt_tokens, request.num_output_tokens
        left = prompt + generated - request.num_computed_tokens
        left += sum(tokens.get(id_, 0) for tokens in ahead)
        # The KV of the newest token is computed by the next step.
        if left < 0 or (left == 1 and generated):
            left = 0
        cached = self._cached.get(id_, 0)
        # Within a prompt the model's output does not give an end probability.
        end = self._end_probabilities.get(id_) if generated else None
        place = self._places.take(id_)
        while place >= len(self._generated):
            self._generated = np.concatenate((self._generated, np.zeros_like(self._generated)))
        return (id_, prompt, generated, cached, left, end, place)

    def _tell(self, request: EngineRequest, ahead: Sequence[Mapping[str, int]]) -> PlacedRow:
        row = self._row(request, ahead)
        id_, prompt, generated, cached, left, _, place = row
        if id_ not in self._told:
            self._leave_waiting(id_)
        if left:
            self._prefilling.add(id_)
        else:
            self._prefilling.discard(id_)
        self._told[id_] = _Told(prompt, cached, left)
        self._generated[place] = generated - self._ticks
        return row

    def _drop_gone(
        self, running: Set[str], alive: Mapping[str, EngineRequest]
    ) -> tuple[list[str], list[str]]:
        """Remove requests that stopped running without finishing.

        Returns ids that ended though the engine did not report it, and ids that wait again.
        """
        lost, preempted = [], []
        for id_ in self._told.keys() - running:
            self._leave(id_)
            request = alive.get(id_)
            if request is None:
                self._forget(id_)
                lost.append(id_)
            else:
                self._wait(request)
                preempted.append(id_)
        return lost, preempted

    def _forget(self, id_: str) -> None:
        self._leave(id_)
        self._leave_waiting(id_)
        self._requests.pop(id_, None)
        self._cached.pop(id_, None)
        self._end_probabilities.pop(id_, None)

    def _leave(self, id_: str) -> None:
        self._told.pop(id_, None)
        self._places.leave(id_)
        self._prefilling.discard(id_)

    def _wait(self, request: EngineRequest) -> None:
        self._leave_waiting(request.request_id)
        tokens = request.num_prompt_tokens + request.num_output_tokens
        self._waiting[request.request_id] = tokens
        self.waiting_tokens += tokens
        self.waiting_routed += request_token(request.request_id) is not None

    def _leave_waiting(self, id_: str) -> None:
        tokens = self._waiting.pop(id_, None)
        if tokens is not None:
            self.waiting_tokens -= tokens
            self.waiting_routed -= request_token(id_) is not None


def _ids(requests: Iterable[EngineRequest]) -> set[str]:
    return {one.request_id for one in requests}
