"""KV handoff between engines, as a pure model; times are engine seconds.

The rules are those of vLLM's NIXL connector (0.32). An engine that ends a request with
``do_remote_decode`` keeps its KV under a lease. The fetching engine renews the lease from the
arrival of its own request on. A fetch, the end of that request, or the end of the lease frees the
KV. The transfer reads memory: it continues while the source engine hangs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.engine.prefix_cache import Block, PrefixCache

_RENEWED_SHARE = 2 / 3
"""A renewed lease ends this share of the whole one after its last renewal."""


@dataclass(slots=True)
class _Kept:
    """KV of one request; while other engines claim it, it stays."""

    tokens: int
    lease_end_s: float
    blocks: int  # those besides ``cached``
    cached: Sequence[Block]  # its blocks that are in the prefix cache
    claims: int = 0


class KeptKv:
    """KV that one engine keeps for others; each request's is fetched, freed or expired once.

    Unclaimed KV stays for ``lease_s`` engine seconds. ``prefix_cache``: that of the engine.
    """

    def __init__(self, lease_s: float, prefix_cache: PrefixCache | None = None) -> None:
        self.tokens = 0
        self.blocks = 0  # those that are not in the prefix cache
        self.kept_total = 0
        self.fetched_total = 0
        self.freed_total = 0  # requests whose KV was freed because the fetching one ended first
        self.expired_total = 0  # requests whose lease ended
        self._lease_s = lease_s
        self._prefix_cache = prefix_cache
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self,
        request_id: str,
        tokens: int,
        now_s: float,
        *,
        blocks: int = 0,
        cached: Sequence[Block] = (),
    ) -> None:
        """Keep a request's KV: ``blocks`` of its own, and those that it holds in the cache."""
        self._kept[request_id] = _Kept(tokens, now_s + self._lease_s, blocks, cached)
        self.tokens += tokens
        self.blocks += blocks
        self.kept_total += 1

    def claim(self, request_id: str, now_s: float) -> int:
        """Claim KV for a request at another engine; return its tokens, 0: no longer kept."""
        self.expire(now_s)
        kept = self._kept.get(request_id)
        if kept is None:
            return 0
        kept.claims += 1
        return kept.tokens

    def disclaim(self, request_id: str, now_s: float) -> None:
        """Undo a claim because the claiming engine died; the lease ends later."""
        kept = self._kept.get(request_id)
        if kept is not None:
            kept.claims -= 1
            kept.lease_end_s = max(kept.lease_end_s, now_s + _RENEWED_SHARE * self._lease_s)

    def fetch(self, request_id: str) -> bool:
        """Release KV at the end of its transfer; False: no longer kept."""
        fetched = self._drop(request_id)
        self.fetched_total += fetched
        return fetched

    def free(self, request_id: str) -> None:
        self.freed_total += self._drop(request_id)

    def expire(self, now_s: float) -> int:
        """Free KV whose lease is over; return the number of requests."""
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
        for request_id in [*self._kept]:
            self._drop(request_id)

    def _drop(self, request_id: str) -> bool:
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return False
        self.tokens -= kept.tokens
        self.blocks -= kept.blocks
        if kept.cached:
            assert self._prefix_cache is not None
            self._prefix_cache.release(kept.cached)
        return True


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Duration of a KV transfer, engine seconds."""

    latency_s: float = 1e-3
    # Time per token; 2.6e-6 is 128 KiB per token (a model of 8 billion parameters) at 50 GB/s.
    per_token_s: float = 2.6e-6

    def seconds(self, tokens: int) -> float:
        return self.latency_s + self.per_token_s * tokens


class Fetch:
    """Transfer of one prompt's KV to the engine that needs it.

    The outputs of one prompt (``n`` above 1) share it: KV that arrived for the first serves all.

    ``source`` is None for an unknown or dead engine; ``kv_id`` is the request that the KV was
    computed for, and the one that needs it arrives now.
    """

    def __init__(self, source: KeptKv | None, kv_id: str, time: TransferTime, now_s: float) -> None:
        tokens = source.claim(kv_id, now_s) if source is not None else 0
        self._source = source if tokens else None
        self._kv_id = kv_id
        self._arrived = False
        self._time = time if tokens else None

    def seconds(self, tokens: int) -> float:
        """Duration for the tokens that are not cached where they go; gone KV fails at once."""
        return 0.0 if self._time is None else self._time.seconds(tokens)

    def end(self) -> bool:
        """End a transfer; return whether the KV was there."""
        if not self._arrived and self._source is not None:
            self._arrived = self._source.fetch(self._kv_id)
        return self._arrived

    def cancel(self) -> None:
        if not self._arrived and self._source is not None:
            self._source.free(self._kv_id)
        self._source = None

    def die(self, now_s: float) -> None:
        """Stop renewing the lease, as the fetching engine died."""
        if not self._arrived and self._source is not None:
            self._source.disclaim(self._kv_id, now_s)
        self._source = None
