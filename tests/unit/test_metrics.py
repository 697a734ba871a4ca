import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router import metric_table
from router.cluster import Cluster
from router.dispatch import Dispatcher
from router.engines.gauges import GaugeReader
from router.engines.health import HealthMonitor
from router.engines.snapshots import SnapshotClient
from router.lane import DispatchSettings
from router.metrics import Metrics
from router.policies import POLICIES, PolicySettings
from router.stats import Histogram
from router.types import (
    Outcome,
    PoolState,
    Request,
    RunningRequest,
    Snapshot,
    SnapshotReceived,
    WorkerDown,
    WorkerSpec,
    WorkerUp,
)
from tests.support import core

SPECS = [
    WorkerSpec("a", "http://h:1", group="g", rank=0, slots=4, snapshots="tcp://h:5"),
    WorkerSpec("b", "http://h:1", group="g", rank=1, slots=4, snapshots="tcp://h:7"),
    WorkerSpec("c", "http://h:2", group="other", slots=8),
]
BASE = Snapshot("full", "g", "x", 0, "epoch", 1, 1, 0.0, 0.5, power_w=100.0)

Samples = dict[tuple[str, tuple[str, ...]], float]


class Bench:
    """Real parts without sockets, and what a scrape of them shows."""

    def __init__(self, specs: Sequence[WorkerSpec] = SPECS) -> None:
        self.now_s = 100.0
        self.dispatcher = Dispatcher(
            Cluster(specs),
            lambda: POLICIES["jsq"].make(PolicySettings()),
            lambda: POLICIES["jsq"].make(PolicySettings()),
            DispatchSettings(),
            lambda: self.now_s,
        )
        apply = self.dispatcher.apply
        self.snapshots = SnapshotClient(specs, apply, lambda _: False, lambda: self.now_s)
        self.health = HealthMonitor(specs, apply, lambda *_: None, lambda _: None)
        self.gauges = GaugeReader(
            specs, apply, lambda _: False, lambda: self.now_s, interval_s=1, timeout_s=1
        )
        parts = self.dispatcher, self.snapshots, self.health, self.gauges
        self.metrics = Metrics(*parts, lambda: self.now_s)

    def step(self, step: int, **loads_tokens: int) -> None:
        """Let workers report a step with these loads."""
        for worker_id, load in loads_tokens.items():
            running = (RunningRequest("cmpl-x", load, 0),)
            told = msgspec.structs.replace(BASE, sequence=step, step=step, running=running)
            self.dispatcher.apply(SnapshotReceived(worker_id, told, self.now_s))

    def scrape(self) -> Samples:
        families = text_string_to_metric_families(self.metrics.render().decode())
        samples = [sample for family in families for sample in family.samples]
        return {(s.name.removeprefix("evenstep_"), _values(s.labels)): s.value for s in samples}


