"""What is measured in a recording, what policies would have done, and what it takes in joules."""

from collections.abc import Sequence
from dataclasses import asdict

import pytest
from msgspec.structs import replace

from loadgen.diagnose.analysis.findings import Findings, findings
from loadgen.diagnose.analysis.verdict import Word
from loadgen.diagnose.analysis.window import Span, Window, window_of
from loadgen.diagnose.diagnosis import Diagnosis, diagnose_window, report
from loadgen.diagnose.diagnosis_table import _conditions
from loadgen.diagnose.energy_per_day import Energy
from loadgen.diagnose.simulated import recorded_lengths
from router.core.errors import ConfigError, InputError
from router.core.types import Dispatch
from router.recording.lines import (
    Header,
    PolicyLine,
    RecordedGroup,
    Recording,
    RequestLine,
    StepLine,
)
from tests.support.recorded import (
    GROUP,
    STEP_TIME,
    Cluster,
    header,
    like,
    recording,
    request,
    run,
    step,
)

FEW = ("bfio", "balance_route")


def window(
    steps: Sequence[StepLine] = (),
    requests: Sequence[RequestLine] = (),
    head: Header | None = None,
    span: Span | None = None,
) -> Window:
    whole = Recording(head or header(2), tuple(steps), tuple(requests))
    return window_of(whole, span or Span())


def found(*steps: StepLine, head: Header | None = None) -> Findings:
    return findings(window(steps, head=head))


