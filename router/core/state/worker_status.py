from typing import Any

import msgspec

from router.core.state.breaker import BreakerState
from router.core.state.prefill_worker import PrefillWorker
from router.core.state.worker import Worker
from router.core.types import StateSource, WorkerSpec


class WorkerStatus(msgspec.Struct, frozen=True, gc=False):
    """One worker at one moment, as readers see it; None: unknown."""

    spec: WorkerSpec
    up: bool
    down_reason: str | None
    draining: bool
    breaker: BreakerState
    source: StateSource
    slots: int
    free_slots: int
    requests: int  # engine requests that run, are queued in the engine, or are on their way
    in_flight: int  # this router's requests that were sent and have not ended
    aside: int  # requests under way that bypass the pool
    foreign_requests: int  # engine requests that are surely not this router's, by gauges
    load_tokens: int
    kept_tokens: int | None  # KV kept for decode workers; None: it is no prefill worker
    kv_usage: float | None
    service_rate: float | None
    power_w: float | None
    unreported: tuple[str, ...]  # what its engine's plug-in cannot read of vLLM
    max_loras: int  # LoRA adapters that its engine runs at once; 0: no bound, or unknown
    slots_reported: int | None  # by snapshots, as all that follow; None: there are no fresh ones
    running: int | None
    waiting: int | None
    admissible_tokens: int | None  # KV tokens that its engine would admit with an empty queue
    step: int | None
    sequence: int | None
    age_s: float | None

    def some(self, *names: str) -> dict[str, Any]:
        """Some of its fields by name."""
        return {name: getattr(self, name) for name in names}

    @property
    def shortcoming(self) -> str | None:
        if not self.unreported:
            return None
        return f"its engine's plug-in cannot read {', '.join(self.unreported)}"

    @property
    def queued(self) -> int:
        """Part of ``requests`` that does not run yet; without snapshots all slots are in use."""
        running = self.slots if self.running is None else self.running
        return max(0, self.requests - running)


def status_of(worker: Worker, now_s: float) -> WorkerStatus:
    """``now_s`` is monotonic."""
    feed, unreported = worker.feed, worker.unreported
    shown = feed or worker.foreign.gauges
    return WorkerStatus(
        spec=worker.spec,
        up=worker.live,
        down_reason=worker.down_reason,
        draining=worker.draining,
        breaker=worker.breaker.state,
        source=worker.source,
        slots=worker.slots,
        free_slots=worker.free_slots,
        requests=worker.requests,
        in_flight=worker.in_flight,
        aside=worker.aside,
        foreign_requests=worker.foreign.requests,
        load_tokens=worker.load_tokens,
        kept_tokens=worker.kept_tokens if isinstance(worker, PrefillWorker) else None,
        kv_usage=shown.kv_usage if shown and not (feed and "memory" in unreported) else None,
        service_rate=worker.service.known_per_s,
        power_w=worker.power_w(now_s),
        unreported=unreported,
        max_loras=feed.last.max_loras if feed else 0,
        slots_reported=feed.slots or None if feed else None,
        running=feed.running if feed else None,
        waiting=feed.waiting if feed else None,
        admissible_tokens=feed.last.admissible_kv_tokens if feed else None,
        step=feed.last.step if feed else None,
        sequence=feed.sequence if feed else None,
        age_s=now_s - feed.received_s if feed else None,
    )
