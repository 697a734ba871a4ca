"""What the router must be told of an engine's requests, worked out step by step.

Most running requests grow by one token a step, and a delta does not mention them. So what was told
of a request is kept as an offset to the number of deltas, and only those are looked at that did
something else. Knows no vLLM, clock or socket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine_patches.report import Row
from router.wire import request_token


class EngineRequest(Protocol):
    """What is read of an engine's request; tokens that are only scheduled are not output yet."""

    @property
    def request_id(self) -> str:
        """The engine's own id."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or will be by the steps scheduled so far."""
        ...


class Step(NamedTuple):
    """One step of the engine, after its results were taken in.

    Attributes:
        running: requests that run now.
        grown: ids that got exactly one token.
        alive: requests that have not ended, by id.
        ended: ids that have ended lately; one may be named again until ``flushed`` has named it.
        scheduled: tokens that the step computed, by id.
        ahead: the same of steps scheduled since, whose results are still to come.
        end_probabilities: of requests for which it is to be told anew, by id.
    """

    running: Sequence[EngineRequest]
    grown: Set[str]
    alive: Mapping[str, EngineRequest]
    ended: Collection[str]
    scheduled: Mapping[str, int]
    ahead: Sequence[Mapping[str, int]] = ()
    end_probabilities: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Changes:
    """What a delta says of a step.

    Attributes:
        rows: requests that are new or did not just grow by one; some may have finished.
        finished: ids that ended, whether they ran or only waited.
        preempted: ids that lost their slot and wait again.
        prefill_tokens: those of the step's tokens that computed prompts, or after a preemption
            what had been computed before.
    """

    rows: list[Row]
    finished: tuple[str, ...]
    preempted: tuple[str, ...]
    prefill_tokens: int


_NOTHING = Changes([], (), (), 0)


class _Told(NamedTuple):
    """What does not change while a request grows by one token a step."""

    prompt_tokens: int
    cached_tokens: int
    prefill_left: int
    generated_tokens: int


