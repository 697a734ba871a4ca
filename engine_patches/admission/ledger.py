"""The requests of one engine as admission sees them, updated by events.

A running request grows by one token a step. Its size is kept as an offset to the number of steps,
so a step costs nothing per request. Independent of clocks and engines.

An engine's turn: ``arrived`` at any time, ``preempted`` as memory is freed, then the policy
decides; ``entered``; at the end of the step ``stepped``, and ``left`` for those that ended with it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol, Self

from router.core.kv_blocks import KvBlocks

Key = tuple[float, ...]
"""A place in the order of waiting; the least goes first."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request."""

    id: str
    prompt_tokens: int  # s
    cap_tokens: int  # maximum of output tokens
    hint_tokens: int | None = None  # output length predicted by the client
    kind: int = 0  # type j; set by the ledger if output lengths determine it
    priority: int = 0  # lower goes first
    arrived_s: float = 0.0  # on the engine's clock
    # o_hat, with a margin for error; set by the ledger, again when exceeded.
    predicted_tokens: int = 0
    serial: int = 0  # place in the order of arrival, set by the ledger
    generated_tokens: int = 0  # while it waits, output tokens from before it lost its slot
    late_steps: int = 0  # upper estimate of steps to come that compute its prompt without growth
    offset_tokens: int = 0  # while it runs, its size less the ledger's steps
    # Hashes of its prompt's blocks, each of all tokens up to the block's end.
    prefix: Sequence[Hashable] = ()
    cached_tokens: int = 0  # prompt tokens that it found computed as it entered
    uncomputed_tokens: int = 0  # while it runs, prompt tokens that no step so far computes
    entry: int = 0  # place in the order of entering, from 1; 0 while it waits
    place: tuple[Key, int] = field(default=((), 0), init=False, repr=False)

    @property
    def entry_tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


_TOKENS = KvBlocks.plain()


