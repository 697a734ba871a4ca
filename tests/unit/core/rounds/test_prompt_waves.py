"""Prompts that make all workers wait enter together."""

import random

import pytest

from router.core.rounds.prompt_waves import PromptWaves, delay_s
from router.core.step_time import StepTime
from router.core.types import Assignment, Request, WorkerView

COST = StepTime(5e-3, 1e-7, 0.0, 1e-4)


def view(name: str, load: int = 0, pending: int = 0) -> WorkerView:
    return WorkerView(name, load, 1, 1, pending_prompt_tokens=pending)


def delay(*views: WorkerView, hits: int = 0, **prompts: int) -> float:
    """Seconds per t_p."""
    by_id = {to: Request(to, "default", tokens) for to, tokens in prompts.items()}
    given = [Assignment(to, to) for to in prompts]
    known = (lambda _: [hits] * len(views)) if hits else None
    cost = StepTime(5e-3, 0.0, 0.0, 1e-4)
    return delay_s(given, by_id, views, cost, known) / cost.per_prompt_token_s


def test_a_lone_prompt_makes_the_others_wait() -> None:
    assert delay(view("a"), view("b"), a=600) == pytest.approx(300)
    assert delay(view("a"), view("b"), view("c"), view("d"), a=600) == pytest.approx(450)


def test_prompts_alike_on_all_workers_delay_nobody() -> None:
    assert delay(view("a"), view("b"), a=600, b=600) == pytest.approx(0)


def test_what_others_compute_anyhow_is_time_to_be_filled() -> None:
    assert delay(view("a"), view("b", pending=900), a=600) == pytest.approx(-300)


def test_what_is_cached_is_not_computed() -> None:
    assert delay(view("a"), view("b"), hits=500, a=600) == pytest.approx(50)


def test_kv_tokens_count_by_their_cost() -> None:
    views = view("a"), view("b", load=200_000)
    given = delay_s([Assignment("r", "a")], {"r": Request("r", "default", 100)}, views, COST)
    assert given == pytest.approx(-0.5 * 100 * (1e-4 + 1e-7)), "it still is below the other"


def test_requests_count_by_their_cost() -> None:
    views, by_id = (view("a"), WorkerView("b", 0, 9, 1)), {"r": Request("r", "default", 30)}
    given = delay_s([Assignment("r", "a")], by_id, views, StepTime(1.0, 0.0, 10.0, 1.0))
    assert given == pytest.approx(-0.5 * (10 + 30))


def test_several_answers_cost_as_much_as_several_requests() -> None:
    by_id = {"r": Request("r", "default", 100, slots=3)}
    views = view("a"), view("b")
    given = delay_s([Assignment("r", "a")], by_id, views, StepTime(1.0, 0.5, 10.0, 1.0))
    assert given == pytest.approx(3 * (50 + 10 + 100) / 2)


@pytest.mark.parametrize("names", ["a", "abc", "abcdefg"])
def test_workers_alike_delay_nobody(names: str) -> None:
    """Nor does rounding: the sums of such numbers differ in their last bits."""
    cost = StepTime(5e-3, 1e-7, 4e-5, 5e-5)
    draw = random.Random(1)
    for _ in range(300):
        by_id = {"r": Request("r", "default", draw.randint(1, 9999))}
        load = draw.randint(1, 10**6)
        views = [WorkerView(name, load, 3, 1) for name in names]
        assert delay_s([Assignment("r", name) for name in names], by_id, views, cost) == 0


def test_a_wave_enters_once_empty_slots_have_cost_half_of_its_delay() -> None:
    waves = PromptWaves()
    assert waves.wait(0.010, 0.1, 0.0)
    assert waves.wait(0.010, 0.1, 0.040)
    assert not waves.wait(0.010, 0.1, 0.050)
    assert waves.wait(0.010, 0.1, 0.060), "the next wave pays for itself"


def test_slots_cost_what_they_are_empty_for_a_wave() -> None:
    waves = PromptWaves()
    assert waves.wait(0.010, 0.1, 10.0), "nothing was empty before"
    assert waves.wait(0.010, 0.4, 10.040), "four times as many are empty from now on"
    waves.pass_by(10.041)
    waves.pass_by(20.0)
    assert waves.wait(0.010, 0.1, 30.0)
    assert not waves.wait(0.010, 0.1, 30.006)


def test_a_wave_that_delays_nobody_enters_at_once() -> None:
    waves = PromptWaves()
    assert not waves.wait(0.0, 0.1, 5.0)
    assert not waves.wait(-1.0, 0.1, 5.0)
