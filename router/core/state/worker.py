"""The router's view of one worker: its engine's state, and dispatches not shown yet.

A dispatch counts from its sending to the first snapshot that shows it, however stale that one is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from router.core.energy.joules import AgentMeter
from router.core.events import PromptCounted
from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import NO_CAP
from router.core.prefix.hit_totals import HitTotals
from router.core.state.breaker import Breaker
from router.core.state.feed import Feed
from router.core.state.foreign_load import ForeignLoad, Gauges
from router.core.state.rates import GroupRates, ServiceRate, TokenRate
from router.core.state.running_table import WorkerRows
from router.core.types import (
    DEFAULT_SLOTS,
    Dispatch,
    Request,
    RunningRequest,
    Sight,
    Snapshot,
    StateSource,
    WorkerSpec,
    WorkerView,
)

UNBOUNDED = 1 << 30
_MOST_ABORTED = 4096
_NOT_CHECKED = "not checked yet"


@dataclass(slots=True)
class _InFlight:
    """A dispatched request."""

    request: Request
    numbers: list[int] = field(default_factory=list)  # look-ahead ids of its hidden parts
    finished: int = 0
    generated_tokens: int = 0  # output of all engine requests that are not shown
    from_tokens: int = 0  # part of it that a feed's departures have reported
    uncounted: int = 1  # prompts that have not taught the token rate yet
    told_tokens: int = 0  # prompt length by the engine's count; 0 until known
    ended_tokens: int = 0  # output of ended engine requests, by the feed
    streamed_tokens: int = 0  # output of all, by its stream or whole answer
    cached_tokens: int = 0  # part of its prompt that was cached when it was sent, if known
    compared: bool = True  # whether the engine has told the same, or nothing was known
    # Steps of its engine, in fractions, until it was sent; None unless it could begin at once.
    sent_at: float | None = None
    refused: bool = False

    @property
    def max_tokens(self) -> int:
        return NO_CAP if self.request.max_tokens is None else self.request.max_tokens


class Worker:
    """One worker: its engine's feed, if any, and this router's requests on it.

    Attributes:
        gaps, preemptions: sums over lost feeds, without the present one.
    """

    def __init__(
        self, spec: WorkerSpec, rows: WorkerRows, departures: list[Departure], token_rate: TokenRate
    ) -> None:
        self.spec = spec
        self.rows = rows  # its running requests in the look-ahead's table
        self.departures = departures  # list that receives requests that stopped running
        self.trouble: str | None = _NOT_CHECKED  # trouble of its own engine; None while healthy
        self.down_reason: str | None = self.trouble  # None while live
        self.draining = False  # true if it receives no more requests
        self.ranks = 0  # as its engine told last, also before it went down
        self.unreported: tuple[str, ...] = ()  # likewise: what its plug-in cannot read
        self.aside = 0  # requests under way that bypass the pool and need no slot
        self.breaker = Breaker()
        self.service: ServiceRate = GroupRates().join(spec.service_rate)
        self.feed: Feed | None = None  # state by snapshots; None without fresh ones
        self.foreign = ForeignLoad()  # load of other clients by gauges, without a feed
        self.meter = AgentMeter()  # its power by an agent
        self.hit_totals = HitTotals()  # its group's
        self._token_rate = token_rate
        self._asked: set[str] = set()
        self.gaps = self.preemptions = 0
        self._in_flight: dict[str, _InFlight] = {}
        self._aborted: dict[str, None] = {}
        # Number of engine requests that no snapshot shows, by token.
        self.unseen: dict[str, int] = {}
        self._view: WorkerView | None = None  # the last one, while it holds but for the rates
        self._view_of = (Dispatch.POOL, 0)
        self._rates_version = -1

    def amend(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._changed()

    def drain(self, draining: bool) -> None:
        self.draining = draining
        self._changed()

    def engine_failed(self) -> None:
        self.breaker.fell()
        self._changed()

    def _changed(self) -> None:
        self._view = None
        self.rows.change()

    @property
    def live(self) -> bool:
        return self.down_reason is None

    @property
    def takes(self) -> bool:
        return self.live and not self.draining

    @property
    def empty(self) -> bool:
        return not self._in_flight and not self.aside

    @property
    def slots(self) -> int:
        """Engine requests that run at once: configured, else reported, else a default."""
        return self.spec.slots or (self.feed.slots if self.feed else 0) or DEFAULT_SLOTS

    @property
    def source(self) -> StateSource:
        if self.feed is not None:
            return StateSource.SNAPSHOTS
        return StateSource.OWN if self.foreign.gauges is None else StateSource.METRICS

    @property
    def full_wanted(self) -> bool:
        return self.feed is None or self.feed.full_wanted

    @property
    def gauges_wanted(self) -> bool:
        return self.live and self.feed is None

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def load_tokens(self) -> int:
        return self._known_tokens() + self.foreign.load_tokens

    def _known_tokens(self) -> int:
        return self._unseen_tokens() + (self.feed.load_tokens if self.feed else 0)

    def _pending_prompt_tokens(self) -> int:
        """Prompt tokens to compute here; all that is not cached of requests not shown.

        Without snapshots a prompt counts until its first output token.
        """
        feed, pending = self.feed, 0
        for token, parts in self.unseen.items():
            flight = self._in_flight[token]
            due = feed is not None or not flight.generated_tokens
            if due and not flight.request.computed:
                pending += parts * (flight.request.prompt_tokens - flight.cached_tokens)
        if feed is not None:
            pending += feed.prefill_left
            # Routers' requests in the queue are among those not shown.
            if feed.waiting and self.spec.role != "decode":
                others = feed.waiting - feed.waiting_routed
                pending += feed.last.waiting_tokens * others // feed.waiting
        return pending

    def _unseen_tokens(self) -> int:
        flights = [(parts, self._in_flight[token]) for token, parts in self.unseen.items()]
        return sum([n * one.request.prompt_tokens + one.generated_tokens for n, one in flights])

    @property
    def requests(self) -> int:
        feed, unseen = self.feed, sum(self.unseen.values())
        if feed is None:
            return unseen + self.foreign.requests
        # Queued requests of routers may be the very ones not shown as running.
        return feed.running + feed.waiting + max(0, unseen - feed.waiting_routed)

    def open_slots(self, running: int) -> int:
        return max(0, self.slots - running) if self.breaker.calm else 0

    @property
    def free_slots(self) -> int:
        return max(0, self.slots - self.requests)

    def receive(self, snapshot: Snapshot, received_s: float) -> Feed | None:
        self._changed()
        if self.feed is None:
            self._note_own()
            self.feed = Feed(self.rows, self._claim, self._asked)
            self.foreign.suspend(received_s)
        feed = self.feed
        ended = feed.apply(snapshot, received_s)
        if ended is None:
            return None
        for token in filter(self._in_flight.__contains__, ended):
            self._in_flight[token].finished += 1
        if ended or feed.changed:
            self._recount(feed.changed.union(ended))
        self._note_departures(feed)
        return feed

    def power_w(self, now_s: float) -> float | None:
        own_w = None if self.feed is None else self.feed.last.power_w
        return self.meter.power_w(now_s) if own_w is None else own_w

    def lose_feed(self) -> None:
        assert self.feed is not None
        self.meter.replaced = False
        for token, flight in self._in_flight.items():
            flight.generated_tokens = flight.from_tokens = self.feed.generated_by_token(token)
        self.gaps += self.feed.gaps
        self.preemptions += self.feed.preemptions
        self.feed.clear()
        self._note_departures(self.feed)
        self.feed = None
        self._recount(self._in_flight)

    def read(self, gauges: Gauges | None, now_s: float) -> None:
        if gauges is None or self.feed is not None:
            self.forget_others()
            return
        self._changed()
        self._note_own()
        self.foreign.receive(gauges, now_s)
        self._note_own()

    def forget_others(self) -> None:
        self._changed()
        self.foreign.clear()

    def _note_own(self) -> None:
        if self.feed is None:  # else the counts include other clients' load
            foreign, tokens = self.foreign, self._unseen_tokens()
            foreign.own_requests = max(foreign.own_requests, sum(self.unseen.values()))
            foreign.own_tokens = max(foreign.own_tokens, tokens)

    def add(self, request: Request, now_s: float | None, cached_tokens: int | None) -> None:
        """Count a request on its way; the engine has this much of its prompt cached, if known."""
        if not self.breaker.calm:
            self.breaker.sent(request.id)
        self.service.sent(request.slots, self.slots, now_s)
        flight = _InFlight(request, uncounted=request.slots, cached_tokens=cached_tokens or 0)
        flight.compared = cached_tokens is None
        if (feed := self.feed) is not None and feed.running and self.free_slots:
            # One that is fetched waits for its KV.
            ahead = feed.waiting or request.computed or self._pending_prompt_tokens()
            flight.sent_at = None if ahead else feed.steps_at(now_s)
        self._in_flight[request.id] = flight
        if request.metered:
            self._asked.add(request.id)
        self._recount((request.id,))

    def progress(self, request_id: str, generated_tokens: int) -> int:
        """Record streamed output tokens; returns the new ones, 0 with a feed."""
        flight = self._in_flight[request_id]
        flight.streamed_tokens = generated_tokens
        if self.feed is not None:
            return 0
        before = flight.generated_tokens
        flight.generated_tokens = max(0, generated_tokens - flight.ended_tokens)
        self._changed()
        return flight.generated_tokens - before

    def count(self, counted: PromptCounted) -> None:
        """A feed may have shown the prompt before."""
        flight = self._in_flight[counted.request_id]
        self.progress(counted.request_id, max(flight.streamed_tokens, counted.output_tokens))
        self._learn(flight, counted.prompt_tokens)

    def served(self, request_id: str, *, complete: bool) -> tuple[int, int]:
        """Known tokens of prompt and output.

        A completed request has one token more than the last snapshot shows, or several by its
        answer, with drafts. A very short one is known from its answer only.
        """
        flight = self._in_flight[request_id]
        output = flight.ended_tokens
        if self.feed is None:
            output += flight.generated_tokens
        elif parts := self.feed.running_by_token.get(request_id, 0):
            output += self.feed.generated_by_token(request_id) + complete * parts
            output = max(output, complete * flight.streamed_tokens)
        prompt = flight.told_tokens or flight.request.prompt_tokens
        return prompt, output or flight.streamed_tokens

    def sight(self, request_id: str) -> Sight:
        flight, feed = self._in_flight[request_id], self.feed
        if feed is None or feed.running_by_token.get(request_id):
            return Sight.HERE
        if flight.finished >= flight.request.slots:
            return Sight.ENDED
        if feed.waiting_routed:  # it may be among them
            return Sight.HERE
        return Sight.LOST if flight.uncounted < flight.request.slots else Sight.UNSEEN

    def refused(self, request_id: str) -> None:
        if request_id in self._in_flight:
            self._in_flight[request_id].refused = True

    def has_refused(self, request_id: str) -> bool:
        return self._in_flight[request_id].refused

    def remove(self, request_id: str, *, complete: bool, now_s: float | None = None) -> None:
        """Stop counting a request; an incomplete one counts until its engine has dropped it."""
        self._note_own()
        if complete and self.feed is not None:
            self.feed.forget(request_id)
            self._note_departures(self.feed)
        if not complete:
            self._aborted[request_id] = None
            if len(self._aborted) > _MOST_ABORTED:
                del self._aborted[next(iter(self._aborted))]
        if self.feed is None:
            for number, prompt, generated, cap, seen in self._unseen_parts(request_id):
                left = Departure(number, prompt, generated, complete, cap, from_tokens=seen)
                self.departures.append(left)
        flight = self._in_flight.pop(request_id)
        self.service.gone(flight.request.slots, now_s, complete=complete and not flight.refused)
        self._asked.discard(request_id)
        self.breaker.gone(request_id)
        self._recount((request_id,))

    def view(self, dispatch: Dispatch, overcommit: int = 0) -> WorkerView:
        """Made anew only where something has changed."""
        if self._view is None or self._view_of != (dispatch, overcommit):
            self._view = self.fresh_view(dispatch, overcommit)
            self._view_of = dispatch, overcommit
        elif self._rates_version != self.service.group.version:
            per_s, error = self.service.estimate()
            self._view = msgspec.structs.replace(self._view, service_rate=per_s, rate_error=error)
        self._rates_version = self.service.group.version
        # These change without notice, and seldom: such a view is not kept.
        held_back = self.draining or not self.breaker.calm
        return self._held_back(self._view) if held_back else self._view

    def _held_back(self, view: WorkerView) -> WorkerView:
        breaker = self.breaker
        left = 0 if self.draining else breaker.capacity(view.capacity, self.slots, view.requests)
        return msgspec.structs.replace(view, capacity=left)

    def fresh_view(self, dispatch: Dispatch, overcommit: int = 0) -> WorkerView:
        feed, foreign, pooled = self.feed, self.foreign, dispatch is Dispatch.POOL
        requests, slots, tokens, blocks, kv = self.requests, self.slots, None, None, None
        unseen_tokens = self._unseen_tokens() if self.unseen else 0
        load_tokens = unseen_tokens + foreign.load_tokens
        if feed is not None:
            load_tokens += feed.load_tokens
            if pooled and feed.last.admissible_kv_tokens is not None:
                tokens = max(0, feed.last.admissible_kv_tokens - unseen_tokens)
            if pooled and feed.last.admissible_blocks is not None and feed.kv is not None:
                kv, blocks = feed.kv, feed.last.admissible_blocks
                for token, parts in self.unseen.items():
                    flight = self._in_flight[token]
                    held = flight.request.prompt_tokens + flight.generated_tokens // parts
                    blocks -= parts * kv.entering(held)
                blocks = max(0, blocks)
        max_loras = feed.last.max_loras if pooled and feed else 0
        named = (flight.request.adapter for flight in self._in_flight.values())
        shown = feed or foreign.gauges
        per_s, error = self.service.estimate()
        return WorkerView(
            id=self.spec.id,
            load_tokens=load_tokens,
            requests=requests,
            capacity=max(0, slots + overcommit - requests) if pooled else UNBOUNDED,
            waiting=shown.waiting if shown else 0,
            kv_usage=shown.kv_usage if shown else 0.0,
            admissible_tokens=tokens,
            slots=slots,
            service_rate=per_s,
            rate_error=error,
            pending_prompt_tokens=self._pending_prompt_tokens(),
            admissible_blocks=blocks,
            kv=kv,
            max_loras=max_loras,
            adapters=Counter(filter(None, named)) if max_loras else {},
        )

    def foreseen(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Parts that no snapshot shows: id, prompt, generated tokens, cap, ``from_tokens``."""
        return chain.from_iterable(map(self._unseen_parts, self.unseen))

    def _unseen_parts(self, token: str) -> list[tuple[int, int, int, int, int]]:
        """A request's tokens are divided between its hidden parts."""
        flight, parts = self._in_flight[token], self.unseen.get(token, 0)
        while len(flight.numbers) < parts:
            flight.numbers.append(self.rows.new_id())
        prompt, cap = flight.request.prompt_tokens, flight.max_tokens
        generated, seen = flight.generated_tokens, flight.from_tokens
        return [
            (number, prompt, (generated + part) // parts, cap, (seen + part) // parts)
            for part, number in enumerate(flight.numbers[:parts])
        ]

    def _claim(self, token: str, told: RunningRequest) -> tuple[int, int | None]:
        flight = self._in_flight.get(token)
        if flight is None:
            return NO_CAP, None
        self._learn(flight, told.prompt_tokens)
        if flight.sent_at is not None and self.feed is not None:
            self.service.group.delay.learn(self.feed.last.step - flight.sent_at - 1)
            flight.sent_at = None
        # Of several parts the first: the others may hit its blocks.
        if not (flight.compared or "cached_tokens" in self.unreported):
            flight.compared = True
            self.hit_totals.compare(told.prompt_tokens, flight.cached_tokens, told.cached_tokens)
        return flight.max_tokens, flight.numbers.pop(0) if flight.numbers else None

    def _learn(self, flight: _InFlight, prompt_tokens: int) -> None:
        """Learn each prompt once, though it reappears after a preemption or in a new feed."""
        flight.told_tokens = prompt_tokens
        if flight.uncounted:
            flight.uncounted -= 1
            self._token_rate.learn(flight.request.text_bytes, prompt_tokens, flight.request.parts)

    def _recount(self, tokens: Iterable[str]) -> None:
        self._changed()
        running: Mapping[str, int] = self.feed.running_by_token if self.feed else {}
        for token in tokens:
            self.unseen.pop(token, None)
            if (flight := self._in_flight.get(token)) is not None:
                parts = flight.request.slots - flight.finished - running.get(token, 0)
                if parts > 0:
                    self.unseen[token] = parts

    def _note_departures(self, feed: Feed) -> None:
        """Collect departures; own requests that left before the engine dropped them: aborted.

        Those of other routers count as their engines tell.
        """
        for token, departure in feed.departures:
            flight = None if token is None else self._in_flight.get(token)
            if flight is not None:
                flight.ended_tokens += departure.completed * departure.generated_tokens
            elif token in self._aborted:
                departure = msgspec.structs.replace(departure, completed=False)
            self.departures.append(departure)
        feed.departures.clear()
        feed.changed.clear()