@dataclass(frozen=True, slots=True)
class Memory:
    """An engine's KV memory before a step is scheduled, in blocks."""

    capacity_blocks: int  # C
    # Blocks held at the end of the step without new requests. Includes running requests' whole
    # prompts and next tokens, and other holders of memory.
    used_blocks: int
    slots_free: int
    kv: KvBlocks = _TOKENS  # blocks that requests take
    step_tokens: int = 0  # maximum of tokens that a step computes; 0: unlimited
    prompt_tokens_left: int = 0  # number of these left for prompts of entering requests
    hashed_tokens: int = 0  # tokens of each hash of a prefix; 0: requests share no memory
    # Blocks that a waiting request would not take, because running ones hold them.
    found: Callable[[Ticket], int] = lambda _: 0
    prompt_chunk: int = 0  # maximum of one request's prompt tokens in a step; 0: unlimited

    def under(self, prompt_budget: int, running: int, promised_tokens: int) -> Self:
        """The same if a step computes so many prompt tokens at most, some promised to prompts."""
        step, left = running + prompt_budget, max(0, prompt_budget - promised_tokens)
        if self.step_tokens:
            step, left = min(step, self.step_tokens), min(left, self.prompt_tokens_left)
        chunk = min(self.prompt_chunk or prompt_budget, prompt_budget)
        return replace(self, step_tokens=step, prompt_tokens_left=left, prompt_chunk=chunk)

    @property
    def capacity_tokens(self) -> int:
        """Longest request that the whole memory holds."""
        return self.kv.tokens(self.capacity_blocks)

    @property
    def used_tokens(self) -> int:
        """Tokens by which a request is now shorter than that."""
        return self.capacity_tokens - self.kv.tokens(self.capacity_blocks - self.used_blocks)

    def late_steps(self, own_tokens: int, before_tokens: int, running: int) -> int:
        """Upper estimate of the steps after this one until a prompt is computed.

        Either the tokens of a step are used up, or the prompt gets a whole chunk.

        Args:
            own_tokens: of the prompt.
            before_tokens: of those that enter before it.
            running: requests, each of which takes a token of a step.
        """
        steps = 0
        if self.step_tokens:
            later = max(0, before_tokens + own_tokens - self.prompt_tokens_left)
            steps = -(-later // max(1, self.step_tokens - running))
        if self.prompt_chunk:
            steps += max(0, -(-own_tokens // self.prompt_chunk) - 1)
        return steps

    def need(self, ticket: Ticket) -> int:
        """Blocks that a waiting request takes as it enters."""
        return max(0, self.kv.entering(ticket.entry_tokens) - self.found(ticket))

    def room(self, limit_blocks: int | None = None) -> int:
        """Blocks that requests may bring within the limit, by default all."""
        limit = self.capacity_blocks
        if limit_blocks is not None:
            limit = min(limit, limit_blocks)
        return max(0, limit - self.used_blocks)


class Lengths(Protocol):
    """Predictions of output lengths."""

    def predict(self, ticket: Ticket, generated_tokens: int) -> int:
        """Predicted output length, more than the tokens generated so far."""

    def kind(self, ticket: Ticket) -> int:
        """The request's type, once its length is predicted."""

    def ended(self, ticket: Ticket, *, by_itself: bool) -> None:
        """``by_itself``: not withdrawn, but possibly capped."""

    def stepped(self, running: Mapping[str, Ticket], steps: int) -> None:
        """``steps`` is the ledger's count after the step."""


class Follower(Protocol):
    """Keeps a sum over the running requests."""

    def gained(self, ticket: Ticket) -> None:
        """Add a request that runs, or whose memory use changed."""

    def lost(self, ticket: Ticket) -> None:
        """Remove a request, or its memory use before a change; its ticket is as when added."""


def engine_order(ticket: Ticket) -> Key:
    """Order by priority, then arrival; preempted requests keep their place."""
    return (ticket.priority, ticket.serial)


class Ledger:
    """Waiting requests in a policy's order, and running requests.

    Args:
        key: waiting order; constant while a request waits.
        lengths: None: each request is predicted to reach its cap.
    """

    def __init__(
        self,
        key: Callable[[Ticket], Key] = engine_order,
        lengths: Lengths | None = None,
        follower: Follower | None = None,
    ) -> None:
        self.steps = 0
        self.running: dict[str, Ticket] = {}  # in the order of entering
        self.arrivals: dict[int, int] = {}
        # Number of requests that ran and ended, by kind; preemptions do not count.
        self.ended: dict[int, int] = {}
        self.waiting_kinds: dict[int, int] = {}  # number of waiting requests, by kind; 1 or more
        self.entered_total = 0  # includes returning requests
        self.preempted_total = 0
        self._key = key
        self._lengths = lengths
        self._follower = follower
        # Requests that wait and cannot run yet; policies do not see them.
        self.postponed: dict[str, Ticket] = {}
        self._waiting: dict[str, Ticket] = {}
        self._order: list[Ticket] = []
        self._serials = 0

    @property
    def waiting(self) -> Sequence[Ticket]:
        """The next to enter first."""
        return self._order

    def size_tokens(self, ticket: Ticket) -> int:
        """KV tokens that a running request holds in the step about to be scheduled."""
        return ticket.offset_tokens + self.steps

    def generated_tokens(self, ticket: Ticket) -> int:
        return self.size_tokens(ticket) - ticket.prompt_tokens

    def arrived(self, ticket: Ticket) -> None:
        assert ticket.id not in self._waiting, "it waits already"
        assert ticket.id not in self.running, "it runs already"
        ticket.serial = self._serials
        self._serials += 1
        self._predict(ticket, ticket.generated_tokens)
        if self._lengths is not None:
            ticket.kind = self._lengths.kind(ticket)
        self.arrivals[ticket.kind] = self.arrivals.get(ticket.kind, 0) + 1
        self._wait(ticket)

    def entered(self, id_: str, *, cached_tokens: int = 0) -> None:
        """Start a waiting request with the step about to be scheduled, or just scheduled."""
        ticket = self._stop_waiting(id_)
        ticket.offset_tokens = ticket.entry_tokens - self.steps
        ticket.cached_tokens = cached_tokens
        self.running[id_] = ticket
        self.entered_total += 1
        ticket.entry = self.entered_total
        self._follow(ticket)

    def postpone(self, id_: str) -> None:
        """The waiting request cannot run yet."""
        self.postponed[id_] = self._stop_waiting(id_)

    def resume(self, id_: str) -> None:
        """The postponed request can run: it waits at its place again."""
        self._wait(self.postponed.pop(id_))

    def preempted(self, id_: str, *, keeps_tokens: bool = True) -> None:
        """The request lost its memory; it waits again."""
        ticket = self._stop_running(id_)
        ticket.generated_tokens = self.generated_tokens(ticket) if keeps_tokens else 0
        ticket.entry = 0
        self.preempted_total += 1
        self._predict(ticket, ticket.generated_tokens)
        self._wait(ticket)

    def left(self, id_: str, *, by_itself: bool = True) -> Ticket:
        """Remove a request that ended (``by_itself``) or was withdrawn."""
        if id_ in self.postponed:
            ticket = self.postponed.pop(id_)
        elif id_ not in self.running:
            ticket = self._stop_waiting(id_)
        else:
            ticket = self._stop_running(id_)
            ticket.generated_tokens = self.generated_tokens(ticket)
            self.ended[ticket.kind] = self.ended.get(ticket.kind, 0) + 1
        if self._lengths is not None:
            self._lengths.ended(ticket, by_itself=by_itself)
        return ticket

    def stepped(self, still: Iterable[str] = ()) -> None:
        """End a step: all running requests grow by one token, except those of ``still``."""
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
        """Set the size of a request that grew by other than one token a step."""
        self._unfollow(ticket)
        ticket.offset_tokens = size_tokens - self.steps
        self._follow(ticket)

    def predict_again(self, ticket: Ticket) -> None:
        """The running request exceeded its prediction."""
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
