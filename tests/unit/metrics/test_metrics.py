import asyncio
import re
from dataclasses import replace
from itertools import count, product

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.access.key_ring import parse_keys
from router.core.energy.joules import METER_SILENT_S
from router.core.errors import KeyLimitError
from router.core.events import (
    Arrived,
    Dispatched,
    Failed,
    Fetched,
    PowerTold,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.prefix.ids import chain, seed
from router.core.stats import Histogram
from router.core.step_time import StepTime
from router.core.types import (
    ADMISSION_ENDED,
    Content,
    Outcome,
    PoolState,
    Request,
    RunningRequest,
    WorkerSpec,
)
from router.dispatch.dispatcher import Dispatcher
from router.metrics import groups, other, workers
from tests.support import core
from tests.support.scraped import BASE, SPECS, TELLING, Bench


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for spec in SPECS:
        bench.dispatcher.apply(WorkerUp(spec.id))
    return bench


def test_every_metric_has_a_sound_name_help_and_type(bench: Bench) -> None:
    bench.step(1, a=10, b=5)
    text = bench.text()
    tables = (
        *(groups.DECIDER_ROWS, groups.GROUP_ROWS, groups.PREFILL_ROWS, groups.LOOK_AHEAD_ROWS),
        *(groups.STEP_ROWS, workers.SNAPSHOT_ROWS, workers.AGENT_ROWS, workers.HEALTH_ROWS),
        *(workers.KV_EVENT_ROWS, workers.GAUGE_ROWS, workers.WORKER_ROWS, workers.LIVE_WORKER_ROWS),
        workers.READING_ROWS,
        *(other.KEY_ROWS, other.ACCESS_ROWS, other.BUILD_ROWS, other.HTTP_ROWS),
    )
    named = [(name, row.help) for table in tables for name, row in table.items()]
    named += [(name, row.help) for name, row in groups.HISTOGRAMS.items()]
    assert len({name for name, _ in named}) == len(named)
    for name, help_ in named:
        assert re.fullmatch(r"evenstep_[a-z_]+", name)
        assert help_.endswith(".")
        assert f"# HELP {name} {help_}\n" in text
        kind = re.findall(rf"^# TYPE {name} (\w+)$", text, re.MULTILINE)[0]
        assert (kind == "counter") == name.endswith("_total")
    assert set(re.findall(r"^# TYPE (evenstep_\w+)", text, re.MULTILINE)) == {n for n, _ in named}


def test_build_and_process(bench: Bench) -> None:
    text = bench.text()
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
        "waiting_seconds_total": "waiting_s",
        "timed_worker_seconds_total": "timed_s",
        "measured_worker_seconds_total": "measured_s",
    }
    there = bench.dispatcher.cluster.groups
    assert there["g"].totals[PoolState.EMPTY].imbalance_tokens > 0
    assert there["g"].totals[PoolState.EMPTY].measured_s > 0
    for (name, field), group, state in product(names.items(), there, PoolState):
        expected = getattr(there[group].totals[state], field)
        assert samples[name, (group, state.value)] == expected


def test_joules_by_what_they_were_spent_on(bench: Bench) -> None:
    bench.step(1, a=10, b=4)
    samples, joules = bench.scrape(), bench.dispatcher.cluster.groups["g"].energy.joules
    assert joules.unknown_j > 0
    assert samples["undivided_energy_joules_total", ("g",)] == joules.unknown_j
    for spent in ("useful", "waiting", "idle"):
        assert samples[f"{spent}_energy_joules_total", ("g",)] == 0


def test_what_a_step_costs_once_the_steps_tell_it(bench: Bench) -> None:
    def costs(what: str) -> dict[str, float]:
        samples = bench.scrape().items()
        return {
            labels[1]: value for (name, labels), value in samples if name == f"step_cost_{what}"
        }

    assert (costs("seconds"), costs("error_ratio")) == ({}, {})
    for number in range(1, 400):
        load = 1000 * (1 + number % 9)
        told = {"sequence": number, "step": number, "step_s": 0.01 + 1e-6 * load}
        running = (RunningRequest("cmpl-x", load, 0),)
        snapshot = msgspec.structs.replace(BASE, running=running, **told)
        bench.dispatcher.apply(SnapshotReceived("a", snapshot, bench.now_s))
    assert costs("seconds") == pytest.approx({"kv_token": 1e-6})
    assert costs("low_seconds") == pytest.approx({"kv_token": 1e-6})
    assert costs("high_seconds") == pytest.approx({"kv_token": 1e-6})
    assert set(costs("error_ratio")) == {"decode"}
    assert bench.scrape()["step_cost_explained_ratio", ("g",)] == pytest.approx(1)