def _values(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Values in the order of the labels' names."""
    return tuple(labels[name] for name in sorted(labels))


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for spec in SPECS:
        bench.dispatcher.apply(WorkerUp(spec.id))
    return bench


def test_every_metric_has_a_sound_name_help_and_type(bench: Bench) -> None:
    bench.step(1, a=10, b=5)
    text = bench.metrics.render().decode()
    tables = (
        metric_table.SNAPSHOT_ROWS,
        metric_table.HEALTH_ROWS,
        metric_table.GAUGE_ROWS,
        metric_table.GROUP_ROWS,
        metric_table.PREFILL_ROWS,
        metric_table.LOOK_AHEAD_ROWS,
        metric_table.STEP_ROWS,
        metric_table.WORKER_ROWS,
        metric_table.LIVE_WORKER_ROWS,
    )
    named = [(row.name, row.help) for table in tables for row in table]
    named += [(name, help_) for name, help_, _ in metric_table.HISTOGRAMS]
    named += [metric_table.BUILD, metric_table.REQUESTS, metric_table.STATE_SOURCE]
    assert len({name for name, _ in named}) == len(named)
    for name, help_ in named:
        assert re.fullmatch(r"evenstep_[a-z_]+", name)
        assert help_.endswith(".")
        assert f"# HELP {name} {help_}\n" in text
        kind = re.findall(rf"^# TYPE {name} (\w+)$", text, re.MULTILINE)[0]
        assert (kind == "counter") == name.endswith("_total")
    assert set(re.findall(r"^# TYPE (evenstep_\w+)", text, re.MULTILINE)) == {n for n, _ in named}


def test_build_and_process(bench: Bench) -> None:
    text = bench.metrics.render().decode()
    assert re.search(r'^evenstep_build_info\{version="\d[^"]*"\} 1\.0$', text, re.MULTILINE)
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text


def test_sums_over_steps_per_group_and_state_of_the_pool(bench: Bench) -> None:
    bench.step(1, a=10, b=4)
    bench.step(2, a=1, b=8)
    samples = bench.scrape()
    names = {
        "barrier_steps_total": "steps",
        "imbalance_tokens_total": "imbalance_tokens",
        "max_load_tokens_total": "max_load_tokens",
        "load_tokens_total": "load_tokens",
        "worker_steps_total": "worker_steps",
        "step_seconds_total": "step_s",
        "energy_joules_total": "energy_j",
        "output_tokens_total": "output_tokens",
    }
    groups = bench.dispatcher.cluster.groups
    assert groups["g"].totals[PoolState.EMPTY].imbalance_tokens > 0
    for (name, field), group, state in product(names.items(), groups, PoolState):
        expected = getattr(groups[group].totals[state], field)
        assert samples[name, (group, state.value)] == expected


def test_a_live_worker(bench: Bench) -> None:
    bench.step(1, a=10)
    bench.now_s += 2
    samples = bench.scrape()
    a = ("g", "0", "a")
    assert samples["worker_up", a] == 1
    assert samples["worker_load_tokens", a] == 10
    assert samples["worker_requests", a] == 1
    assert samples["worker_in_flight", a] == 0
    assert samples["worker_slots", a] == 4
    assert samples["worker_free_slots", a] == 3
    assert samples["worker_snapshot_age_seconds", a] == 2
    assert samples["worker_power_watts", a] == 100
    assert samples["snapshot_gaps_total", a] == 0


def test_a_worker_without_snapshots_or_rank(bench: Bench) -> None:
    samples = bench.scrape()
    c = ("other", "", "c")
    assert samples["worker_up", c] == 1
    assert samples["worker_slots", c] == 8
    assert ("worker_snapshot_age_seconds", c) not in samples
    assert ("worker_power_watts", c) not in samples


def test_gauges_of_a_dead_worker_end_while_totals_stay(bench: Bench) -> None:
    bench.step(1, a=10, b=4)
    gap = msgspec.structs.replace(BASE, kind="delta", sequence=5, step=2)
    bench.dispatcher.apply(SnapshotReceived("a", gap, 100.0))
    before = bench.scrape()
    a = ("g", "0", "a")
    assert before["snapshot_gaps_total", a] == 3
    bench.dispatcher.apply(WorkerDown("a", "gone"))
    after = bench.scrape()
    assert after["worker_up", a] == 0
    shown = {name for name, labels in after if labels == a}
    assert shown == {"worker_up", "snapshot_gaps_total"}
    assert after["snapshot_gaps_total", a] == 3
    counters = [key for key in before if key[0].endswith("_total")]
    assert all(after[key] >= before[key] for key in counters if not key[0].startswith("process"))


def test_requests_by_outcome_and_rounds(bench: Bench) -> None:
    stats = bench.dispatcher.deciders["g"].stats
    for number, outcome in enumerate(Outcome, 1):
        stats.outcomes[outcome] += number
    stats.rejected, stats.unserved, stats.assigned, stats.returned = 5, 6, 7, 8
    stats.rounds, stats.policy_errors = 9, 10
    samples = bench.scrape()
    assert [samples["requests_total", ("g", outcome.value)] for outcome in Outcome] == [1, 2, 3, 4]
    assert samples["requests_total", ("g", "rejected")] == 5
    assert samples["requests_total", ("g", "unserved")] == 6
    assert samples["requests_assigned_total", ("g",)] == 7
    assert samples["requests_returned_total", ("g",)] == 8
    assert samples["rounds_total", ("g",)] == 9
    assert samples["policy_errors_total", ("g",)] == 10
    assert samples["pool_requests", ("g",)] == 0
    assert samples["requests_total", ("other", "completed")] == 0


def test_a_scrape_does_not_add_outcomes(bench: Bench) -> None:
    bench.scrape()
    assert dict(bench.dispatcher.deciders["g"].stats.outcomes) == {}


def test_histograms_are_cumulative(bench: Bench) -> None:
    histogram = bench.dispatcher.deciders["g"].stats.ttft_s
    for value_s in (0.0005, 0.001, 0.2, 0.3, 99.0):
        histogram.observe(value_s)
    samples = bench.scrape()
    name = "time_to_first_token_seconds"
    assert samples[f"{name}_bucket", ("g", "0.001")] == 2
    assert samples[f"{name}_bucket", ("g", "0.25")] == 3
    assert samples[f"{name}_bucket", ("g", "60.0")] == 4
    assert samples[f"{name}_bucket", ("g", "+Inf")] == 5
    assert samples[f"{name}_count", ("g",)] == 5
    assert samples[f"{name}_sum", ("g",)] == pytest.approx(99.5015)
    assert samples["pool_wait_seconds_count", ("g",)] == 0
    assert samples["decision_seconds_count", ("g",)] == 0


def test_bounds_of_a_bucket_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 1]
    assert histogram.total == 7.0