class EngineState:
    """The running requests as a router knows them that has read every delta.

    Attributes:
        waiting_tokens: prompt and generated tokens of the requests that wait.
        waiting_routed: those of them that routers have sent.
    """

    def __init__(self) -> None:
        self.waiting_tokens = 0
        self.waiting_routed = 0
        self._deltas = 0
        # Generated tokens less deltas so far; None while a request is in prefill.
        self._offsets: dict[str, int | None] = {}
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
        """Requests that run."""
        return len(self._offsets)

    def rows(self) -> list[Row]:
        """All running requests, as a full snapshot lists them."""
        deltas, told, ends = self._deltas, self._told, self._end_probabilities
        rows: list[Row] = []
        for id_, offset in self._offsets.items():
            prompt, cached, left, generated = told[id_]
            grown = generated if offset is None else offset + deltas
            rows.append((id_, prompt, grown, cached, left, ends.get(id_) if grown else None))
        return rows

    def arrived(self, request: EngineRequest) -> None:
        """A request waits in the engine."""
        self._requests[request.request_id] = request
        self._leave_waiting(request.request_id)
        self._wait(request)

    def admitted(self, id_: str, cached_tokens: int) -> None:
        """A request got a slot, this much of it found in a cache."""
        self._cached[id_] = cached_tokens
        self._entered.add(id_)

    def flushed(self, ids: Iterable[str]) -> None:
        """The engine will not name these ends again."""
        for id_ in ids:
            if id_ in self._ended:
                self._ended.discard(id_)
            else:
                self._unseen.add(id_)

    def changed(self, step: Step) -> bool:
        """Whether a step that computed nothing is worth a message."""
        return bool(
            self._unseen
            or self._entered
            or not self._ended.issuperset(step.ended)
            or len(step.running) != len(self._offsets)
        )

    def advance(self, step: Step) -> Changes:
        """Take in a step: one more delta."""
        self._deltas += 1
        odd = self._odd(step.grown)
        if step.end_probabilities:
            self._end_probabilities.update(step.end_probabilities)
            odd |= self._offsets.keys() & step.end_probabilities.keys()
        same = len(self._offsets) == len(step.running)
        if same and not (odd or step.ended or self._unseen):
            return _NOTHING
        prefill_tokens = self._prefilled(odd, step.scheduled)
        finished = self._newly_ended(step.ended)
        rows: list[Row] = []
        if finished:
            rows = self._last_rows(odd.intersection(finished), step)
            for id_ in finished:
                self._forget(id_)
            odd.difference_update(finished)
        preempted: list[str] = []
        if len(self._offsets) + len(odd - self._offsets.keys()) != len(step.running):
            running = {request.request_id for request in step.running}
            lost, preempted = self._drop_gone(running, step.alive)
            finished += lost
            odd = (odd & running) | (running - self._offsets.keys())
        rows += [self._tell(step.alive[id_], step.ahead) for id_ in sorted(odd)]
        return Changes(rows, tuple(finished), tuple(preempted), prefill_tokens)

    def _odd(self, grown: Set[str]) -> set[str]:
        """Requests that did not just grow by one, or may not have."""
        offsets = self._offsets.keys()
        odd = set() if offsets <= grown else offsets - grown
        odd |= self._prefilling
        odd |= self._entered
        self._entered.clear()
        return odd

    def _newly_ended(self, ended: Collection[str]) -> list[str]:
        """Ids that ended and were not reported yet."""
        finished = [*self._unseen, *(id_ for id_ in ended if id_ not in self._ended)]
        self._unseen.clear()
        self._ended.update(ended)
        return finished

    def _last_rows(self, ids: Iterable[str], step: Step) -> list[Row]:
        """Those of these requests that ended with this step."""
        return [
            self._row(self._requests[id_], step.ahead)
            for id_ in sorted(ids)
            if id_ in step.scheduled and id_ in self._requests
        ]

    def _prefilled(self, ids: Iterable[str], scheduled: Mapping[str, int]) -> int:
        """Tokens of the step that went to requests so far in prefill."""
        return sum(scheduled.get(id_, 0) for id_ in ids if self._offsets.get(id_) is None)

    def _row(self, request: EngineRequest, ahead: Sequence[Mapping[str, int]]) -> Row:
        id_ = request.request_id
        prompt, generated = request.num_prompt_tokens, request.num_output_tokens
        left = prompt + generated - request.num_computed_tokens
        left += sum(tokens.get(id_, 0) for tokens in ahead)
        # The KV of the newest token is computed by the step that follows it.
        if left < 0 or (left == 1 and generated):
            left = 0
        cached = self._cached.get(id_, 0)
        # In the midst of a prompt the model does not say how likely an end is.
        end = self._end_probabilities.get(id_) if generated else None
        return (id_, prompt, generated, cached, left, end)

    def _tell(self, request: EngineRequest, ahead: Sequence[Mapping[str, int]]) -> Row:
        row = self._row(request, ahead)
        id_, prompt, generated, cached, left, _ = row
        if id_ not in self._offsets:
            self._leave_waiting(id_)
        if left:
            self._offsets[id_] = None
            self._prefilling.add(id_)
        else:
            self._offsets[id_] = generated - self._deltas
            self._prefilling.discard(id_)
        self._told[id_] = _Told(prompt, cached, left, generated)
        return row

    def _drop_gone(
        self, running: Set[str], alive: Mapping[str, EngineRequest]
    ) -> tuple[list[str], list[str]]:
        """Forget what does not run any more, though it did not finish.

        Returns:
            Ids that are no more though the engine did not say so, and ids that wait again.
        """
        lost, preempted = [], []
        for id_ in self._offsets.keys() - running:
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
        self._offsets.pop(id_, None)
        self._told.pop(id_, None)
        self._prefilling.discard(id_)

    def _wait(self, request: EngineRequest) -> None:
        tokens = request.num_prompt_tokens + request.num_output_tokens
        self._waiting[request.request_id] = tokens
        self.waiting_tokens += tokens
        self.waiting_routed += request_token(request.request_id) is not None

    def _leave_waiting(self, id_: str) -> None:
        tokens = self._waiting.pop(id_, None)
        if tokens is not None:
            self.waiting_tokens -= tokens
            self.waiting_routed -= request_token(id_) is not None
