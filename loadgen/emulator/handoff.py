"""KV that one engine computed and another one fetches, as a pure model; times are engine seconds.

As vLLM's NIXL connector (0.32) has it: an engine that ends a request with ``do_remote_decode``
keeps its KV under a lease. Whoever is to fetch it renews the lease from the moment that its own
request arrives; a fetch, or the end of that request, frees the KV; so does the end of the lease.
The transfer reads memory: it goes on while the engine that has the KV hangs.
"""

from __future__ import annotations

from dataclasses import dataclass

_RENEWED_SHARE = 2 / 3
"""A renewed lease ends this share of the whole one after its last renewal."""


@dataclass(slots=True)
class _Kept:
    """One request's KV.

    Attributes:
        claims: requests of other engines that are to fetch it; while there are any it stays.
    """

    tokens: int
    lease_end_s: float
    claims: int = 0


class KeptKv:
    """What one engine keeps for others; each request's KV ends once: fetched, freed or expired.

    Args:
        lease_s: how long KV stays that nobody claims, engine seconds.

    Attributes:
        tokens: held in all.
        kept_total: requests whose KV was kept.
        fetched_total: of those, fetched.
        freed_total: of those, freed because the request that was to fetch it ended before.
        expired_total: of those, nobody came for.
    """

    def __init__(self, lease_s: float) -> None:
        self.tokens = 0
        self.kept_total = 0
        self.fetched_total = 0
        self.freed_total = 0
        self.expired_total = 0
        self._lease_s = lease_s
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        """Requests whose KV is here."""
        return len(self._kept)

    def keep(self, request_id: str, tokens: int, now_s: float) -> None:
        """Keep a request's KV from now on."""
        self._kept[request_id] = _Kept(tokens, now_s + self._lease_s)
        self.tokens += tokens
        self.kept_total += 1

    def claim(self, request_id: str, now_s: float) -> int:
        """A request that is to fetch this KV has arrived somewhere.

        Returns:
            Its tokens, 0 when it is not here any more.
        """
        self.expire(now_s)
        kept = self._kept.get(request_id)
        if kept is None:
            return 0
        kept.claims += 1
        return kept.tokens

    def disclaim(self, request_id: str, now_s: float) -> None:
        """Whoever was to fetch this KV died and renews its lease no more."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.claims -= 1
            kept.lease_end_s = max(kept.lease_end_s, now_s + _RENEWED_SHARE * self._lease_s)

    def fetch(self, request_id: str) -> bool:
        """Give the KV away, its transfer having ended; False when it is not here any more."""
        fetched = self._drop(request_id)
        self.fetched_total += fetched
        return fetched

    def free(self, request_id: str) -> None:
        """Let go of KV that nobody needs any more; no-op when it is not here."""
        self.freed_total += self._drop(request_id)

    def expire(self, now_s: float) -> int:
        """Let go of KV whose lease is over; returns of how many requests."""
        over = [
            request_id
            for request_id, kept in self._kept.items()
            if not kept.claims and kept.lease_end_s <= now_s
        ]
        for request_id in over:
            self._drop(request_id)
        self.expired_total += len(over)
        return len(over)

    def lose(self) -> None:
        """The engine died."""
        self._kept.clear()
        self.tokens = 0

    def _drop(self, request_id: str) -> bool:
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return False
        self.tokens -= kept.tokens
        return True


@dataclass(frozen=True, slots=True)
class TransferTime:
    """What it takes to fetch a request's KV, engine seconds.

    Attributes:
        latency_s: of any transfer.
        per_token_s: 2.6e-6 is 128 KiB per token (a model of 8 billion parameters) at 50 GB/s.
    """

    latency_s: float = 1e-3
    per_token_s: float = 2.6e-6

    def seconds(self, tokens: int) -> float:
        """How long a transfer takes."""
        return self.latency_s + self.per_token_s * tokens


class Fetch:
    """The KV of one prompt on its way to the engine that needs it.

    The outputs of one prompt (``n`` above 1) share it: what arrived for the first is there.

    Args:
        source: who has the KV, None for an engine that is unknown or gone.
        kv_id: the request it was computed for.
        time: of a transfer.
        now_s: the time at which the request that needs it arrived.
    """

    def __init__(self, source: KeptKv | None, kv_id: str, time: TransferTime, now_s: float) -> None:
        tokens = source.claim(kv_id, now_s) if source is not None else 0
        self._source = source if tokens else None
        self._kv_id = kv_id
        self._arrived = False
        self.seconds = time.seconds(tokens) if tokens else 0.0
        """How long a transfer takes; one of KV that is gone fails at once."""

    def end(self) -> bool:
        """A transfer has ended; whether the KV was there."""
        if not self._arrived and self._source is not None:
            self._arrived = self._source.fetch(self._kv_id)
        return self._arrived

    def cancel(self) -> None:
        """Nobody needs the KV any more."""
        if not self._arrived and self._source is not None:
            self._source.free(self._kv_id)
        self._source = None

    def die(self, now_s: float) -> None:
        """The engine that needed the KV died: its lease is no longer renewed."""
        if not self._arrived and self._source is not None:
            self._source.disclaim(self._kv_id, now_s)
        self._source = None
