from dataclasses import replace

import pytest

from engine_patches.admission import make_admission, read_admission
from loadgen.engine.engine import Engine
from loadgen.engine.queues import PolicyOrder
from loadgen.engine.request import EngineRequest
from loadgen.engine.stepping import StepGroup, WorkerModel
from loadgen.model.power_model import PowerModel
from router.core.step_time import PAPER_STEP_TIME, StepTime
from tests.support.core import part

TIME = StepTime(base_s=0.005, per_token_s=1e-6, per_request_s=1e-4)
POWER = PowerModel()


def worker(
    rank: int, prompts: list[int], speed: float = 1.0, output_tokens: int = 3
) -> WorkerModel:
    engine = Engine(slots=8, kv_tokens=100_000)
    for number, prompt_tokens in enumerate(prompts):
        engine.add(EngineRequest(f"{rank}.{number}", prompt_tokens, output_tokens))
    return WorkerModel(rank, engine, speed)


def test_the_paper_s_step_time() -> None:
    group = StepGroup([worker(0, [1000, 500]), worker(1, [200])], PAPER_STEP_TIME, POWER)
    step = group.begin()
    assert step.seconds == pytest.approx(4.95e-3 + 9.5e-8 * 1500)
    group.finish(step)
    assert group.begin().seconds == pytest.approx(4.95e-3 + 9.5e-8 * 1502)


def test_a_cost_per_request_can_decide() -> None:
    group = StepGroup([worker(0, [300]), worker(1, [50, 50, 50, 50])], TIME, POWER)
    assert group.begin().seconds == pytest.approx(0.005 + 2e-4 + 4e-4)


def test_prompts_cost_what_a_step_computes_of_them() -> None:
    engine = Engine(slots=8, kv_tokens=100_000, chunk=600)
    engine.add(EngineRequest("a", 1000, 2))
    group = StepGroup(
        [WorkerModel(0, engine), worker(1, [10])], replace(TIME, per_prompt_token_s=1e-5), POWER
    )
    lengths = []
    while group.unfinished:
        step = group.begin()
        lengths.append(step.seconds)
        group.finish(step)
    # Attention reads what is computed by the step's end: 600, 1,000 and 1,001 tokens.
    base = 0.005 + 1e-4
    assert lengths == pytest.approx([base + 6e-4 + 6e-3, base + 1e-3 + 4e-3, base + 1.001e-3])


def test_the_slowest_worker_decides_even_without_work() -> None:
    group = StepGroup([worker(0, [1000]), worker(1, [], speed=0.5)], TIME, POWER)
    assert group.begin().seconds == pytest.approx(0.01)
    group.workers[1].speed = 1.0
    assert group.begin().seconds == pytest.approx(0.005 + 1e-3 + 1e-4)


def test_power_follows_the_fullest_worker_and_energy_adds_up() -> None:
    group = StepGroup([worker(0, [1000]), worker(1, [250]), worker(2, [])], TIME, POWER)
    step = group.begin()
    expected_w = [400.0, 100 + 300 * 0.25**0.7, 100.0]
    assert [part.power_w for part in step.parts] == pytest.approx(expected_w)
    group.finish(step)
    energies_j = [w.energy_j for w in group.workers]
    assert energies_j == pytest.approx([p * step.seconds for p in expected_w])
    group.rest(2.0)
    assert [w.energy_j for w in group.workers] == pytest.approx([e + 200 for e in energies_j])
    assert {w.power_w for w in group.workers} == {100.0}


def test_steps_count_alike_and_go_on_until_all_is_done() -> None:
    group = StepGroup([worker(0, [10], output_tokens=2), worker(1, [10, 10])], TIME, POWER)
    ended = []
    while group.unfinished:
        step = group.begin()
        ended += [(step.number, r.id) for part in group.finish(step) for r in part]
    assert ended == [(2, "0.0"), (3, "1.0"), (3, "1.1")]
    assert group.steps == 3


def test_a_dead_worker_takes_no_part() -> None:
    group = StepGroup([worker(0, [10]), worker(1, [90_000])], TIME, POWER)
    group.workers[1].live = False
    step = group.begin()
    assert [part.worker.rank for part in step.parts] == [0]
    assert step.seconds == pytest.approx(0.005 + 1e-5 + 1e-4)
    group.rest(1.0)
    assert group.workers[1].energy_j == 0
    group.workers[0].live = False
    assert not group.unfinished
    assert group.begin().seconds == 0.0


def test_the_token_of_a_step_goes_to_the_engine_that_took_it() -> None:
    group = StepGroup([worker(0, [10], output_tokens=1)], TIME, POWER)
    step = group.begin()
    old = group.workers[0].engine
    group.workers[0].engine = Engine(8, 1000)
    assert [[r.id for r in part] for part in group.finish(step)] == [["0.0"]]
    assert not old.unfinished


def test_no_step_is_taken_while_all_wait_before_a_closed_gate() -> None:
    """Of two that are wanted one is there; or the other worker is at work."""
    settings = read_admission({"policy": "wait", "thresholds": [2], "hold_s": 0.5})
    gated = WorkerModel(0, Engine(8, 1000, queue=PolicyOrder(make_admission(settings))))
    gated.engine.add(EngineRequest("a", 10, 2, arrived_s=3.0))

    assert StepGroup([gated, worker(1, [])], TIME, POWER).begin(3.25).wake_s == 3.5
    assert StepGroup([gated, worker(1, [10])], TIME, POWER).begin(3.25).wake_s is None
    assert StepGroup([gated, worker(1, [])], TIME, POWER).begin(3.5).wake_s is None
    assert gated.engine.running


def test_a_step_is_taken_while_some_who_run_pause() -> None:
    """Whoever follows them learns that they still run; as printed they pause half a minute."""
    settings = read_admission({"policy": "wait", "thresholds": [2], "strict": True})
    with pytest.warns(UserWarning, match="strict"):
        queue = PolicyOrder(make_admission(settings))
    group = StepGroup([WorkerModel(0, Engine(8, 1000, queue=queue))], TIME, POWER)
    for id_ in "ab":
        group.workers[0].engine.add(EngineRequest(id_, 10, 2))
    group.finish(group.begin())
    step = group.begin(1.0)

    assert step.parts[0].schedule.empty
    assert step.wake_s is None


def test_of_what_waits_in_an_engine_those_of_routers_are_told_apart() -> None:
    engine = Engine(slots=1, kv_tokens=1000)
    for id_ in (part(1), part(2), "theirs"):
        engine.add(EngineRequest(id_, 10, 5))
    assert engine.waiting_routed == 2
    engine.schedule()
    assert (engine.waiting, engine.waiting_routed) == (2, 1)
