"""The decode simulator on examples small enough to work out by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from loadgen.model.power_model import PowerModel
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_command import ARRIVALS
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_results import DecodeResult
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.request_streams import Job, TimedStream
from loadgen.traces.arrivals import Arrivals
from router.core.errors import InputError
from router.core.forecast.forecast import Outlook, WorkProfile
from router.core.forecast.look_ahead import choose
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.step_time import StepTime
from router.core.types import Assignment, Dispatch, Request, WorkerView
from tests.support.paper import PAPER

TINY = DecodeConfig(
    policy="fcfs",
    lengths=LawLengths.parse("constant:1,1"),
    workers=2,
    slots=1,
    pool=8,
    steps=50,
    warmup=0,
    step_time=StepTime(1.0, 0.01),
    power=PowerModel(100, 400, 1.0),
    **PAPER,
)
SMALL = DecodeConfig(
    policy="bfio",
    lengths=LawLengths.parse("geometric:100,40"),
    workers=4,
    slots=8,
    pool=16,
    steps=300,
    warmup=50,
    **PAPER,
)


def jobs(*lengths: tuple[int, int], arrival_s: float = 0.0) -> TimedStream:
    """Requests of these prompt and output tokens, in this order, all at one time."""
    return TimedStream(
        Job(number, prompt, output, arrival_s) for number, (prompt, output) in enumerate(lengths)
    )


def steps_s(result: DecodeResult) -> list[float]:
    assert result.records is not None
    return list(result.records.seconds)


class Witness(Policy):
    """A policy that keeps what it is shown, and does as another one."""

    def __init__(self, name: str) -> None:
        self._policy: Policy = POLICIES[name].make(PolicySettings())
        self.waiting: list[list[str]] = []
        self.views: list[list[WorkerView]] = []
        self.outlooks: list[Outlook | None] = []
        self.assigned: list[Assignment] = []

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        self.waiting.append([request.id for request in waiting])
        self.views.append(list(workers))
        self.outlooks.append(known.outlook)
        assignments = self._policy.assign(waiting, workers, known)
        self.assigned += assignments
        return assignments


def test_every_figure_of_a_run_of_two_steps() -> None:
    # Step 0: 10 and 30 tokens, 1.3 s; the second request ends. Step 1: 11 and 20 tokens, 1.2 s.
    result = simulate(TINY, stream=jobs((10, 2), (30, 1), (20, 1)), keep_records=True)

    assert steps_s(result) == pytest.approx([1.3, 1.2])
    assert result.avg_imbalance_tokens == pytest.approx((20 + 9) / 2)
    assert result.throughput_tok_s == pytest.approx(4 / 2.5)
    assert result.tpot_mean_s == pytest.approx((2.5 / 2 + 1.3 + 1.2) / 3)
    assert result.ttft_mean_s == pytest.approx((1.3 + 1.3 + 2.5) / 3)
    assert result.energy_j == pytest.approx(1.3 * (200 + 400) + 1.2 * (100 + 300 * 0.55 + 400))
    assert result.mean_load_tokens == pytest.approx((10 + 30 + 11 + 20) / 4)
    assert result.max_load_tokens == pytest.approx((30 + 20) / 2)
    assert result.mean_admitted_prompt_tokens == pytest.approx(20)
    assert (result.max_pool_wait_steps, result.slot_bubble_steps) == (1, 0)
    assert (result.steps, result.completed, result.waiting_at_end) == (2, 3, 0)
    assert result.decision_ms_p50 is None


def test_what_belongs_to_the_warm_up_is_left_out() -> None:
    stream = jobs((10, 2), (30, 1), (20, 2))
    result = simulate(replace(TINY, warmup=1), stream=stream, keep_records=True)

    assert steps_s(result) == pytest.approx([1.2, 1.21])
    assert result.tpot_mean_s == pytest.approx(2.41 / 2)  # the last one only
    assert result.ttft_mean_s == pytest.approx(1.3 + 1.2)
    assert result.mean_admitted_prompt_tokens == 20
    assert result.completed == 2
    assert result.throughput_tok_s == pytest.approx(3 / 2.41)


def test_a_cost_per_request_is_part_of_the_step_time_but_not_of_the_load() -> None:
    config = replace(TINY, slots=2, step_time=StepTime(1.0, 0.01, 0.2))
    result = simulate(config, stream=jobs((10, 1), (5, 1), (30, 1)), keep_records=True)

    assert steps_s(result) == pytest.approx([1 + max(0.15 + 0.4, 0.3 + 0.2)])
    assert result.avg_imbalance_tokens == 2 * 30 - 45


@pytest.mark.parametrize(
    ("drift", "loads"), [(0.0, [10, 10, 10]), (2.0, [10, 12, 14]), (1.3, [10, 11, 13])]
)
def test_requests_grow_by_the_drift(drift: float, loads: list[int]) -> None:
    config = replace(TINY, profile=WorkProfile(growth=drift))
    result = simulate(config, stream=jobs((10, 3)), keep_records=True)

    assert result.records is not None
    assert result.records.loads[:, 0].tolist() == loads


def test_prefill_chunks_are_work_and_the_last_one_yields_the_first_token() -> None:
    config = replace(TINY, profile=WorkProfile(prefill_beta=0.5, prefill_chunk=10))
    result = simulate(config, stream=jobs((25, 2)), keep_records=True)

    assert steps_s(result) == pytest.approx([1.30, 1.30, 1.275, 1.26])
    assert result.ttft_mean_s == pytest.approx(1.30 + 1.30 + 1.275)
    assert result.tpot_mean_s == pytest.approx((1.30 + 1.30 + 1.275 + 1.26) / 2)
    assert result.records is not None
    assert result.records.tokens.tolist() == [0, 0, 1, 1]

    time = replace(TINY.step_time, per_prompt_token_s=0.5 * TINY.step_time.per_token_s)
    same = replace(TINY, profile=WorkProfile(prefill_chunk=10), step_time=time)
    assert steps_s(simulate(same, stream=jobs((25, 2)), keep_records=True)) == steps_s(result)


def test_a_dispatch_on_its_way_is_seen_and_leaves_a_bubble() -> None:
    witness = Witness("fcfs")
    config = replace(TINY, workers=1, dispatch_delay=2)
    result = simulate(config, stream=jobs((10, 1), (20, 1), (30, 1)), policy=witness)

    # Steps 2, 5 and 8 run one each; only while the second was awaited did another one wait.
    assert result.steps == 9
    assert result.slot_bubble_steps == 2
    assert len(witness.views) == 3
    assert result.ttft_mean_s == pytest.approx((3.1 + 6.3 + 9.6) / 3)

    witness = Witness("fcfs")
    simulate(replace(config, slots=2), stream=jobs((10, 1), arrival_s=0.5), policy=witness)
    assert witness.views == [[WorkerView("w0000", 0, 0, 2, slots=2)]]

    stream = TimedStream([Job(0, 10, 1, 0.0), Job(1, 20, 1, 0.5)])
    witness = Witness("fcfs")
    simulate(replace(config, slots=2), stream=stream, policy=witness)
    assert witness.views[1] == [WorkerView("w0000", 10, 1, 1, slots=2)]


def test_a_slot_that_nobody_waits_for_is_no_bubble() -> None:
    # The first worker is free from step 2 on; requests come at step 4, one of them has to wait.
    late = [Job(2, 10, 1, 4.0), Job(3, 10, 1, 4.0)]
    stream = TimedStream([Job(0, 10, 1, 0.0), Job(1, 10, 20, 0.0), *late])
    result = simulate(replace(TINY, dispatch_delay=1), stream=stream, keep_records=True)

    assert result.records is not None
    assert result.records.loads[:8, 0].tolist() == [0, 10, 0, 0, 0, 10, 0, 10]
    assert result.slot_bubble_steps == 1


@pytest.mark.parametrize(("delay", "overcommit"), [(0, 0), (4, 0), (4, 2)])
def test_a_pool_that_is_kept_full_is_full_at_every_decision(delay: int, overcommit: int) -> None:
    witness = Witness("fcfs")
    simulate(replace(SMALL, dispatch_delay=delay, overcommit=overcommit), policy=witness)

    assert {len(waiting) for waiting in witness.waiting} == {SMALL.pool}


def test_overcommitted_requests_start_as_soon_as_a_slot_is_free() -> None:
    config = replace(TINY, workers=1, dispatch_delay=2, overcommit=1)
    result = simulate(config, stream=jobs((10, 2), (20, 1), (30, 1)), keep_records=True)

    assert result.records is not None
    # The third is sent at step 4, once the first has left.
    assert result.records.loads[:, 0].tolist() == [0, 0, 10, 11, 20, 0, 30]


def test_overcommitted_requests_count_as_waiting_in_the_engine() -> None:
    witness = Witness("fcfs")
    config = replace(TINY, workers=1, overcommit=2, kv_tokens=40)
    stream = TimedStream([Job(0, 10, 9, 0.0), Job(1, 20, 1, 0.0), Job(2, 5, 1, 0.5)])
    simulate(config, stream=stream, policy=witness)

    assert witness.views[1] == [WorkerView("w0000", 31, 2, 1, waiting=1, kv_usage=11 / 40, slots=1)]


def test_instant_dispatch_queues_in_the_engines_in_order() -> None:
    witness = Witness("jsq")
    config = replace(TINY, policy="jsq", dispatch=Dispatch.INSTANT)
    stream = jobs((10, 2), (20, 1), (30, 1), (40, 1))
    result = simulate(config, stream=stream, policy=witness, keep_records=True)

    assert witness.waiting == [["0"], ["1"], ["2"], ["3"]]
    assert [assignment.worker_id for assignment in witness.assigned] == ["w0000", "w0001"] * 2
    assert result.records is not None
    assert result.records.loads.tolist() == [[10, 20], [11, 40], [30, 0]]
    assert result.max_pool_wait_steps == 0


def test_full_arrivals_with_instant_dispatch_keep_as_many_in_the_engines() -> None:
    config = replace(SMALL, policy="jsq", dispatch=Dispatch.INSTANT)
    witness = Witness("jsq")
    simulate(config, policy=witness)

    assert all(sum(view.requests for view in views) < 32 + 16 for views in witness.views)
    assert max(sum(view.requests for view in views) for views in witness.views) == 32 + 15


def test_a_policy_sees_the_oldest_of_a_long_queue() -> None:
    witness = Witness("fcfs")
    config = replace(TINY, workers=1, pool=2)
    result = simulate(config, stream=jobs(*[(10, 1)] * 5), policy=witness)

    assert witness.waiting == [["0", "1"], ["1", "2"], ["2", "3"], ["3", "4"], ["4"]]
    assert result.max_pool_wait_steps == 4


def test_a_better_priority_is_seen_first() -> None:
    witness = Witness("fcfs")
    stream = TimedStream([Job(0, 10, 1, 0.0, 1), Job(1, 10, 1, 0.0, 0), Job(2, 10, 1, 0.0, 1)])
    simulate(replace(TINY, workers=1, pool=1), stream=stream, policy=witness)

    assert witness.waiting == [["1"], ["0"], ["2"]]


def test_those_that_wait_at_the_end_count_by_their_wait() -> None:
    config = replace(TINY, workers=1, pool=1, steps=20)
    result = simulate(config, stream=jobs(*[(10, 30)] * 3))

    assert (result.waiting_at_end, result.max_pool_wait_steps, result.completed) == (2, 20, 0)
    assert result.tpot_mean_s is None


def test_idle_time_is_skipped_but_counts() -> None:
    stream = TimedStream([Job(0, 10, 1, 2.0), Job(1, 10, 1, 10.0)])
    result = simulate(TINY, stream=stream)

    busy_s = 2 * 1.1
    idle_s = 2.0 + (10.0 - 3.1)
    assert result.steps == 2
    assert result.ttft_mean_s == pytest.approx(1.1)
    assert result.throughput_tok_s == pytest.approx(2 / (busy_s + idle_s))
    assert result.energy_j == pytest.approx(busy_s * 500 + idle_s * 200)


def test_a_trace_that_ends_within_the_warm_up_is_refused() -> None:
    with pytest.raises(InputError, match="within the warm-up of 5"):
        simulate(replace(TINY, warmup=5), stream=jobs((10, 2)))


def test_decisions_are_timed_by_the_clock_that_is_given() -> None:
    ticks = iter(np.arange(0, 1000, 0.002).tolist())
    result = simulate(TINY, stream=jobs(*[(10, 1)] * 9), clock=lambda: next(ticks))

    assert result.decision_ms_p50 == pytest.approx(2)
    assert result.decision_ms_p99 == pytest.approx(2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("arrivals", ["full", "poisson:400"])
def test_the_same_seed_gives_the_same_result(policy: str, arrivals: str) -> None:
    config = replace(SMALL, policy=policy, arrivals=Arrivals.parse(arrivals, ARRIVALS), steps=120)

    assert simulate(config) == simulate(config)
    assert simulate(config).report() != simulate(replace(config, seed=1)).report()


def test_a_deadline_bounds_the_wait_of_requests_that_the_policy_avoids() -> None:
    config = replace(SMALL, lengths=LawLengths.parse("geometric:300,40"), steps=600)

    assert simulate(config).max_pool_wait_steps > 100
    short = replace(config, pool=8)
    assert simulate(short).max_pool_wait_steps > 60
    assert simulate(replace(short, deadline_steps=40)).max_pool_wait_steps <= 45
    # In order of arrival a request would wait for as many steps as requests enter in.
    entered = replace(config, policy="fcfs", pool=32)
    usual = 32 / (simulate(entered).completed / (config.steps - config.warmup))
    bounded = simulate(replace(config, pool=32, deadline_steps=5)).max_pool_wait_steps
    assert usual < bounded <= 2.2 * usual


def test_bfio_balances_better_than_fcfs() -> None:
    config = replace(SMALL, steps=600)

    bfio, fcfs = simulate(config), simulate(replace(config, policy="fcfs"))

    assert bfio.avg_imbalance_tokens < 0.5 * fcfs.avg_imbalance_tokens
    assert bfio.throughput_tok_s > fcfs.throughput_tok_s


@pytest.mark.parametrize("lookahead", ["none", "cap", "survival", "oracle", "miss:0.5"])
def test_the_policy_is_given_an_outlook_over_the_horizon(lookahead: str) -> None:
    witness = Witness("bfio")
    knowledge = Knowledge.parse(lookahead)
    config = replace(SMALL, knowledge=knowledge, horizon=5, discount=0.8, tie_weight=1e-3, steps=60)
    result = simulate(config, policy=witness)

    for views, outlook in zip(witness.views, witness.outlooks, strict=True):
        assert outlook is not None
        assert outlook.work.shape == (4, 6)
        assert (outlook.discount, outlook.tie_weight) == (0.8, 1e-3)
        assert outlook.work[:, 0].tolist() == [view.load_tokens for view in views]
    assert result.parameters["horizon"] == 5
    assert result.parameters["lookahead"] == lookahead


def test_parameters_that_are_left_out_follow_the_signal_s_skill() -> None:
    config = replace(SMALL, knowledge=Knowledge.parse("oracle"))
    used = simulate(config).parameters
    assert used["skill"] == 1
    # The mean output of 40 tokens is learned; until some have ended, a longer one is assumed.
    rule = choose(4, 8, 40.0, size_tokens=200.0, skill=1.0)
    assert used["horizon"] == pytest.approx(rule.horizon, rel=0.1)
    assert rule.horizon > 0

    blind = simulate(SMALL).parameters
    assert (blind["horizon"], blind["skill"]) == (0, None)
    assert simulate(replace(SMALL, policy="fcfs")).parameters["horizon"] is None


def test_the_cost_of_prompts_is_learned_from_the_steps() -> None:
    witness = Witness("bfio")
    truth = WorkProfile(prefill_beta=200.0, prefill_chunk=64)
    report = simulate(replace(SMALL, profile=truth, steps=600), policy=witness).parameters
    assert report["known_profile"] == "learned"
    first, *_, last = [outlook.profile for outlook in witness.outlooks if outlook]
    assert first.prefill_beta == 0
    assert last.prefill_beta == pytest.approx(200, rel=0.05)
    assert last.prefill_chunk == 64


@pytest.mark.parametrize("knowledge", ["none", "survival", "oracle"])
def test_without_prompts_what_is_learned_changes_no_decision(knowledge: str) -> None:
    config = replace(SMALL, knowledge=Knowledge.parse(knowledge), steps=600)
    learned = simulate(config).report()
    plain = simulate(replace(config, known_profile=WorkProfile())).report()
    assert (learned.pop("parameters"), plain.pop("parameters")) != (None, None)
    assert learned == plain


def test_what_the_policy_takes_requests_to_cost_can_differ_from_the_truth() -> None:
    witness = Witness("bfio")
    truth = WorkProfile(prefill_beta=2.0, prefill_chunk=64)
    config = replace(SMALL, profile=truth, known_profile=WorkProfile(), steps=60)
    ignorant = simulate(config, policy=witness)

    assert {outlook.profile.prefill_beta for outlook in witness.outlooks if outlook} == {0}
    assert ignorant.parameters["profile"] != ignorant.parameters["known_profile"]

    witness = Witness("bfio")
    simulate(replace(config, known_profile=truth), policy=witness)
    assert {outlook.profile.prefill_beta for outlook in witness.outlooks if outlook} == {2}