def test_counters_of_the_engines_side(bench: Bench) -> None:
    bench.snapshots.received, bench.snapshots.received_bytes, bench.snapshots.broken = 1, 2, 3
    bench.snapshots.full_requests, bench.snapshots.failures = 4, 5
    bench.health.checks, bench.health.failed_checks, bench.health.errors = 6, 7, 8
    samples = bench.scrape()
    names = (
        "snapshots_received_total",
        "snapshot_received_bytes_total",
        "snapshots_broken_total",
        "snapshot_full_requests_total",
        "snapshot_failures_total",
        "health_checks_total",
        "health_checks_failed_total",
        "health_check_errors_total",
    )
    assert [samples[name, ()] for name in names] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_labels_are_escaped() -> None:
    assert (
        Bench([WorkerSpec('a"b\\', "http://h:1")]).scrape()["worker_up", ("default", "", 'a"b\\')]
        == 0
    )


async def test_what_becomes_of_prompts_that_are_computed_elsewhere() -> None:
    specs = [WorkerSpec("p", "http://p", role="prefill"), WorkerSpec("d", "http://d", slots=1)]
    bench = Bench(specs)
    for spec in specs:
        bench.dispatcher.apply(WorkerUp(spec.id))
    port, stage = bench.dispatcher, "default/prefill"
    ready = []
    for number in range(3):
        request, waiter = _asked(port, number, stage)
        assert (await waiter).id == "p"
        bench.now_s += 0.3
        ready.append(port.hand_off(request, 40, 30.0))
    first, waiter = ready[0]
    assert (await waiter).id == "d"
    assert bench.scrape()["kv_kept_tokens", (stage,)] == 120
    port.first_byte(first, bench.now_s + 2)
    port.fetched(first)
    port.end(first, Outcome.COMPLETED)
    again, waiter = port.prefill_again(ready[1][0])
    assert (await waiter).id == "p"
    whole, _ = port.serve_whole(again)
    port.withdraw(whole)
    bench.now_s += 30.0
    port.tick()
    shown = bench.scrape()
    assert shown["kv_kept_tokens", (stage,)] == 0
    assert shown["kv_expired_tokens_total", (stage,)] == 80
    assert shown["prefills_repeated_total", (stage,)] == 1
    assert shown["prefill_fallbacks_total", (stage,)] == 1
    assert shown["prefills_lost_total", (stage,)] == 0
    assert shown["service_seconds_sum", (stage,)] == pytest.approx(3 * 0.3)
    assert shown["service_seconds_count", ("default",)] == 1
    assert shown["requests_total", (stage, "completed")] == 3
    assert shown["requests_estimated_total", ("default",)] == 0
    assert shown["requests_estimated_total", (stage,)] == 3  # the second time it was counted


def _asked(port: Dispatcher, number: int, group: str) -> tuple[Request, asyncio.Future[WorkerSpec]]:
    request = replace(core.request(number), group=group)
    return request, port.submit(request)