def fitted(*, waited_s: float | None = None, power_w: float | None = None) -> list[StepLine]:
    """Steps of 2 ms + 1 us for each token of the fullest; the other one has half as many."""
    steps = []
    for number in range(1, 301):
        peak = 1000 + 10 * (number % 7)
        seconds = 2e-3 + 1e-6 * peak
        power = None if power_w is None else [power_w, 2 * power_w]
        steps.append(
            step(
                number,
                [peak, peak // 2],
                seconds,
                waited_s=waited_s,
                power_w=power,
                time_s=0.003 * number,
            )
        )
    return steps


@pytest.fixture(scope="module")
def uneven() -> Diagnosis:
    return diagnose_window(window_of(recording(Cluster()), Span()), policies=FEW)


def test_imbalance_and_loads_are_those_of_the_steps() -> None:
    got = found(step(1, [100, 300]), step(2, [200, 200]), step(3, [None, 70]))

    assert got.waiting.imbalance_tokens == pytest.approx((200 + 0 + 0) / 3)
    assert got.waiting.mean_load_tokens == pytest.approx((400 + 400 + 70) / 5)
    assert got.waiting.max_load_tokens == pytest.approx((300 + 200 + 70) / 3)
    assert got.waiting.throughput_tok_s == pytest.approx(20 / 0.03)
    assert got.load.workers == 2


def test_idle_share_is_modelled_by_the_fitted_step() -> None:
    got = found(*fitted())
    peaks = [1000 + 10 * (n % 7) for n in range(1, 301)]
    seconds = sum(2e-3 + 1e-6 * peak for peak in peaks)

    assert got.barrier.fitted is not None
    assert got.barrier.fitted.per_token_s == pytest.approx(1e-6, rel=1e-6)
    assert got.barrier.per_token_most_s == pytest.approx(1e-6, rel=1e-3)
    assert got.barrier.attention_share == pytest.approx(1e-6 * sum(peaks) / seconds, rel=1e-6)
    assert got.waiting.idle_share_is == "modelled"
    imbalance = sum(2 * peak - peak - peak // 2 for peak in peaks)
    assert got.waiting.idle_share == pytest.approx(1e-6 * imbalance / (2 * seconds), rel=1e-6)


def test_idle_share_is_measured_where_the_engines_time_it() -> None:
    got = found(*fitted(waited_s=1e-3))

    assert got.waiting.idle_share_is == "measured"
    seconds = sum(each.step_s for each in fitted())
    assert got.waiting.idle_share == pytest.approx(300e-3 / (2 * seconds))


def test_idle_share_is_not_known_where_loads_are_all_alike() -> None:
    got = found(*(step(number, [500, 400]) for number in range(1, 301)))

    assert (got.waiting.idle_share, got.waiting.idle_share_is) == (None, None)
    assert got.waiting.figures is None
    assert got.barrier.per_token_most_s is None
    assert got.waiting.even_share == pytest.approx(0.1)


def test_what_a_token_costs_at_the_most_lies_above_the_line() -> None:
    noisy = [step(n, [1000 + n % 50, 900], 0.01 + 1e-4 * (n * 37 % 11)) for n in range(1, 401)]
    got = found(*noisy)

    assert got.barrier.fitted is None
    assert got.barrier.per_token_most_s is not None
    assert 0 < got.barrier.per_token_most_s < 1e-5


def test_together_is_asked_of_steps_with_two_busy_workers_only() -> None:
    got = found(step(1, [9, 9]), step(2, [9, 9], together=False), step(3, [9, 0], together=False))

    assert got.barrier.together_share == 0.5
    assert found(step(1, [9, 0])).barrier.together_share is None
    # Busy is who holds tokens: the last of its requests may have ended in the step.
    ended = step(1, [9, 9], running=[4, 0], together=False)
    assert found(ended).barrier.together_share == 0


def test_slots_that_memory_keeps_empty() -> None:
    # 12 of 16 slots of each are free, and 7 wait in an engine although nobody's slots are full.
    held = found(*(step(n, [90, 90], queued=7) for n in range(1, 11)), head=header(2, kv_tokens=99))
    assert held.memory.held_share == pytest.approx(7 / 32)
    assert held.memory.used_mean == pytest.approx(90 / 99)
    # One is full, the other has slots but also memory: whoever waits, waits for the full one.
    running = [16, 4]
    uneven = [step(n, [90, 50], queued=7, running=running) for n in range(1, 11)]
    assert found(*uneven, head=header(2, kv_tokens=99)).memory.held_share == 0
    # Its memory is nearly full: that one may hold them.
    full = [step(n, [50, 90], queued=7, running=running) for n in range(1, 11)]
    assert found(*full, head=header(2, kv_tokens=99)).memory.held_share == pytest.approx(7 / 32)


def test_requests_that_wait_beside_full_steps_of_prompts_wait_for_their_turn() -> None:
    def held(prompts: list[int]) -> float | None:
        steps = [step(n, [20, 20], queued=30, prompts=[2000, 2000]) for n in range(1, 6)]
        steps += [step(n, [20, 20], queued=30, prompts=prompts) for n in range(6, 11)]
        return found(*steps, head=header(2, kv_tokens=99)).memory.held_share

    # 24 of 32 slots are free.
    assert held([1800, 1800]) == 0
    assert held([1799, 1800]) == pytest.approx(12 / 32 / 2)
    assert held([0, 0]) == pytest.approx(24 / 32 / 2)


def test_memory_keeps_from_a_worker_who_waits_in_the_router() -> None:
    steps = [step(n, [90, 50], pool=7) for n in range(1, 11)]
    pool, roomy = header(2, dispatch="pool", kv_tokens=99), header(2, dispatch="pool")

    assert found(*steps, head=pool).memory.held_share == pytest.approx(7 / 32)
    # With memory to spare it is the router that is slow.
    assert found(*steps, head=roomy).memory.held_share == 0
    assert found(*steps, head=header(2, kv_tokens=99)).memory.held_share == 0


def test_what_is_not_told_of_slots_and_memory_is_not_known() -> None:
    steps = [step(n, [90, 90], pool=7) for n in range(1, 11)]
    untold = header(2, slots=None, dispatch="pool", kv_tokens=None)

    assert found(*steps, head=untold).memory.held_share is None
    assert found(*steps, head=untold).load.slots_used is None
    assert found(*steps, head=untold).memory.used_mean is None
    assert found(*steps, head=header(2, dispatch="pool", kv_tokens=None)).memory.held_share == 0


def test_a_step_or_two_of_waiting_for_a_slot_is_none() -> None:
    steps = [step(n, [90, 90], pool=2) for n in range(1, 11)]
    requests = [request(n, 0.01 * n) for n in range(1, 11)]
    head = header(2, dispatch="pool", kv_tokens=100)

    assert findings(window(steps, requests, head)).memory.held_share == 0
    assert findings(window(steps, [], head)).memory.held_share == pytest.approx(2 / 32)
    untold = header(2, slots=None)
    assert findings(window(steps, requests, untold)).load.waiting_share == 0
    assert findings(window(steps, [], untold)).load.waiting_share == 1


def test_a_load_that_falls_is_told_by_its_halves() -> None:
    steps = [step(n, [9, 9], running=[4, 4] if n <= 5 else [1, 1]) for n in range(1, 11)]

    assert found(*steps).load.second_half == pytest.approx(0.25)
    assert found().load.second_half is None


def test_requests_wait_where_there_are_more_than_free_slots() -> None:
    # 12 of 16 slots of each of the two are free.
    steps = [step(1, [9, 9], pool=24), step(2, [9, 9], pool=20, queued=5)]

    assert found(*steps).load.waiting_share == 0.5
    assert found(*steps, head=header(2, slots=4)).load.waiting_share == 1


def test_a_window_is_what_ended_in_it_in_engine_seconds() -> None:
    # The recording begins with its first step, at 100 s.
    steps = [step(n, [5, 5], 0.5, time_s=100.0 + n) for n in range(1, 11)]
    requests = [request(0, 102.5), request(1, 104.5), request(2, 104.5, outcome="aborted")]
    cut = window(steps, requests, span=Span(start_s=3, seconds=4, time_scale=2))

    assert cut.steps == 5
    assert cut.elapsed_s == 2
    assert [each.ended_s for each in cut.requests] == [0.75, 0.75]
    assert [each.arrival_s for each in cut.completed] == [0.25]
    assert findings(cut).load.failed == 1


def test_the_busiest_group_is_taken_unless_another_is_asked_for() -> None:
    head = header(2)
    head = header(2, groups={**head.groups, "other": head.groups[GROUP]})
    other = StepLine(1, "other", 1.0, 0.01, [5, 5], [9, 9])
    whole = Recording(head, (step(1, [5, 5]), other), ())

    assert (window_of(whole, Span()).group, window_of(whole, Span()).others) == ("other", (GROUP,))
    assert window_of(whole, Span(), GROUP).group == GROUP
    with pytest.raises(ConfigError, match="'third' was not recorded; give one of default, other"):
        window_of(whole, Span(), "third")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (header(2, groups={}), "has no group of workers"),
        (header(2, groups={GROUP: RecordedGroup(False, ())}), "default has no workers"),
        (header(2, dispatch="later"), "dispatch 'later' is unknown"),
    ],
)
def test_recordings_of_nothing(head: Header, message: str) -> None:
    with pytest.raises(InputError, match=message):
        window_of(Recording(head, (), ()), Span())


