"""Prefill workers of the decode simulator, on examples small enough to work out by hand."""

import json
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from docs.kept_figures import read_figures
from loadgen.engine.kv_handoff import TransferTime
from loadgen.engine.prefill_settings import PrefillTime
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.prefill_workers import PrefillConfig
from loadgen.simulator.decode.request_streams import Job, TimedStream
from loadgen.simulator.decode.simulated_router import seen_prompt_tokens
from loadgen.traces.arrivals import Arrivals
from router.core.errors import ConfigError
from router.core.forecast.forecast import WorkProfile
from router.core.step_time import StepTime
from router.core.types import Dispatch
from tests.support.paper import PAPER
from tests.support.plain_report import KEPT, PLAIN, POLICIES, plain_report

UNTIMED = {"decision_ms_p50", "decision_ms_p99"}
PREFILL = PrefillConfig(1, PrefillTime(1.0, 0.1), chunk=10, transfer=TransferTime(0.5, 0.01))
TINY = DecodeConfig(
    policy="fcfs",
    lengths=LawLengths.parse("constant:1,1"),
    workers=1,
    slots=1,
    pool=8,
    steps=50,
    warmup=0,
    step_time=StepTime(1.0, 0.01),
    prefill=PREFILL,
    **PAPER,
)


def jobs(*lengths: tuple[int, int]) -> TimedStream:
    return TimedStream(Job(number, *each, 0.0) for number, each in enumerate(lengths))


def test_every_part_of_the_way_to_the_first_token() -> None:
    # Prompts: 10 tokens until 2 s, 5 + 5 until 4 s, 5 until 5.5 s. The first is fetched from 4 to
    # 4.65 s, within an empty step, and runs from 5 to 7.31 s; the second is fetched from then on
    # to 7.91 s, and runs from 8.31 s to 9.41 s.
    result = simulate(TINY, stream=jobs((15, 2), (10, 1)), keep_records=True)

    assert result.records is not None
    assert list(result.records.seconds) == pytest.approx([1.0, 1.15, 1.16, 1.0, 1.1])
    assert result.ttft_mean_s == pytest.approx((6.15 + 9.41) / 2)
    found = result.prefill
    assert found is not None
    assert found.prefill_queue_mean_s == pytest.approx((0 + 2) / 2)
    assert found.prefill_mean_s == pytest.approx((4 + 3.5) / 2)
    assert found.handoff_wait_mean_s == pytest.approx((0 + 1.81) / 2)
    assert found.kv_transfer_mean_s == pytest.approx((0.65 + 0.6) / 2)
    assert found.first_step_mean_s == pytest.approx(1.5)
    # From the first step on, at 4 s, to the last one's beginning, at 8.31 s.
    kept = 15 * 0.65 + 10 * (7.91 - 5.5)
    assert found.prefill_kept_mean_tokens == pytest.approx(kept / 4.31)
    assert found.prefill_kept_max_tokens == 15
    assert found.prefill_busy_share == pytest.approx(1.5 / 4.31)
    assert found.prefill_stalled_share == 0


def test_those_bound_early_are_all_fetched_once_a_slot_is_free() -> None:
    # The first runs from 5 to 9.66 s. The others, ready at 6 and 7.5 s, are in the engine by then;
    # both are fetched until 10.26 s, within an empty step, and run from 10.66 and from 11.76 s.
    config = replace(TINY, policy="jsq", dispatch=Dispatch.INSTANT)
    result = simulate(config, stream=jobs((15, 4), (10, 1), (10, 1)))

    assert result.ttft_mean_s == pytest.approx((6.15 + 11.76 + 12.86) / 3)
    found = result.prefill
    assert found is not None
    assert found.handoff_wait_mean_s == pytest.approx((0 + 3.66 + 2.16) / 3)
    assert found.kv_transfer_mean_s == pytest.approx((0.65 + 0.6 + 0.6) / 3)
    assert found.first_step_mean_s == pytest.approx((1.5 + 1.5 + 2.6) / 3)


def test_a_prompt_waits_until_memory_is_free() -> None:
    # The second prompt is computed once the first one's KV has been fetched, at 4.15 s.
    config = replace(TINY, prefill=replace(PREFILL, kv_tokens=20))
    result = simulate(config, stream=jobs((15, 5), (15, 1)))

    found = result.prefill
    assert found is not None
    assert found.prefill_queue_mean_s == pytest.approx((0 + 4.15) / 2)
    assert found.prefill_kept_max_tokens == 15
    assert found.prefill_stalled_share > 0
    assert result.completed == 2


