"""A worker that computes prompts for others, and keeps their KV until it is fetched.

It is as busy as the prompt tokens that it still has to compute. It is given the next prompt when it
is about to run out of work, so that the others wait in the router and go wherever there is work to
be had first; and only while it has memory left beside what it keeps for decode workers.
"""

from __future__ import annotations

from dataclasses import replace

from router.running import WorkerRows
from router.signals import Departure
from router.token_rate import TokenRate
from router.types import Dispatch, Request, WorkerSpec, WorkerView
from router.worker import Worker

# Of its KV memory, what prompts may take that are being computed or kept.
MEMORY_SHARE = 0.9
# One chunk is being computed, the next should be there when it is done.
CHUNKS_AHEAD = 2


class PrefillWorker(Worker):
    """One prefill worker.

    Args:
        spec: as configured.
        rows: see ``Worker``.
        departures: see ``Worker``.
        token_rate: see ``Worker``.
        chunk_tokens: prompt tokens that its engine computes in a step at most.

    Attributes:
        kept_tokens: KV tokens of computed prompts that nobody has been seen to have fetched yet.
        refusing: has turned a prompt away just now, and is to be given none for a moment.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rows: WorkerRows,
        departures: list[Departure],
        token_rate: TokenRate,
        chunk_tokens: int,
    ) -> None:
        super().__init__(spec, rows, departures, token_rate)
        self.kept_tokens = 0
        self.refusing = False
        self._backlog_tokens = CHUNKS_AHEAD * chunk_tokens
        self._kept: dict[str, tuple[int, float]] = {}
        self._handed_out: dict[str, int] = {}
        self._left: set[str] = set()

    @property
    def empty(self) -> bool:
        """See ``Worker``: and no decode worker is still to fetch KV from here."""
        return super().empty and not self._kept

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV memory holds, 0 where that is not known."""
        if self.feed is not None:
            return self.feed.kv_tokens
        return self.foreign.gauges.kv_tokens if self.foreign.gauges else 0

    @property
    def load_tokens(self) -> int:
        """Prompt tokens that it still has to compute.

        Of what others have there, gauges tell but the KV, and of that not whose it is.
        """
        return self._known_tokens()

    def add(self, request: Request, now_s: float | None = None) -> None:
        """See ``Worker``: a prompt is computed once, whatever is made of it elsewhere."""
        super().add(replace(request, slots=1), now_s)

    def keep(self, request_id: str, tokens: int, until_s: float) -> None:
        """The KV of a request's prompt is here, until it is fetched or that time has come."""
        self._kept[request_id] = tokens, until_s
        self.kept_tokens += tokens

    def keeps(self, request_id: str) -> bool:
        """Whether a request's KV is still here."""
        return request_id in self._kept

    def hand_out(self, request_id: str) -> None:
        """A decode worker is told of a request's KV, and may fetch it from now on."""
        if request_id in self._kept:
            self._handed_out[request_id] = self._kept[request_id][0]

    def take_back(self, request_id: str) -> None:
        """Whoever was told of a request's KV does nothing with it, and may have left it here."""
        if request_id in self._handed_out:
            self._left.add(request_id)

    def drop(self, request_id: str) -> None:
        """A request's KV is here no longer, if it was."""
        self._handed_out.pop(request_id, None)
        self._left.discard(request_id)
        self.kept_tokens -= self._kept.pop(request_id, (0, 0.0))[0]

    def expire(self, now_s: float) -> int:
        """Drop what has been kept for long enough; KV tokens of it that were left for nobody.

        What a decode worker answers with has been fetched long ago, though no byte of a whole
        answer may have come yet.
        """
        tokens = 0
        for request_id in [i for i, (_, until_s) in self._kept.items() if until_s <= now_s]:
            if request_id in self._left or request_id not in self._handed_out:
                tokens += self._kept[request_id][0]
            self.drop(request_id)
        return tokens

    def lose_kept(self) -> None:
        """Its engine has failed, and all that it kept is gone."""
        self._kept.clear()
        self._handed_out.clear()
        self._left.clear()
        self.kept_tokens = 0

    def view(self, dispatch: Dispatch, overcommit: int = 0) -> WorkerView:
        """What a policy sees: its load are the prompt tokens that it still has to compute."""
        requests, left = self.requests, self.load_tokens
        wants = left < self._backlog_tokens and requests < CHUNKS_AHEAD * self.slots
        return WorkerView(
            id=self.spec.id,
            load_tokens=left,
            requests=requests,
            capacity=self._capacity(int(wants and not self.refusing and self._has_memory())),
            waiting=self.feed.waiting if self.feed else 0,
            kv_usage=self.feed.kv_usage if self.feed else 0.0,
        )

    def _known_tokens(self) -> int:
        return self._unseen_tokens() + (self.feed.prefill_left if self.feed else 0)

    def _has_memory(self) -> bool:
        """Whether another prompt fits; a worker that has nothing takes one of any size."""
        if not self.kv_tokens or not (self.requests or self._kept):
            return True
        return self._used_tokens() < MEMORY_SHARE * self.kv_tokens

    def _used_tokens(self) -> int:
        """KV tokens of prompts that are computed or kept.

        Of those that were handed out the engine knows better: while an answer that comes whole is
        decoded nothing is heard of it here, though its KV was fetched at the start; and a worker
        that has died may have fetched it.
        """
        shown = self.feed or self.foreign.gauges
        told = round(shown.kv_usage * self.kv_tokens) if shown else 0
        own = self.kept_tokens + super()._known_tokens()
        return max(own - sum(self._handed_out.values()), min(own, told + self.load_tokens))
