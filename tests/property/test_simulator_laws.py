"""What holds for every simulation: nobody is lost, served twice, or served beyond the slots."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines
from loadgen.simulator.decode.decode_results import DecodeResult
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.oracle import OracleSignal
from loadgen.simulator.decode.request_streams import Job, TimedStream
from router.core.forecast.forecast import NO_CAP, WorkProfile, forecast
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.step_time import StepTime
from router.core.types import Assignment, Dispatch, Request, WorkerView
from tests.support.paper import PAPER

PROFILES = st.sampled_from(
    [
        WorkProfile(),
        WorkProfile(growth=0.0),
        WorkProfile(growth=3.0, request_tokens=20.0),
        WorkProfile(prefill_beta=0.5, prefill_chunk=7),
        WorkProfile(growth=2.0, window=30, window_share=0.5, prefill_beta=2.0, prefill_chunk=16),
    ]
)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 12), st.floats(0, 30), st.integers(0, 2)),
    min_size=1,
    max_size=40,
)
SIZES = {"workers": st.integers(1, 4), "slots": st.integers(1, 3)}
MEANS = {
    "dispatch_delay": st.integers(0, 3),
    "overcommit": st.integers(0, 2),
    "deadline_steps": st.sampled_from([0, 5]),
    "pool": st.sampled_from([1, 3, 100]),
}


def stream_of(rows: list[tuple[int, int, float, int]]) -> TimedStream:
    rows = sorted(rows, key=lambda row: row[2])
    return TimedStream(Job(number, *row) for number, row in enumerate(rows))


def config_of(policy: str, **changes: object) -> DecodeConfig:
    base = DecodeConfig(
        policy=policy,
        lengths=LawLengths.parse("constant:1,1"),
        steps=10_000,
        warmup=0,
        step_time=StepTime(0.1, 1e-3),
        **PAPER,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Witness(Policy):
    """Does as a policy does, and keeps who was assigned when."""

    def __init__(self, name: str) -> None:
        self._policy = POLICIES[name].make(PolicySettings())
        self.asked: list[list[Request]] = []
        self.assigned: list[Assignment] = []

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        assignments = self._policy.assign(waiting, workers, known)
        self.asked.append(list(waiting))
        self.assigned += assignments
        return assignments


@pytest.mark.parametrize("policy", ["fcfs", "bfio", "least_tokens"])
@given(REQUESTS, PROFILES, st.fixed_dictionaries(SIZES), st.fixed_dictionaries(MEANS))
@settings(max_examples=25, deadline=None)  # the first one compiles
def test_everybody_is_served_once(
    policy: str,
    rows: list[tuple[int, int, float, int]],
    profile: WorkProfile,
    sizes: dict[str, int],
    means: dict[str, int],
) -> None:
    result = check_served_once(config_of(policy, profile=profile, **sizes, **means), rows)

    assert result.mean_admitted_prompt_tokens == pytest.approx(np.mean([row[0] for row in rows]))


def check_served_once(
    config: DecodeConfig, rows: list[tuple[int, int, float, int]]
) -> DecodeResult:
    """Every request is assigned, runs and ends once, and never more at a time than there are slots.

    Returns:
        What was found.
    """
    witness = Witness(config.policy)
    result = simulate(config, stream=stream_of(rows), policy=witness, keep_records=True)

    served = Counter(assignment.request_id for assignment in witness.assigned)
    assert served == Counter(str(number) for number in range(len(rows)))
    assert (result.completed, result.waiting_at_end) == (len(rows), 0)
    assert result.records is not None
    assert result.records.tokens.sum() == sum(row[1] for row in rows)
    assert result.records.tokens.max() <= config.workers * config.slots
    return result


@given(REQUESTS, st.fixed_dictionaries(SIZES), st.sampled_from(["jsq", "least_tokens", "bfio"]))
@settings(max_examples=25)
def test_instant_dispatch_serves_everybody_in_order_of_arrival(
    rows: list[tuple[int, int, float, int]], sizes: dict[str, int], policy: str
) -> None:
    witness = Witness(policy)
    rows = [(*row[:3], 0) for row in rows]
    config = config_of(policy, dispatch=Dispatch.INSTANT, **sizes)
    result = simulate(config, stream=stream_of(rows), policy=witness)

    numbers = [int(assignment.request_id) for assignment in witness.assigned]
    assert numbers == list(range(len(rows)))
    assert (result.completed, result.max_pool_wait_steps) == (len(rows), 0)


@given(REQUESTS, st.fixed_dictionaries(SIZES), st.sampled_from(["fcfs", "bfio"]))
@settings(max_examples=25)
def test_a_better_priority_goes_first(
    rows: list[tuple[int, int, float, int]], sizes: dict[str, int], policy: str
) -> None:
    witness = Witness(policy)
    simulate(config_of(policy, pool=100, **sizes), stream=stream_of(rows), policy=witness)

    order = {assignment.request_id: at for at, assignment in enumerate(witness.assigned)}
    for tier in witness.asked:
        assert len({request.priority for request in tier}) == 1
    ranked = list(enumerate(sorted(rows, key=lambda row: row[2])))
    for (one, a), (other, b) in product(ranked, ranked):
        if a[3] < b[3] and a[2] <= b[2]:
            assert order[str(one)] < order[str(other)]


class Model:
    """Engines in the plainest way: a list of requests for each worker."""

    def __init__(self, workers: int, slots: int, profile: WorkProfile) -> None:
        self.profile = profile
        self.slots = slots
        self.queues: list[list[Job]] = [[] for _ in range(workers)]
        self.running: list[list[tuple[Job, list[int]]]] = [[] for _ in range(workers)]

    def begin(self) -> list[int]:
        started = []
        for queue, running in zip(self.queues, self.running, strict=True):
            while queue and len(running) < self.slots:
                job = queue.pop(0)
                left = job.prompt_tokens if self.profile.prefill_beta else 0
                running.append((job, [0, left]))
                started.append(job.number)
        return started

    def work(self) -> list[float]:
        return [sum(self._work(job, *state) for job, state in one) for one in self.running]

    def finish(self) -> list[int]:
        ended = []
        for running in self.running:
            for job, state in running:
                state[1] = max(0, state[1] - self.profile.prefill_chunk)
                state[0] += state[1] == 0
                if state[0] == job.output_tokens:
                    ended.append(job.number)
            running[:] = [(job, state) for job, state in running if state[0] < job.output_tokens]
        return ended

    def _work(self, job: Job, generated: int, left: int) -> float:
        profile = self.profile
        held = job.prompt_tokens + profile.growth * generated
        if profile.window is not None:
            share = profile.window_share
            held = (1 - share) * held + share * min(held, profile.window)
        return (
            held + profile.request_tokens + profile.prefill_beta * min(left, profile.prefill_chunk)
        )


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 9)), max_size=40),
    PROFILES,
    st.integers(1, 3),
    st.lists(st.integers(0, 3), min_size=40, max_size=40),
)
@settings(max_examples=60)
def test_engines_do_as_the_plainest_model(
    rows: list[tuple[int, int, int]], profile: WorkProfile, slots: int, counts: list[int]
) -> None:
    engines, model = Engines(3, slots, profile), Model(3, slots, profile)
    pending = [(row[0], Job(number, row[1], row[2], 0.0)) for number, row in enumerate(rows)]
    for step, count in enumerate(counts):
        for worker, job in pending[:count]:
            engines.send(job, worker, step)
            model.queues[worker].append(job)
        del pending[:count]
        starts = engines.begin(step, float(step))
        assert sorted(start.job.number for start in starts) == sorted(model.begin())
        assert engines.running.tolist() == [len(one) for one in model.running]
        assert engines.waiting == [len(queue) for queue in model.queues]
        assert engines.work(step).tolist() == pytest.approx(model.work())
        ended = engines.finish(step)
        assert sorted(residence.job.number for residence in ended) == sorted(model.finish())


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 9)), max_size=20),
    PROFILES,
    st.integers(0, 8),
)
@settings(max_examples=60)
def test_an_oracle_s_forecast_is_what_happens(
    rows: list[tuple[int, int, int]], profile: WorkProfile, begun: int
) -> None:
    engines = Engines(3, 20, profile)
    for number, (worker, prompt, output) in enumerate(rows):
        engines.send(Job(number, prompt, output, 0.0), worker, 0)
    engines.begin(0, 0.0)
    for step in range(begun):
        engines.finish(step)
    running = engines.foreseen(begun, NO_CAP)
    predicted = forecast(running, OracleSignal().predict(running, 10), profile, 3, 10)

    for step in range(begun, begun + 11):
        assert engines.work(step).tolist() == pytest.approx(predicted[:, step - begun].tolist())
        engines.finish(step)
