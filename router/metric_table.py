"""Every metric: its name, what it says to somebody who sees it first, and where it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.barrier import StepTotals
from router.cluster import Group
from router.decider import Decider
from router.engines.gauges import GaugeReader
from router.engines.health import HealthMonitor
from router.engines.snapshots import SnapshotClient
from router.feed import Feed
from router.lookahead import LookAhead
from router.stats import GroupStats, Histogram
from router.worker import Worker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One metric.

    Attributes:
        name: in full; a name that ends in ``_total`` is a counter's.
        help: what it is, for somebody who sees it for the first time.
        read: its value, None for no sample.
    """

    name: str
    help: str
    read: Callable[[T], float | None]


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A group at the moment of a scrape."""

    decider: Decider

    @property
    def group(self) -> Group:
        """Whose it is."""
        return self.decider.group

    @property
    def stats(self) -> GroupStats:
        """Its counters."""
        return self.decider.stats


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """A worker at the moment of a scrape."""

    worker: Worker
    now_s: float


def _of_feed(reading: WorkerReading, read: Callable[[Feed], T], missing: T) -> T:
    return missing if reading.worker.feed is None else read(reading.worker.feed)


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

GROUP_ROWS: Sequence[Row[GroupReading]] = (
    Row(
        "evenstep_pool_requests",
        "Requests that wait in the router for a free slot.",
        lambda reading: len(reading.decider.pool),
    ),
    Row(
        "evenstep_requests_assigned_total",
        "Times that a request was given to a worker, repeated attempts included.",
        lambda reading: reading.stats.assigned,
    ),
    Row(
        "evenstep_requests_returned_total",
        "Times that a request came back from a failing worker before its first byte.",
        lambda reading: reading.stats.returned,
    ),
    Row(
        "evenstep_requests_estimated_total",
        "Times that a request was given to a worker though no engine had counted its prompt yet.",
        lambda reading: reading.stats.estimated,
    ),
    Row(
        "evenstep_rounds_total",
        "Rounds in which the policy assigned waiting requests to workers.",
        lambda reading: reading.stats.rounds,
    ),
    Row(
        "evenstep_policy_errors_total",
        "Rounds in which the policy failed and a simpler one stood in.",
        lambda reading: reading.stats.policy_errors,
    ),
    Row(
        "evenstep_bytes_per_token",
        "Bytes of prompt text that are taken for a token, learned from what engines have counted.",
        lambda reading: reading.group.token_rate.bytes_per_token,
    ),
    Row(
        "evenstep_overcommit_requests",
        "Requests that may queue in an engine before a slot is free there.",
        lambda reading: reading.decider.overcommit.requests,
    ),
    Row(
        "evenstep_slot_bubble_steps",
        "Steps from a slot's becoming free to its next request's first step while others waited, "
        "on average over the last few hundred steps.",
        lambda reading: reading.decider.overcommit.bubble_steps,
    ),
)

PREFILL_ROWS: Sequence[Row[GroupReading]] = (
    Row(
        "evenstep_prefill_fallbacks_total",
        "Requests that decode workers did whole, since no prefill worker computed their prompts.",
        lambda reading: reading.stats.fallbacks,
    ),
    Row(
        "evenstep_prefills_repeated_total",
        "Prompts that were computed again, since their KV was gone or could not be fetched.",
        lambda reading: reading.stats.repeated_prefills,
    ),
    Row(
        "evenstep_prefills_lost_total",
        "Prompts that are computed twice: a prefill engine did not say where their KV lies.",
        lambda reading: reading.stats.lost_prefills,
    ),
    Row(
        "evenstep_kv_expired_tokens_total",
        "KV tokens that prefill workers kept until they expired, since nobody fetched them.",
        lambda reading: reading.stats.expired_kv_tokens,
    ),
    Row(
        "evenstep_kv_kept_tokens",
        "KV tokens that prefill workers keep, since nobody has fetched them yet.",
        lambda reading: sum(worker.kept_tokens for worker in reading.group.prefill_workers),
    ),
)

LOOK_AHEAD_ROWS: Sequence[Row[LookAhead]] = (
    Row(
        "evenstep_horizon_steps",
        "Steps that bfio looks ahead beyond the coming one.",
        lambda look_ahead: look_ahead.parameters.horizon,
    ),
    Row(
        "evenstep_discount",
        "Weight of a step of the look-ahead against the one before it.",
        lambda look_ahead: look_ahead.parameters.discount,
    ),
    Row(
        "evenstep_tie_weight",
        "Weight of bfio's quadratic term, per token.",
        lambda look_ahead: look_ahead.parameters.tie_weight,
    ),
    Row(
        "evenstep_lead_tokens",
        "How far below the others bfio leaves a worker that it can fill.",
        lambda look_ahead: look_ahead.parameters.lead_tokens,
    ),
    Row(
        "evenstep_forecast_skill",
        "Brier skill of what is known of coming ends: 1 for certainty, 0 for no better than their "
        "base rate.",
        lambda look_ahead: look_ahead.skill,
    ),
)

HISTOGRAMS: Sequence[tuple[str, str, Callable[[GroupStats], Histogram]]] = (
    (
        "evenstep_decision_seconds",
        "How long a round takes to assign requests, the look-ahead included.",
        lambda stats: stats.decision_s,
    ),
    (
        "evenstep_decision_candidates",
        "Requests that waited when a round began.",
        lambda stats: stats.decision_candidates,
    ),
    (
        "evenstep_decision_admitted",
        "Requests that a round assigned.",
        lambda stats: stats.decision_admitted,
    ),
    (
        "evenstep_decision_objective_tokens",
        "What bfio's objective came to, in KV tokens, the weighted sum over its look-ahead.",
        lambda stats: stats.decision_objective,
    ),
    (
        "evenstep_pool_wait_seconds",
        "How long a request waits in the router before it is given to a worker.",
        lambda stats: stats.pool_wait_s,
    ),
    (
        "evenstep_service_seconds",
        "From a request's being given to a worker to the first byte of its answer, or to the end "
        "of its prefill where another worker decodes.",
        lambda stats: stats.service_s,
    ),
    (
        "evenstep_time_to_first_token_seconds",
        "From a request's arrival at the router to the first byte of its answer.",
        lambda stats: stats.ttft_s,
    ),
)

STEP_ROWS: Sequence[Row[StepTotals]] = (
    Row(
        "evenstep_barrier_steps_total",
        "Decode steps that all workers of the group made together.",
        lambda totals: totals.steps,
    ),
    Row(
        "evenstep_imbalance_tokens_total",
        "Sum over steps of workers x highest load - sum of loads: KV tokens' worth of waiting at "
        "the barrier; divide by evenstep_barrier_steps_total for the average imbalance.",
        lambda totals: totals.imbalance_tokens,
    ),
    Row(
        "evenstep_max_load_tokens_total",
        "Sum over steps of the most loaded worker's resident KV tokens.",
        lambda totals: totals.max_load_tokens,
    ),
    Row(
        "evenstep_load_tokens_total",
        "Sum over steps and workers of resident KV tokens.",
        lambda totals: totals.load_tokens,
    ),
    Row(
        "evenstep_worker_steps_total",
        "Sum over steps of the number of workers that took part.",
        lambda totals: totals.worker_steps,
    ),
    Row(
        "evenstep_step_seconds_total",
        "Time that steps took, the slowest worker's where they differ.",
        lambda totals: totals.step_s,
    ),
    Row(
        "evenstep_energy_joules_total",
        "Energy that workers used in steps; 0 where engines do not report power.",
        lambda totals: totals.energy_j,
    ),
    Row(
        "evenstep_output_tokens_total",
        "Tokens that workers decoded; a first token that comes with its prefill is not among them.",
        lambda totals: totals.output_tokens,
    ),
    Row(
        "evenstep_free_slot_steps_total",
        "Sum over steps and workers of slots in which nothing ran.",
        lambda totals: totals.free_slots,
    ),
    Row(
        "evenstep_entered_requests_total",
        "Engine requests that had their first step.",
        lambda totals: totals.entered,
    ),
)

WORKER_ROWS: Sequence[Row[WorkerReading]] = (
    Row(
        "evenstep_worker_up",
        "1 if the worker may be given requests, 0 if it is down.",
        lambda reading: int(reading.worker.live),
    ),
    Row(
        "evenstep_snapshot_gaps_total",
        "State messages of the worker that were lost on the way.",
        lambda reading: reading.worker.gaps + _of_feed(reading, lambda feed: feed.gaps, 0),
    ),
)

# What was known of a worker that is down is out of date: these have no value then.
LIVE_WORKER_ROWS: Sequence[Row[WorkerReading]] = (
    Row(
        "evenstep_worker_load_tokens",
        "KV tokens resident on the worker, those on their way to it included.",
        lambda reading: reading.worker.load_tokens,
    ),
    Row(
        "evenstep_worker_requests",
        "Engine requests that run on the worker, are queued there, or are on their way.",
        lambda reading: reading.worker.requests,
    ),
    Row(
        "evenstep_worker_in_flight",
        "This router's requests that were sent to the worker and have not ended.",
        lambda reading: reading.worker.in_flight,
    ),
    Row(
        "evenstep_worker_foreign_requests",
        "Engine requests on the worker that are surely not this router's, by the engine's own "
        "metrics; 0 where snapshots tell all of them.",
        lambda reading: reading.worker.foreign.requests,
    ),
    Row(
        "evenstep_worker_slots",
        "Requests that the worker runs at once.",
        lambda reading: reading.worker.slots,
    ),
    Row(
        "evenstep_worker_free_slots",
        "Requests that the worker could start at its next step.",
        lambda reading: reading.worker.free_slots,
    ),
    Row(
        "evenstep_worker_snapshot_age_seconds",
        "Time since the worker last told its state; no value where it does not.",
        lambda reading: _of_feed(reading, lambda feed: reading.now_s - feed.received_s, None),
    ),
    Row(
        "evenstep_worker_power_watts",
        "Power that the worker last reported; no value where it does not.",
        lambda reading: _of_feed(reading, lambda feed: feed.power_w, None),
    ),
)

STATE_SOURCE = (
    "evenstep_worker_state_source",
    "1 for where the worker's state is known from: its snapshots, else its engine's own metrics "
    "with this router's counts, else these alone.",
)
BUILD = ("evenstep_build_info", "Always 1; the label says which version runs.")
REQUESTS = (
    "evenstep_requests_total",
    "Requests by how they ended: completed; aborted by the client; failed in the engine; expired "
    "in the queue; rejected because the queue was full; unserved because no worker was up.",
)