def test_a_start_behind_the_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="--start 9: the recording ends after"):
        window([step(1, [5, 5])], span=Span(start_s=9))


@pytest.mark.parametrize("policy", ["bfio", "balance_route"])
def test_a_prediction_is_what_the_same_requests_then_show(policy: str, uneven: Diagnosis) -> None:
    seen = uneven.prospects
    assert seen is not None
    predicted = seen.of(policy)
    assert predicted is not None
    records, _ = run(like(Cluster(), policy, predicted.dispatch))
    was = uneven.found.waiting
    true_idle_s = STEP_TIME.per_token_s * float(records.imbalance_tokens.sum())
    true_gain = true_idle_s / (4 * float(records.seconds.sum())) - (was.idle_share or 0)

    assert seen.mode == "full"
    assert predicted.predicted.idle_share - (was.idle_share or 0) == pytest.approx(
        true_gain, rel=0.2
    )


def test_the_policy_in_force_is_predicted_as_it_was_measured(uneven: Diagnosis) -> None:
    diagnosis = uneven
    assert diagnosis.prospects is not None
    current = diagnosis.prospects.current

    assert current is not None
    assert (current.policy, current.dispatch) == ("round_robin", Dispatch.INSTANT)
    measured = diagnosis.found.waiting.figures
    assert current.predicted is not None
    assert measured is not None
    assert asdict(current.predicted) == pytest.approx(asdict(measured))
    assert diagnosis.simulation_error is not None
    assert max(map(abs, diagnosis.simulation_error.values())) < 0.1
    assert diagnosis.verdict.word is Word.BALANCING_PAYS
    assert diagnosis.advice is diagnosis.prospects.of("bfio")