def test_seconds_of_metered_workers_by_what_they_did(bench: Bench) -> None:
    bench.step(1, a=10)
    told = msgspec.structs.replace(BASE, sequence=2, step=2)
    bench.dispatcher.apply(SnapshotReceived("a", told, bench.now_s))
    samples = bench.scrape()
    expected = {"idle": 0, "waiting": 0.1, "computing": 0.4, "unknown": 0.5}
    for state, seconds in expected.items():
        assert samples["metered_seconds_total", ("g", state)] == pytest.approx(seconds)


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
    assert samples["worker_snapshot_age_seconds", a] == 2
    assert samples["worker_power_watts", a] == 100
    assert samples["worker_admissible_kv_tokens", a] == 700


def test_others_run_between_two_metrics_of_a_scrape(bench: Bench) -> None:
    async def turns() -> int:
        scrape = asyncio.create_task(bench.metrics.render())
        count = 0
        while not scrape.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert asyncio.run(turns()) >= bench.text().count("# HELP")


def test_what_is_told_while_a_scrape_goes_on_is_not_older_than_now(bench: Bench) -> None:
    bench.step(1, a=10)
    rendering = bench.metrics.render()
    text = ""
    try:
        for step in count(2):
            rendering.send(None)
            bench.now_s += 1
            bench.step(step, a=10)
    except StopIteration as done:
        text = str(done.value, "utf-8")
    (age,) = re.findall(r"^evenstep_worker_snapshot_age_seconds.* (\S+)$", text, re.MULTILINE)
    assert float(age) == 0


def test_rows_of_a_worker_that_goes_down_while_they_are_written_agree() -> None:
    turns, shown = 0, set()
    while True:
        bench = Bench()
        for spec in SPECS:
            bench.dispatcher.apply(WorkerUp(spec.id))
        bench.step(1, a=10)
        rendering, text = bench.metrics.render(), ""
        try:
            for turn in count():
                if turn == turns:
                    bench.dispatcher.apply(WorkerDown("a", "it is down"))
                rendering.send(None)
        except StopIteration as done:
            text = str(done.value, "utf-8")
        rows = re.findall(r'^(evenstep_worker_\w+)\{.*worker="a".*\} (\S+)$', text, re.MULTILINE)
        shown.add(tuple(rows))
        if turn < turns:
            break
        turns += 1
    up, down = ("evenstep_worker_up", "1.0"), ("evenstep_worker_up", "0.0")
    assert sorted(rows[0] for rows in shown) == [down, up]
    assert min(map(len, shown)) == 1


def test_what_is_written_in_pieces_has_one_heading() -> None:
    specs = [WorkerSpec(f"w{number}", "http://h:1") for number in range(300)]
    text = Bench(specs).text()
    assert text.count("# HELP evenstep_worker_up ") == text.count("# TYPE evenstep_worker_up ") == 1
    shown = re.findall(r'^evenstep_worker_up\{.*worker="(\w+)"\} 0.0$', text, re.MULTILINE)
    assert shown == [spec.id for spec in specs]


def test_a_worker_has_eleven_series_at_most(bench: Bench) -> None:
    bench.step(1, a=10)
    caching = msgspec.structs.replace(TELLING, sequence=2, cache_block=16)
    bench.dispatcher.apply(SnapshotReceived("a", caching, bench.now_s))
    told = [name for name, labels in bench.scrape() if "a" in labels]
    assert len(told) == 11


