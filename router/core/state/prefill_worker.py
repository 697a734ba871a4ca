"""A worker that computes prompts for others, and keeps their KV until it is fetched.

Its load is the prompt tokens still to be computed. It receives the next prompt shortly before it
runs out of work: prompts wait in the router and go where work ends first. It needs memory left
beside the KV that it keeps.
"""

from dataclasses import replace

from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import DEFAULT_CHUNK
from router.core.state.feed import Feed
from router.core.state.rates import TokenRate
from router.core.state.running_table import WorkerRows
from router.core.state.worker import Worker
from router.core.types import Dispatch, Request, Snapshot, WorkerSpec, WorkerView

# Share of its KV memory for prompts being computed or kept.
MEMORY_SHARE = 0.9
# While one chunk is computed, the next must be at hand.
CHUNKS_AHEAD = 2
# Steps with prompts after which an older one counts 1/e.
_STEPS = 200


class PrefillWorker(Worker):
    """One prefill worker."""

    def __init__(
        self, spec: WorkerSpec, rows: WorkerRows, departures: list[Departure], token_rate: TokenRate
    ) -> None:
        super().__init__(spec, rows, departures, token_rate)
        # Prompt tokens that its engine computes in a step, unless it shows more.
        self.chunk_tokens = DEFAULT_CHUNK
        self.kept_tokens = 0  # KV tokens of computed prompts that are not known to be fetched
        self.refusing = False  # true for a moment after it has rejected a prompt
        self._kept: dict[str, tuple[int, float]] = {}
        self._handed_out: dict[str, int] = {}
        self._left: set[str] = set()
        self._computed_s = self._computed_tokens = 0.0

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token, by its steps; 0: not known yet."""
        return self._computed_s / self._computed_tokens if self._computed_tokens else 0.0

    def receive(self, snapshot: Snapshot, received_s: float) -> Feed | None:
        if snapshot.scheduled_prefill_tokens:
            kept = 1 - 1 / _STEPS
            self._computed_s = kept * self._computed_s + snapshot.step_s
            self._computed_tokens = kept * self._computed_tokens + snapshot.scheduled_prefill_tokens
        return super().receive(snapshot, received_s)

    @property
    def empty(self) -> bool:
        return super().empty and not self._kept

    @property
    def kv_tokens(self) -> int:
        if self.feed is not None:
            return self.feed.kv_tokens
        return self.foreign.gauges.kv_tokens if self.foreign.gauges else 0

    @property
    def load_tokens(self) -> int:
        """Without a feed other clients' prompts do not count: gauges show only KV."""
        return self._pending_prompt_tokens()

    def add(self, request: Request, now_s: float | None, cached_tokens: int | None) -> None:
        """Count one slot: a prompt is computed once, whatever ``n`` is."""
        super().add(replace(request, slots=1), now_s, cached_tokens)

    def keep(self, request_id: str, tokens: int, until_s: float) -> None:
        self._kept[request_id] = tokens, until_s
        self.kept_tokens += tokens

    def keeps(self, request_id: str) -> bool:
        return request_id in self._kept

    def hand_out(self, request_id: str) -> None:
        if request_id in self._kept:
            self._handed_out[request_id] = self._kept[request_id][0]

    def take_back(self, request_id: str) -> None:
        """The decode worker gave up; its KV may still be here."""
        if request_id in self._handed_out:
            self._left.add(request_id)

    def drop(self, request_id: str) -> None:
        self._handed_out.pop(request_id, None)
        self._left.discard(request_id)
        self.kept_tokens -= self._kept.pop(request_id, (0, 0.0))[0]

    def expire(self, now_s: float) -> int:
        """Drop KV past its lease; returns the KV tokens that were kept in vain.

        A decode worker that still answers fetched its KV long ago, even if no byte of a whole
        answer has come.
        """
        tokens = 0
        for request_id in [i for i, (_, until_s) in self._kept.items() if until_s <= now_s]:
            if request_id in self._left or request_id not in self._handed_out:
                tokens += self._kept[request_id][0]
            self.drop(request_id)
        return tokens

    def engine_failed(self) -> None:
        super().engine_failed()
        self._kept.clear()
        self._handed_out.clear()
        self._left.clear()
        self.kept_tokens = 0

    def view(self, dispatch: Dispatch, overcommit: int = 0) -> WorkerView:
        """Made each time, since it depends on leases, too."""
        view = self.fresh_view(dispatch, overcommit)
        return view if self.breaker.calm and not self.draining else self._held_back(view)

    def fresh_view(self, dispatch: Dispatch, overcommit: int = 0) -> WorkerView:
        requests, left = self.requests, self.load_tokens
        # The first step that leaves some of a prompt may have computed hardly any.
        chunk_tokens = max(self.chunk_tokens, self.feed.chunk_tokens if self.feed else 0)
        wants = left < CHUNKS_AHEAD * chunk_tokens and requests < CHUNKS_AHEAD * self.slots
        # An empty worker takes a prompt of any size.
        empty = not self.kv_tokens or not (requests or self._kept)
        room = empty or self._used_tokens() < MEMORY_SHARE * self.kv_tokens
        return WorkerView(
            id=self.spec.id,
            load_tokens=left,
            requests=requests,
            capacity=int(wants and not self.refusing and room),
            waiting=self.feed.waiting if self.feed else 0,
            kv_usage=self.feed.kv_usage if self.feed else 0.0,
            pending_prompt_tokens=left,
        )

    def _known_tokens(self) -> int:
        return self._unseen_tokens() + (self.feed.prefill_left if self.feed else 0)

    def _used_tokens(self) -> int:
        """KV tokens of prompts that are computed or kept.

        For KV handed out, the engine's report counts. A whole answer is silent while it is decoded,
        though its KV was fetched at the start; a dead worker may have fetched it, too.
        """
        shown = self.feed or self.foreign.gauges
        told = round(shown.kv_usage * self.kv_tokens) if shown else 0
        own = self.kept_tokens + super()._known_tokens()
        return max(own - sum(self._handed_out.values()), min(own, told + self._known_tokens()))