def test_a_prompt_goes_to_the_worker_with_the_fewest_outstanding_tokens() -> None:
    config = replace(TINY, slots=3, prefill=replace(PREFILL, workers=2, chunk=100))
    result = simulate(config, stream=jobs((60, 1), (20, 1), (30, 1), (30, 1)))

    found = result.prefill
    assert found is not None
    # Given out at once, and computed in one step of each worker: 60 tokens, and 20 + 30 + 30.
    assert found.prefill_mean_s == pytest.approx((7 + 3 * 9) / 4)


def test_the_warm_up_is_left_out() -> None:
    stream = jobs((15, 2), (10, 1))
    found = simulate(replace(TINY, warmup=3), stream=stream).prefill

    assert found is not None
    assert found.prefill_queue_mean_s == pytest.approx(2)  # the second one only
    assert found.handoff_wait_mean_s == pytest.approx(1.81)
    assert found.prefill_busy_share == 0


def test_prompts_that_are_not_computed_at_the_end_are_counted() -> None:
    stream = (15, 2), (10, 1)
    ends = [simulate(replace(TINY, steps=n), stream=jobs(*stream)) for n in (1, 3, 50)]

    assert [end.prefill and end.prefill.prefill_waiting_at_end for end in ends] == [1, 0, 0]
    assert [end.waiting_at_end for end in ends] == [0, 1, 0]


def test_nobody_who_starts_leaves_no_means() -> None:
    found = simulate(replace(TINY, steps=1), stream=jobs((15, 2))).prefill

    assert found is not None
    assert found.prefill_mean_s is None
    assert found.prefill_kept_max_tokens == 15


def test_a_prompt_that_no_memory_holds_is_said() -> None:
    config = replace(TINY, prefill=replace(PREFILL, kv_tokens=14))
    with pytest.raises(ConfigError, match="--prefill-kv-tokens 14 cannot hold a prompt of 15"):
        simulate(config, stream=jobs((15, 2)))


def test_full_arrivals_keep_as_many_waiting_before_decode() -> None:
    config = replace(PLAIN, prefill=replace(PREFILL, time=PrefillTime(1e-3, 1e-6), chunk=512))
    result = simulate(config)

    assert result.waiting_at_end <= PLAIN.pool
    assert result.completed > 0


def test_without_prefill_workers_the_report_is_as_it_was() -> None:
    kept = read_figures(KEPT)
    assert tuple(kept) == POLICIES
    for policy, expected in kept.items():
        report = plain_report(policy)

        assert list(report) == list(expected)
        assert json.dumps(report["parameters"]) == json.dumps(expected["parameters"])
        del report["parameters"], expected["parameters"]
        assert {key for key in report if report[key] is None} == UNTIMED
        for key in report.keys() - UNTIMED:
            assert report[key] == pytest.approx(expected[key], rel=1e-9), (policy, key)


def test_prefill_on_both_sides_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prefill-cost and t_p are of workers that compute"):
        replace(TINY, profile=WorkProfile(prefill_beta=1.0))


def test_sizes_are_seen_with_an_error_that_is_right_on_average() -> None:
    job = [Job(number, 1000, 1, 0.0) for number in range(4000)]
    seen = [seen_prompt_tokens(each, 0.25, 7) for each in job]

    assert fmean(seen) == pytest.approx(1000, rel=0.02)
    assert stdev(seen) == pytest.approx(255, rel=0.05)
    assert seen == [seen_prompt_tokens(each, 0.25, 7) for each in job]
    assert seen_prompt_tokens(job[0], 0.25, 8) != seen[0]
    assert seen_prompt_tokens(job[0], 0.0, 7) == 1000


def test_an_error_of_sizes_concerns_the_decision_only() -> None:
    config = replace(PLAIN, policy="least_tokens", arrivals=Arrivals("poisson", 40.0))
    exact, estimated = simulate(config), simulate(replace(config, size_error=1.0))

    assert estimated.parameters["size_error"] == 1.0
    assert estimated.completed == exact.completed  # nobody waits: the same requests start
    assert estimated.mean_admitted_prompt_tokens == exact.mean_admitted_prompt_tokens