def test_prefix_caches_and_how_right_the_router_is_about_them(bench: Bench) -> None:
    samples = bench.scrape()
    assert ("prefix_blocks", ("g",)) not in samples, "no worker has told its own"
    assert samples["prefix_memory_bytes", ("g",)] == 0
    pieces = chain(range(160), seed())
    for worker, held in (("a", 9), ("b", 4)):
        told = msgspec.structs.replace(BASE, cache_block=16, blocks_stored=pieces[: 8 * held])
        bench.dispatcher.apply(SnapshotReceived(worker, told, bench.now_s))
    request = Request(core.token(1), "g", 160, content=Content(pieces=pieces))
    bench.dispatcher.apply(Arrived(request))
    bench.dispatcher.apply(Dispatched(request.id, "b"))
    running = (RunningRequest(core.part(1), 160, 1, cached_tokens=48),)
    told = msgspec.structs.replace(told, sequence=2, running=running)
    bench.dispatcher.apply(SnapshotReceived("b", told, bench.now_s))

    samples = bench.scrape()
    assert samples["prefix_blocks", ("g",)] == 9
    assert samples["worker_prefix_blocks", ("g", "0", "a")] == 9
    assert samples["worker_prefix_blocks", ("g", "1", "b")] == 4
    assert samples["prefix_memory_bytes", ("g",)] > 0
    counts = {
        "requests": 1,
        "right_requests": 0,
        "prompt_tokens": 160,
        "found_tokens": 48,
        "foretold_tokens": 64,
        "error_tokens": 16,
        "blocks_dropped": 0,
    }
    assert {name: samples[f"prefix_{name}_total", ("g",)] for name in counts} == counts


def test_prompt_tokens_of_steps_and_the_time_that_they_take(bench: Bench) -> None:
    bench.step(1, a=10, b=10)
    bench.dispatcher.cluster.fix_step_time(StepTime(1e-3, per_prompt_token_s=1e-5))
    for worker, prompt_tokens in (("a", 100), ("b", 300)):
        told = msgspec.structs.replace(
            TELLING, sequence=2, step=2, scheduled_prefill_tokens=prompt_tokens
        )
        bench.dispatcher.apply(SnapshotReceived(worker, told, bench.now_s))
    samples = bench.scrape()
    assert samples["prompt_tokens_total", ("g", "empty")] == 400
    assert samples["prompt_seconds_total", ("g", "empty")] == pytest.approx(3e-3)


def test_a_worker_without_snapshots_or_rank(bench: Bench) -> None:
    samples = bench.scrape()
    c = ("other", "", "c")
    assert samples["worker_up", c] == 1
    assert samples["worker_slots", c] == 8
    assert ("worker_snapshot_age_seconds", c) not in samples
    assert ("worker_power_watts", c) not in samples


def test_service_rates_as_planned_and_as_learned(bench: Bench) -> None:
    def rates() -> dict[str, float]:
        samples = bench.scrape().items()
        return {labels[-1]: v for (name, labels), v in samples if name == "worker_service_rate"}

    assert rates() == {"a": 0.5}, "nothing is known of the others"
    worker = bench.dispatcher.cluster.worker("c")
    worker.service.sent(1, 8, 3.0)
    worker.service.gone(1, 7.0, complete=True)
    assert rates()["c"] == worker.service.per_s


def test_the_prompt_budget_as_told_and_as_kept(bench: Bench) -> None:
    assert not [key for key in bench.scrape() if key[0] == "prompt_budget_tokens"]
    bench.dispatcher.bound_prompts_by(512)
    bench.dispatcher.apply(SnapshotReceived("a", TELLING, bench.now_s))
    assert not [key for key in bench.scrape() if key[0] == "prompt_budget_tokens"], "none takes it"
    for worker, kept in (("a", 512), ("b", 0)):
        told = msgspec.structs.replace(TELLING, prompt_budget=kept)
        bench.dispatcher.apply(SnapshotReceived(worker, told, bench.now_s))
    samples = bench.scrape()
    assert samples["prompt_budget_tokens", ("router", "g")] == 512
    assert samples["prompt_window_steps", ("g",)] == 1
    assert samples["prompt_budget_tokens", ("engines", "g")] == 0


