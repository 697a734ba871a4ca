"""What a router's metrics say of the steps of one group behind a barrier."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import Server


class Accounts(NamedTuple):
    """Of all steps so far."""

    steps: float
    worker_s: float
    known_s: float  # part of it of which it is known how long workers waited

    @classmethod
    def of(cls, router: Server, ranks: int) -> Accounts:
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(router.get("/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return cls(
            totals["evenstep_barrier_steps_total"],
            totals["evenstep_step_seconds_total"] * ranks,
            totals["evenstep_timed_worker_seconds_total"],
        )

    def known_since(self, before: Accounts) -> float:
        """Share of the time since then of which it is known how long workers waited."""
        return (self.known_s - before.known_s) / (self.worker_s - before.worker_s)
