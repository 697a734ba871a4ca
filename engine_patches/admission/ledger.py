"""The requests of one engine as admission knows them, kept up event by event.

While a request runs it grows by one token a step, so its size is kept as an offset to the number of
steps: a step costs nothing per request. Knows no clock and no engine.

In each turn of an engine: ``arrived`` at any time, ``preempted`` as the engine makes room, then the
policy decides, ``entered`` for whom the engine took in, ``stepped`` when the step is over, and then
``left`` for those that ended with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

Key = tuple[float, ...]
"""A place in the order of waiting; the least goes first."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request.

    Attributes:
        id: the engine's own.
        prompt_tokens: s, those of the prompt.
        cap_tokens: output tokens at which it ends at the latest.
        hint_tokens: output tokens at which its client says that it ends; None: it does not say.
        kind: its type j, for thresholds per type; given by the ledger where output lengths say it.
        priority: lower goes first.
        arrived_s: when it came, on the engine's clock.
        predicted_tokens: o_hat, output tokens at which it is taken to end, a margin for error
            included; given by the ledger, and new when the request surpasses it.
        serial: its place in the order of arrival, given by the ledger.
        generated_tokens: while it waits, output tokens that it had before it lost its slot.
        late_steps: steps at most in which its prompt is computed and it does not grow, still to
            come, as its policy sees it.
        offset_tokens: while it runs, its size less the ledger's steps.
    """

    id: str
    prompt_tokens: int
    cap_tokens: int
    hint_tokens: int | None = None
    kind: int = 0
    priority: int = 0
    arrived_s: float = 0.0
    predicted_tokens: int = 0
    serial: int = 0
    generated_tokens: int = 0
    late_steps: int = 0
    offset_tokens: int = 0
    place: tuple[Key, int] = field(default=((), 0), init=False, repr=False)

    @property
    def entry_tokens(self) -> int:
        """KV tokens that it takes when it enters."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def end_step(self) -> int:
        """The step, as ``Ledger.steps`` counts, in which it is taken to end, if it runs."""
        return self.prompt_tokens + self.predicted_tokens - 1 - self.offset_tokens