def test_workers_by_source_and_by_who_decides_on_admission(bench: Bench) -> None:
    bench.step(1, a=10)
    samples = bench.scrape()
    sources = {"snapshots": 1, "own": 1, "metrics": 0}
    assert {s: samples["workers", ("g", s)] for s in sources} == sources
    assert samples["workers", ("other", "own")] == 1
    assert samples["admission_workers", ("headroom", "g")] == 1
    assert samples["admission_workers", ("ended", "g")] == 0
    ended = msgspec.structs.replace(TELLING, admission=ADMISSION_ENDED)
    bench.dispatcher.apply(SnapshotReceived("a", ended, bench.now_s))
    bench.dispatcher.apply(SnapshotReceived("b", BASE, bench.now_s))
    samples = bench.scrape()
    assert samples["admission_workers", ("ended", "g")] == 1
    assert samples["admission_workers", ("engine", "g")] == 1
    assert ("admission_workers", ("headroom", "g")) not in samples


def test_preemptions_since_the_router_knows_the_engines(bench: Bench) -> None:
    def say(sequence: int, preempted: int, epoch: str = "e") -> None:
        told = msgspec.structs.replace(
            BASE, sequence=sequence, epoch=epoch, preemptions_total=preempted
        )
        bench.dispatcher.apply(SnapshotReceived("a", told, bench.now_s))

    say(1, 500)
    say(2, 503)
    assert bench.scrape()["preemptions_total", ("g",)] == 3
    say(1, 2, "anew")
    assert bench.scrape()["preemptions_total", ("g",)] == 5
    bench.dispatcher.apply(WorkerDown("a", "gone"))
    assert bench.scrape()["preemptions_total", ("g",)] == 5
    bench.dispatcher.apply(WorkerUp("a"))
    say(9, 700, "anew")
    assert bench.scrape()["preemptions_total", ("g",)] == 5


def test_an_agents_power_counts_where_snapshots_tell_none(bench: Bench) -> None:
    for worker, power_w in (("a", 1.0), ("c", 250.5)):
        bench.dispatcher.apply(PowerTold(worker, power_w, 0.0, bench.now_s))
    bench.step(1, a=10)
    samples = bench.scrape()
    assert samples["worker_power_watts", ("g", "0", "a")] == 100
    assert samples["worker_power_watts", ("other", "", "c")] == 250.5
    bench.now_s += METER_SILENT_S
    assert ("worker_power_watts", ("other", "", "c")) not in bench.scrape()


def test_gauges_of_a_dead_worker_end_while_totals_stay(bench: Bench) -> None:
    bench.step(1, a=10, b=4)
    gap = msgspec.structs.replace(BASE, kind="delta", sequence=5, step=2)
    bench.dispatcher.apply(SnapshotReceived("a", gap, 100.0))
    before = bench.scrape()
    a = ("g", "0", "a")
    assert before["snapshot_gaps_total", ("g",)] == 3
    bench.dispatcher.apply(WorkerDown("a", "gone"))
    after = bench.scrape()
    assert after["worker_up", a] == 0
    shown = {name for name, labels in after if labels == a}
    assert shown == {"worker_up"}
    assert after["snapshot_gaps_total", ("g",)] == 3
    counters = [key for key in before if key[0].endswith("_total")]
    assert all(after[key] >= before[key] for key in counters if not key[0].startswith("process"))


def test_requests_by_outcome_and_rounds(bench: Bench) -> None:
    stats = bench.dispatcher.deciders["g"].stats
    for number, outcome in enumerate(Outcome, 1):
        stats.outcomes[outcome] += number
    stats.rejected, stats.unserved, stats.assigned, stats.returned = 5, 6, 7, 8
    stats.rounds, stats.policy_errors, stats.held_rounds = 9, 10, 11
    samples = bench.scrape()
    ended = [samples["requests_total", ("g", outcome.value)] for outcome in Outcome]
    assert ended == [1, 2, 3, 4, 5]
    assert samples["requests_total", ("g", "rejected")] == 5
    assert samples["requests_total", ("g", "unserved")] == 6
    assert samples["requests_assigned_total", ("g",)] == 7
    assert samples["requests_returned_total", ("g",)] == 8
    assert samples["rounds_total", ("g",)] == 9
    assert samples["policy_errors_total", ("g",)] == 10
    assert samples["rounds_held_total", ("g",)] == 11
    assert samples["pool_requests", ("g",)] == 0
    assert samples["pool_limit_requests", ("g",)] == 1024
    assert samples["requests_total", ("other", "completed")] == 0


