"""Tables of the metrics of single workers and of the sources of their states."""

from typing import NamedTuple

from router.core.state.breaker import BreakerState
from router.core.state.worker import Worker
from router.engines.gauges import GaugeReader
from router.engines.health_checks import HealthMonitor
from router.engines.kv_event_reader import KvEventReader
from router.engines.power_agents import PowerAgents
from router.engines.snapshots import SnapshotClient
from router.metrics.rows import Row, Table

_BREAKER = {BreakerState.CLOSED: None, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


SNAPSHOT_ROWS: Table[SnapshotClient] = {
    "evenstep_snapshots_received_total": Row(
        "State messages from engines that were understood.",
        lambda client: client.received,
    ),
    "evenstep_snapshot_received_bytes_total": Row(
        "Size of all state messages from engines.",
        lambda client: client.received_bytes,
    ),
    "evenstep_snapshots_broken_total": Row(
        "State messages that were not understood, for example those of another version.",
        lambda client: client.broken,
    ),
    "evenstep_snapshots_refused_total": Row(
        "State messages of a stream that belongs to another worker than it is configured for.",
        lambda client: client.refused,
    ),
    "evenstep_snapshot_handshakes_failed_total": Row(
        "Times that an engine and the router did not accept each other's CURVE keys.",
        lambda client: client.handshakes_failed,
    ),
    "evenstep_snapshot_failures_total": Row(
        "State messages that were understood but led to an error in the router.",
        lambda client: client.failures,
    ),
    "evenstep_snapshot_full_requests_total": Row(
        "Times that an engine was asked for its whole state, at the start or after a gap.",
        lambda client: client.full_requests,
    ),
}

AGENT_ROWS: Table[PowerAgents] = {
    "evenstep_agent_messages_received_total": Row(
        "Messages of power agents (evenstep agent) that were understood.",
        lambda agents: agents.received,
    ),
    "evenstep_agent_messages_broken_total": Row(
        "Messages of power agents that were not understood, or may be of several workers.",
        lambda agents: agents.broken,
    ),
    "evenstep_agent_failures_total": Row(
        "Messages of power agents that were understood but led to an error in the router.",
        lambda agents: agents.failures,
    ),
}

KV_EVENT_ROWS: Table[KvEventReader] = {
    "evenstep_kv_event_messages_received_total": Row(
        "Messages with KV events of engines (kv_events=) that were understood.",
        lambda reader: reader.received,
    ),
    "evenstep_kv_event_messages_broken_total": Row(
        "Messages with KV events of engines that were not understood.",
        lambda reader: reader.broken,
    ),
}

HEALTH_ROWS: Table[HealthMonitor] = {
    "evenstep_health_checks_total": Row("Health checks of engines.", lambda health: health.checks),
    "evenstep_health_checks_failed_total": Row(
        "Health checks that an engine did not answer with success in time.",
        lambda health: health.failed_checks,
    ),
    "evenstep_health_check_errors_total": Row(
        "Health checks that led to an error in the router.",
        lambda health: health.errors,
    ),
}

GAUGE_ROWS: Table[GaugeReader] = {
    "evenstep_engine_metrics_reads_total": Row(
        "Times that an engine's own metrics were read, since its snapshots did not come.",
        lambda gauges: gauges.reads,
    ),
    "evenstep_engine_metrics_reads_failed_total": Row(
        "Readings of an engine's own metrics that told nothing.",
        lambda gauges: gauges.failed_reads,
    ),
}

WORKER_ROWS: Table[Worker] = {
    "evenstep_worker_up": Row(
        "1 if the worker's engine can be used, 0 if it is down.",
        lambda worker: int(worker.live),
    ),
}

# These have no value while a worker is down, because its state is out of date.
LIVE_WORKER_ROWS: Table[Worker] = {
    "evenstep_worker_load_tokens": Row(
        "KV tokens resident on the worker, those on their way to it included.",
        lambda worker: worker.load_tokens,
    ),
    "evenstep_worker_requests": Row(
        "Engine requests that run on the worker, are queued there, or are on their way.",
        lambda worker: worker.requests,
    ),
    "evenstep_worker_in_flight": Row(
        "This router's requests that were sent to the worker and have not ended.",
        lambda worker: worker.in_flight,
    ),
    "evenstep_worker_foreign_requests": Row(
        "Engine requests on the worker that are surely not this router's, by the engine's own "
        "metrics; no value where snapshots tell all of them.",
        lambda worker: worker.foreign.requests if worker.feed is None else None,
    ),
    "evenstep_worker_slots": Row(
        "Requests that the worker runs at once; less evenstep_worker_requests, its free slots.",
        lambda worker: worker.slots,
    ),
    "evenstep_worker_admissible_kv_tokens": Row(
        "KV tokens of prompts that the worker would let in if nobody waited there; no value where "
        "it does not tell, and while its breaker is not closed.",
        lambda worker: (
            worker.feed.last.admissible_kv_tokens
            if worker.feed and worker.breaker.state is BreakerState.CLOSED
            else None
        ),
    ),
    "evenstep_worker_breaker": Row(
        "2 while the worker is ejected since it has failed requests, 1 while trials decide whether "
        "it comes back; no value while it is given requests as any other.",
        lambda worker: _BREAKER[worker.breaker.state],
    ),
    "evenstep_worker_service_rate": Row(
        "Requests that each slot of the worker completes per second, by its service_rate and what "
        "it has completed so far; no value while neither tells.",
        lambda worker: worker.service.known_per_s,
    ),
    "evenstep_worker_state_source": Row(
        "Always 1; the label says where the worker's state is known from: its snapshots, else its "
        "engine's own metrics with this router's counts, else these alone.",
        lambda worker: {worker.source.value: 1},
        "source",
    ),
}


class Reading(NamedTuple):
    """A live worker at a scrape; ``blocks``: in its prefix cache, None: it does not tell them."""

    worker: Worker
    now_s: float
    blocks: int | None

    @property
    def age_s(self) -> float | None:
        feed = self.worker.feed
        return None if feed is None else max(0.0, self.now_s - feed.received_s)


READING_ROWS: Table[Reading] = {
    "evenstep_worker_snapshot_age_seconds": Row(
        "Time since the worker last told its state; no value where it does not.",
        lambda reading: reading.age_s,
    ),
    "evenstep_worker_power_watts": Row(
        "Power of the worker's GPUs, by its snapshots or else its agent; no value if unknown.",
        lambda reading: reading.worker.power_w(reading.now_s),
    ),
    "evenstep_worker_prefix_blocks": Row(
        "Blocks that the worker has in its prefix cache; no value where it does not tell them.",
        lambda reading: reading.blocks,
    ),
}