def test_without_a_known_policy_the_measured_figures_are_the_baseline() -> None:
    diagnosis = diagnose_window(
        window_of(recording(Cluster(), source="observe", policy=None), Span()), policies=["bfio"]
    )
    assert diagnosis.prospects is not None
    best = diagnosis.prospects.best

    assert diagnosis.prospects.current is None
    assert diagnosis.simulation_error is None
    assert best.predicted == best.simulated
    assert diagnosis.verdict.word is Word.BALANCING_PAYS


def test_a_cluster_with_an_empty_pool_gets_its_requests_when_they_came() -> None:
    cluster = Cluster(clients=40)
    diagnosis = diagnose_window(window_of(recording(cluster), Span()), policies=["bfio"])
    seen = diagnosis.prospects

    assert seen is not None
    assert seen.mode == "arrivals"
    assert seen.current is not None
    # Arrivals are a circle of the recorded ones: so many run at once as did.
    assert seen.current.simulated.throughput_tok_s == pytest.approx(
        diagnosis.found.waiting.throughput_tok_s, rel=0.1
    )


def used(whole: Recording, price: float | None = None) -> Energy:
    found = diagnose_window(window_of(whole, Span()), price, ["bfio"]).energy
    assert found is not None
    return found


def test_joules_are_measured_where_workers_tell_their_power() -> None:
    measured = used(Recording(header(2), tuple(fitted(power_w=150)), ()), 0.5)

    assert measured.power_is == "measured"
    assert measured.power_w == pytest.approx(450)
    assert measured.waiting_per_day_j is None
    assert measured.saved_per_day_j is None
    assert measured.money(3.6e6) == 0.5
    assert measured.money(None) is None


def test_without_a_meter_and_levels_power_is_unknown() -> None:
    unknown = used(Recording(header(2), tuple(fitted()), ()), 0.5)

    assert (unknown.power_is, unknown.power_w, unknown.per_day_j) == ("unknown", None, None)
    assert unknown.money(unknown.per_day_j) is None
    levels = header(2, power_levels=(100.0, 200.0, 400.0))
    # Where loads are all alike nobody knows how much of a step is waiting.
    alike = tuple(step(number, [500, 400]) for number in range(1, 301))
    assert used(Recording(levels, alike, ())).power_w is None


def test_where_there_is_no_barrier_all_power_is_spent_on_computing() -> None:
    apart = tuple(step(n, [500, 400 + n], together=False) for n in range(1, 301))
    energy = used(Recording(header(2, power_levels=(100.0, 200.0, 400.0)), apart, ()))

    assert energy.power_is == "modelled"
    assert energy.power_w == pytest.approx(800)
    assert energy.waiting_per_day_j == 0


def test_a_switch_saves_a_share_even_where_watts_are_unknown(uneven: Diagnosis) -> None:
    assert uneven.energy is not None
    assert uneven.energy.saved_share is not None
    assert (uneven.energy.power_w, uneven.energy.saved_per_day_j) == (None, None)


def test_the_output_of_several_answers_is_shared_out_whole() -> None:
    several = [replace(request(n, 1.0, output=1003), slots=4) for n in range(3)]
    few = replace(request(3, 1.0, output=3), slots=4)
    got = window([step(n, [9, 9]) for n in range(1, 200)], [*several, few])

    lengths = [part.lengths[1] for part in got.parts]
    assert lengths == [250, 251, 251, 251] * 3 + [1, 1, 1]
    assert findings(got).load.output_tokens == pytest.approx(3012 / 15)
    assert list(_stream_of(got)) == sorted(lengths)