def test_requests_that_wait_and_their_prompt_tokens(bench: Bench) -> None:
    for request in core.requests([10, 20]):
        bench.dispatcher.deciders["g"].pool.add(request)
    samples = bench.scrape()
    assert samples["pool_requests", ("g",)] == 2
    assert samples["pool_tokens", ("g",)] == 30


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
    bench.agents.received, bench.agents.broken, bench.agents.failures = 9, 10, 11
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
        "agent_messages_received_total",
        "agent_messages_broken_total",
        "agent_failures_total",
    )
    assert [samples[name, ()] for name in names] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_the_text_is_as_prometheus_client_writes_it() -> None:
    bench = Bench([WorkerSpec('a"b\\\n', "http://h:1"), *SPECS])
    for spec in SPECS:
        bench.dispatcher.apply(WorkerUp(spec.id))
    bench.step(1, a=10, b=5)
    registry = CollectorRegistry()
    registry.collect = bench.metrics._collect  # type: ignore[method-assign]
    expected = generate_latest(registry).decode()
    assert expected.count("\n") > 300
    assert bench.text().startswith(expected)


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
    port.began(first, "d", bench.now_s + 2)
    port.apply(Fetched(first.id))
    port.end(first, Outcome.COMPLETED)
    again, waiter = port.prefill_again(ready[1][0])
    assert (await waiter).id == "p"
    whole, _ = port.serve_whole(again)
    port.end(whole, Outcome.ABORTED)
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


def test_keys_are_told_by_their_names(bench: Bench) -> None:
    alice, bob = parse_keys("a 0123456789abcdef\nb 0123456789abcdeF rate=1/s", "-")
    bench.limits.name(["a", "b"])
    bench.limits.enter(alice, 0.0)
    bench.limits.enter(bob, 0.0)
    with pytest.raises(KeyLimitError):
        bench.limits.enter(bob, 0.0)
    bench.limits.unauthorized = 3
    asking = replace(core.request(1, slots=2), tenant="a", group="g")
    decider = bench.dispatcher.deciders["g"]
    decider.pool.add(asking)
    decider.group.held["b"] += asking.slots
    samples = bench.scrape()

    def of(name: str, *labels: str) -> list[float]:
        return [samples[name, (key, *labels)] for key in "ab"]

    assert of("key_requests_total") == of("key_requests") == [1, 1]
    assert (of("key_pool_requests"), of("key_slots")) == ([1, 0], [0, 2])
    assert (of("key_limited_total", "rate"), of("key_limited_total", "concurrency")) == (
        [0, 1],
        [0, 0],
    )
    assert samples["unauthorized_requests_total", ()] == 3


def test_an_ejected_worker_says_so_and_has_ten_series_all_the_same(bench: Bench) -> None:
    bench.step(1, a=10, b=10)
    group = bench.dispatcher.cluster.groups["g"]
    while not group.ejections:
        bench.dispatcher.apply(Failed("x", "a", bench.now_s))
    samples = bench.scrape()
    assert samples["worker_breaker", ("g", "0", "a")] == 2
    assert samples["worker_ejections_total", ("g",)] == 1
    assert len([name for name, labels in samples if "a" in labels]) == 10
    assert not [labels for name, labels in samples if name == "worker_breaker" and "b" in labels]
    bench.now_s += 5
    group.review(bench.now_s)
    assert bench.scrape()["worker_breaker", ("g", "0", "a")] == 1


def test_workers_that_are_drained(bench: Bench) -> None:
    assert bench.scrape()["workers_draining", ("g",)] == 0
    group = bench.dispatcher.cluster.groups["g"]
    next(iter(group.workers.values())).drain(draining=True)
    assert bench.scrape()["workers_draining", ("g",)] == 1
