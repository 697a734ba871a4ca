"""Tables of the metrics of single workers and of the sources of their states."""

from collections.abc import Sequence
from types import MappingProxyType

from router.core.state.breaker import BreakerState
from router.core.state.worker_status import WorkerStatus
from router.engines.gauges import GaugeReader
from router.engines.health_checks import HealthMonitor
from router.engines.kv_event_reader import KvEventReader
from router.engines.power_agents import PowerAgents
from router.engines.snapshots import SnapshotClient
from router.metrics.rows import Row

_BREAKER = MappingProxyType(
    {BreakerState.CLOSED: None, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
)


SNAPSHOT_ROWS: Sequence[Row[SnapshotClient]] = (
    Row(
        "evenstep_snapshots_received_total",
        "State messages from engines that were understood.",
        lambda client: client.received,
    ),
    Row(
        "evenstep_snapshot_received_bytes_total",
        "Size of all state messages from engines.",
        lambda client: client.received_bytes,
    ),
    Row(
        "evenstep_snapshots_broken_total",
        "State messages that were not understood, for example those of another version.",
        lambda client: client.broken,
    ),
    Row(
        "evenstep_snapshots_refused_total",
        "State messages of a stream that belongs to another worker than it is configured for.",
        lambda client: client.refused,
    ),
    Row(
        "evenstep_snapshot_handshakes_failed_total",
        "Times that an engine and the router did not accept each other's CURVE keys.",
        lambda client: client.handshakes_failed,
    ),
    Row(
        "evenstep_snapshot_failures_total",
        "State messages that were understood but led to an error in the router.",
        lambda client: client.failures,
    ),
    Row(
        "evenstep_snapshot_full_requests_total",
        "Times that an engine was asked for its whole state, at the start or after a gap.",
        lambda client: client.full_requests,
    ),
)

AGENT_ROWS: Sequence[Row[PowerAgents]] = (
    Row(
        "evenstep_agent_messages_received_total",
        "Messages of power agents (evenstep agent) that were understood.",
        lambda agents: agents.received,
    ),
    Row(
        "evenstep_agent_messages_broken_total",
        "Messages of power agents that were not understood, or may be of several workers.",
        lambda agents: agents.broken,
    ),
    Row(
        "evenstep_agent_failures_total",
        "Messages of power agents that were understood but led to an error in the router.",
        lambda agents: agents.failures,
    ),
)

KV_EVENT_ROWS: Sequence[Row[KvEventReader]] = (
    Row(
        "evenstep_kv_event_messages_received_total",
        "Messages with KV events of engines (kv_events=) that were understood.",
        lambda reader: reader.received,
    ),
    Row(
        "evenstep_kv_event_messages_broken_total",
        "Messages with KV events of engines that were not understood.",
        lambda reader: reader.broken,
    ),
)

HEALTH_ROWS: Sequence[Row[HealthMonitor]] = (
    Row("evenstep_health_checks_total", "Health checks of engines.", lambda health: health.checks),
    Row(
        "evenstep_health_checks_failed_total",
        "Health checks that an engine did not answer with success in time.",
        lambda health: health.failed_checks,
    ),
    Row(
        "evenstep_health_check_errors_total",
        "Health checks that led to an error in the router.",
        lambda health: health.errors,
    ),
)

GAUGE_ROWS: Sequence[Row[GaugeReader]] = (
    Row(
        "evenstep_engine_metrics_reads_total",
        "Times that an engine's own metrics were read, since its snapshots did not come.",
        lambda gauges: gauges.reads,
    ),
    Row(
        "evenstep_engine_metrics_reads_failed_total",
        "Readings of an engine's own metrics that told nothing.",
        lambda gauges: gauges.failed_reads,
    ),
)

WORKER_ROWS: Sequence[Row[WorkerStatus]] = (
    Row(
        "evenstep_worker_up",
        "1 if the worker's engine can be used, 0 if it is down.",
        lambda worker: int(worker.up),
    ),
)

# These have no value while a worker is down, because its state is out of date.
LIVE_WORKER_ROWS: Sequence[Row[WorkerStatus]] = (
    Row(
        "evenstep_worker_load_tokens",
        "KV tokens resident on the worker, those on their way to it included.",
        lambda worker: worker.load_tokens,
    ),
    Row(
        "evenstep_worker_requests",
        "Engine requests that run on the worker, are queued there, or are on their way.",
        lambda worker: worker.requests,
    ),
    Row(
        "evenstep_worker_in_flight",
        "This router's requests that were sent to the worker and have not ended.",
        lambda worker: worker.in_flight,
    ),
    Row(
        "evenstep_worker_foreign_requests",
        "Engine requests on the worker that are surely not this router's, by the engine's own "
        "metrics; no value where snapshots tell all of them.",
        lambda worker: worker.foreign_requests if worker.age_s is None else None,
    ),
    Row(
        "evenstep_worker_slots",
        "Requests that the worker runs at once; less evenstep_worker_requests, its free slots.",
        lambda worker: worker.slots,
    ),
    Row(
        "evenstep_worker_snapshot_age_seconds",
        "Time since the worker last told its state; no value where it does not.",
        lambda worker: None if worker.age_s is None else max(0.0, worker.age_s),
    ),
    Row(
        "evenstep_worker_admissible_kv_tokens",
        "KV tokens of prompts that the worker would let in if nobody waited there; no value where "
        "it does not tell, and while its breaker is not closed.",
        lambda worker: worker.admissible_tokens if worker.breaker is BreakerState.CLOSED else None,
    ),
    Row(
        "evenstep_worker_breaker",
        "2 while the worker is ejected since it has failed requests, 1 while trials decide whether "
        "it comes back; no value while it is given requests as any other.",
        lambda worker: _BREAKER[worker.breaker],
    ),
    Row(
        "evenstep_worker_power_watts",
        "Power of the worker's GPUs, by its snapshots or else its agent; no value if unknown.",
        lambda worker: worker.power_w,
    ),
    Row(
        "evenstep_worker_service_rate",
        "Requests that each slot of the worker completes per second, by its service_rate and what "
        "it has completed so far; no value while neither tells.",
        lambda worker: worker.service_rate,
    ),
    Row(
        "evenstep_worker_state_source",
        "Always 1; the label says where the worker's state is known from: its snapshots, else its "
        "engine's own metrics with this router's counts, else these alone.",
        lambda worker: {worker.source.value: 1},
        "source",
    ),
)

# Of what the group knows of a live worker's prefix cache.
HELD_ROWS: Sequence[Row[int | None]] = (
    Row(
        "evenstep_worker_prefix_blocks",
        "Blocks that the worker has in its prefix cache; no value where it does not tell them.",
        lambda blocks: blocks,
    ),
)