def _stream_of(of: Window) -> list[int]:
    return sorted(row.output_tokens for row in recorded_lengths(of).trace.requests)


def test_requests_for_several_answers_wait_for_as_many_slots() -> None:
    steps = [step(n, [90, 50], pool=3) for n in range(1, 11)]
    pool = header(2, dispatch="pool", kv_tokens=99)
    one, four = (replace(request(1, 0.05), slots=slots) for slots in (1, 4))
    single, several = (findings(window(steps, [each], pool)) for each in (one, four))

    assert (single.load.waiting, several.load.waiting) == (3, 12)
    assert single.memory.held_share == pytest.approx((3 - 0.2) / 32)
    assert several.memory.held_share == pytest.approx((12 - 0.8) / 32)


def test_of_a_policy_that_changed_the_time_since_is_diagnosed() -> None:
    changes = (
        PolicyLine(0.35, "jsq", "pool"),
        PolicyLine(0.6, "bfio", "pool"),
        PolicyLine(9.9, "fcfs", "pool"),
    )
    steps = tuple(step(n, [n, n]) for n in range(1, 101))
    ended = tuple(request(n, 0.1 * n) for n in range(1, 11))
    whole = Recording(header(2), steps, ended, changes=changes)

    later = window_of(whole, Span())
    assert (later.policy, later.dispatch) == ("bfio", Dispatch.POOL)
    assert later.steps == 41
    assert later.elapsed_s == pytest.approx(0.4)
    assert [(each.policy, round(each.after_s, 6)) for each in later.changes] == [
        ("round_robin", 0.35),
        ("jsq", 0.6),
    ]
    assert len(later.requests) == 5
    between = window_of(whole, Span(0.4, 0.1))
    assert (between.policy, between.changes, between.steps) == ("jsq", (), 11)
    listened = window_of(whole, Span(listened_s=2.0))
    assert listened.elapsed_s == pytest.approx(1.4)
    said = _conditions(later)
    assert "under bfio, pool" in said
    assert "changed 2 times, the last time after 0.6 s, from jsq, pool" in said
    conditions = report(diagnose_window(later, policies=["bfio"]))["conditions"]
    assert [each["policy"] for each in conditions["policy_changes"]] == ["round_robin", "jsq"]


def test_joules_of_waiting_take_calibrated_levels() -> None:
    head = header(2, power_levels=(100.0, 200.0, 400.0))
    steps = tuple(fitted(waited_s=1.5e-3))
    idle_share = findings(window(steps)).waiting.idle_share
    assert idle_share is not None
    energy = used(Recording(head, steps, ()))
    mean_w = 200 * idle_share + 400 * (1 - idle_share)

    assert energy.power_w == pytest.approx(2 * mean_w)
    assert energy.per_day_j is not None
    assert energy.waiting_per_day_j == pytest.approx(energy.per_day_j * 200 * idle_share / mean_w)
    assert energy.money(energy.per_day_j) is None


def test_less_waiting_saves_by_levels_what_they_say() -> None:
    whole = recording(Cluster(), power_levels=(100.0, 400.0, 400.0))
    diagnosis = diagnose_window(window_of(whole, Span()), 1.0, ["bfio"])
    energy, advice = diagnosis.energy, diagnosis.advice
    assert energy is not None
    assert advice is not None
    assert energy.saved_share is not None
    # Waiting takes as much as work: fewer seconds for the same tokens are all that is saved.
    now = diagnosis.found.waiting.throughput_tok_s
    assert energy.saved_share == pytest.approx(1 - now / advice.predicted.throughput_tok_s)


def test_without_steps_there_are_no_joules() -> None:
    diagnosis = diagnose_window(window())

    assert diagnosis.energy is None
    assert report(diagnosis)["energy"] is None
    assert diagnosis.found.waiting.even_share == 0


def test_power_that_one_worker_does_not_tell_is_not_measured() -> None:
    steps = tuple(
        step(each.step, each.loads, each.step_s, power_w=[150.0, None]) for each in fitted()
    )

    assert used(Recording(header(2), steps, ())).power_is == "unknown"