@dataclass(frozen=True, slots=True)
class Memory:
    """An engine's KV memory as a step is about to be scheduled.

    Attributes:
        capacity_tokens: C, all of it.
        used_tokens: what is held when the step has ended if nobody enters, in whole blocks: running
            requests with the token that they compute in it and the whole of their prompts, and
            whatever else holds memory.
        slots_free: requests that may enter.
        block_tokens: granularity of the memory.
        step_tokens: tokens that a step computes at most; 0: any number.
        prompt_tokens_left: of these, those left for prompts of requests that enter.
    """

    capacity_tokens: int
    used_tokens: int
    slots_free: int
    block_tokens: int = 1
    step_tokens: int = 0
    prompt_tokens_left: int = 0

    def late_steps(self, prompt_tokens: int, running: int) -> int:
        """Steps after this one until so many tokens of prompts are computed, beside so many."""
        if not self.step_tokens:
            return 0
        later = max(0, prompt_tokens - self.prompt_tokens_left)
        return -(-later // max(1, self.step_tokens - running))

    def rounded(self, tokens: int) -> int:
        """Tokens of memory that so many tokens take."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def room(self, limit_tokens: int) -> int:
        """Tokens that a request may have so that, when it has entered, the limit is kept."""
        free = min(limit_tokens, self.capacity_tokens) - self.used_tokens
        return max(0, free // self.block_tokens * self.block_tokens)


class Lengths(Protocol):
    """What is known of output lengths before they end."""

    def predict(self, ticket: Ticket, generated_tokens: int) -> int:
        """Output tokens at which it is taken to end, now that it has so many; more than those."""
        ...

    def kind(self, ticket: Ticket) -> int:
        """Its type, once its length is predicted."""
        ...

    def ended(self, ticket: Ticket, *, by_itself: bool) -> None:
        """A request is over; ``by_itself``: not withdrawn, though its cap may have ended it."""
        ...

    def stepped(self, running: Mapping[str, Ticket], steps: int) -> None:
        """A step is over, the ledger's ``steps`` after it."""
        ...


class Follower(Protocol):
    """Who keeps a sum over the running requests."""

    def gained(self, ticket: Ticket) -> None:
        """It runs, or will hold other memory than before."""
        ...

    def lost(self, ticket: Ticket) -> None:
        """It runs no more, or will hold other memory; the ticket is as it was when gained."""
        ...


def engine_order(ticket: Ticket) -> Key:
    """The engine's own order: priority, then arrival; who lost a slot has its place back."""
    return (ticket.priority, ticket.serial)


class Ledger:
    """Who waits, in a policy's order, and who runs.

    Args:
        key: order of waiting; must not change while a request waits.
        lengths: predicts output lengths; None: each request is taken to end at its cap.
        follower: is told who runs.

    Attributes:
        steps: steps so far.
        running: by id, in the order of entering.
        arrivals: requests that have come, by kind.
        waiting_kinds: requests that wait, by kind; 1 or more.
        entered_total: entries, those of returning requests included.
        preempted_total: slots lost.
        ended: requests that ran and run no more, but for those that lost their slot; by kind.
    """

    def __init__(
        self,
        key: Callable[[Ticket], Key] = engine_order,
        lengths: Lengths | None = None,
        follower: Follower | None = None,
    ) -> None:
        self.steps = 0
        self.running: dict[str, Ticket] = {}
        self.arrivals: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.waiting_kinds: dict[int, int] = {}
        self.entered_total = 0
        self.preempted_total = 0
        self._key = key
        self._lengths = lengths
        self._follower = follower
        self._waiting: dict[str, Ticket] = {}
        self._order: list[Ticket] = []
        self._serials = 0

    @property
    def waiting(self) -> Sequence[Ticket]:
        """Who waits, the first to enter first."""
        return self._order

    def by_id(self) -> Mapping[str, Ticket]:
        """Who waits, by id."""
        return self._waiting

    def size_tokens(self, ticket: Ticket) -> int:
        """KV tokens that a running request holds in the step about to be scheduled."""
        return ticket.offset_tokens + self.steps

    def generated_tokens(self, ticket: Ticket) -> int:
        """Output tokens that a running request has."""
        return self.size_tokens(ticket) - ticket.prompt_tokens

    def arrived(self, ticket: Ticket) -> None:
        """A request waits."""
        assert ticket.id not in self._waiting, "it waits already"
        assert ticket.id not in self.running, "it runs already"
        ticket.serial = self._serials
        self._serials += 1
        self._predict(ticket, ticket.generated_tokens)
        if self._lengths is not None:
            ticket.kind = self._lengths.kind(ticket)
        self.arrivals[ticket.kind] = self.arrivals.get(ticket.kind, 0) + 1
        self._wait(ticket)

    def entered(self, id_: str) -> None:
        """A waiting request runs from the step about to be scheduled, or just scheduled, on."""
        ticket = self._stop_waiting(id_)
        ticket.offset_tokens = ticket.entry_tokens - self.steps
        self.running[id_] = ticket
        self.entered_total += 1
        self._follow(ticket)

    def preempted(self, id_: str, *, keeps_tokens: bool = True) -> None:
        """A running request lost its memory and waits again."""
        ticket = self._stop_running(id_)
        ticket.generated_tokens = self.generated_tokens(ticket) if keeps_tokens else 0
        self.preempted_total += 1
        self._predict(ticket, ticket.generated_tokens)
        self._wait(ticket)

    def left(self, id_: str, *, by_itself: bool = True) -> Ticket:
        """A request has ended (``by_itself``), or was withdrawn; it is given back."""
        if id_ not in self.running:
            ticket = self._stop_waiting(id_)
        else:
            ticket = self._stop_running(id_)
            ticket.generated_tokens = self.generated_tokens(ticket)
            self.ended[ticket.kind] = self.ended.get(ticket.kind, 0) + 1
        if self._lengths is not None:
            self._lengths.ended(ticket, by_itself=by_itself)
        return ticket

    def stepped(self, still: Iterable[str] = ()) -> None:
        """A step is over: all running requests grew by one token, but for those of ``still``."""
        for id_ in still:
            ticket = self.running[id_]
            self._unfollow(ticket)
            ticket.offset_tokens -= 1
            ticket.late_steps = max(0, ticket.late_steps - 1)
            self._follow(ticket)
        self.steps += 1
        if self._lengths is not None:
            self._lengths.stepped(self.running, self.steps)

    def resized(self, ticket: Ticket, size_tokens: int) -> None:
        """A running request has grown by more or less than a token a step."""
        self._unfollow(ticket)
        ticket.offset_tokens = size_tokens - self.steps
        self._follow(ticket)

    def predict_again(self, ticket: Ticket) -> None:
        """A running request has surpassed its prediction: it gets another."""
        self._unfollow(ticket)
        self._predict(ticket, self.generated_tokens(ticket))
        self._follow(ticket)

    def _predict(self, ticket: Ticket, generated: int) -> None:
        lengths = self._lengths
        predicted = ticket.cap_tokens if lengths is None else lengths.predict(ticket, generated)
        ticket.predicted_tokens = max(predicted, generated + 1)

    def _wait(self, ticket: Ticket) -> None:
        ticket.place = (self._key(ticket), ticket.serial)
        self._waiting[ticket.id] = ticket
        self.waiting_kinds[ticket.kind] = self.waiting_kinds.get(ticket.kind, 0) + 1
        insort(self._order, ticket, key=_PLACE)

    def _stop_waiting(self, id_: str) -> Ticket:
        ticket = self._waiting.pop(id_)
        self.waiting_kinds[ticket.kind] -= 1
        if not self.waiting_kinds[ticket.kind]:
            del self.waiting_kinds[ticket.kind]
        del self._order[bisect_left(self._order, ticket.place, key=_PLACE)]
        return ticket

    def _stop_running(self, id_: str) -> Ticket:
        self._unfollow(self.running[id_])
        return self.running.pop(id_)

    def _follow(self, ticket: Ticket) -> None:
        if self._follower is not None:
            self._follower.gained(ticket)

    def _unfollow(self, ticket: Ticket) -> None:
        if self._follower is not None:
            self._follower.lost(ticket)


_PLACE = attrgetter("place")
