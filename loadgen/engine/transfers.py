"""Requests of one engine whose KV comes from others."""

from collections.abc import Iterator, Mapping
from itertools import chain

from loadgen.engine.kv_memory import KvMemory
from loadgen.engine.request import EngineRequest


class Transfers:
    """Requests in transfer, or with their KV but without a slot; they hold memory.

    ``recompute``: a prompt is computed here when its fetch fails; else the request fails.
    """

    def __init__(self, memory: KvMemory, *, recompute: bool) -> None:
        self.tokens = self.failed_total = 0
        self.moving: list[EngineRequest] = []  # requests in transfer
        self.ready: list[EngineRequest] = []  # requests with their KV, the first to run first
        self._memory = memory
        self._recompute = recompute

    def begin(self, request: EngineRequest, now_s: float) -> None:
        """Begin the transfer of what a request that has its memory did not find here."""
        assert request.fetch is not None
        request.fetched_s = now_s + request.fetch.seconds(request.prefill_left)
        self.tokens += request.load_tokens
        self.moving.append(request)

    def end(self, now_s: float, waiting: Mapping[str, EngineRequest]) -> list[EngineRequest]:
        """End the transfers that are due; return the waiting requests that fail with them."""
        failed = []
        for request in [each for each in self.moving if each.fetched_s <= now_s]:
            self.moving.remove(request)
            fetch, request.fetch = request.fetch, None
            assert fetch is not None
            if waiting.get(request.id) is not request:
                fetch.cancel()
                self._free(request)
                continue
            arrived = fetch.end()
            self.failed_total += not arrived
            if arrived or self._recompute:
                request.prefill_left *= not arrived
                self.ready.append(request)
            else:
                failed.append(request)
                self._free(request)
        return failed

    def start(self) -> EngineRequest:
        """Take the first that is ready; it keeps its memory."""
        request = self.ready.pop(0)
        self.tokens -= request.load_tokens
        return request

    def withdraw(self, request: EngineRequest) -> None:
        """Drop a request that waits no longer; what a transfer writes to is free at its end."""
        if request in self.ready:
            self.ready.remove(request)
            self._free(request)
        elif request.fetch is not None and request not in self.moving:
            request.fetch.cancel()

    def holding(self, waiting: Mapping[str, EngineRequest]) -> Iterator[str]:
        """Ids of the waiting requests that hold memory."""
        every = chain(self.moving, self.ready)
        return (each.id for each in every if waiting.get(each.id) is each)

    def _free(self, request: EngineRequest) -> None:
        self.tokens -= request.load_tokens
        self._memory.release(request, request.load_tokens)
