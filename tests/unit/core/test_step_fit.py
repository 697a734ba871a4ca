"""The cost of a step, learned from steps whose cost is known."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import NamedTuple

import numpy as np
import pytest

from router.core.step_fit import (
    LEAST_STEPS,
    MEMORY_STEPS,
    NUMBERS,
    FittedStepTime,
    StepFit,
    graph_size,
)
from router.core.step_time import StepTime

COST = StepTime(5e-3, 9.5e-8, 40e-6, 5e-5)


class Made(NamedTuple):
    """What the ranks have in a step."""

    loads: list[int]
    running: list[int]
    prompts: list[int]
    contexts: list[float]


def made(
    steps: int, seed: int, *, ranks: int = 8, tokens: int | None = None, chunk: int = 512
) -> Iterator[Made]:
    """Ranks whose load sweeps from 30 to 110 % and back; prompts come in chunks.

    ``tokens``: of every request; None: they differ.
    """
    rng = np.random.default_rng(seed)
    shape = steps, ranks
    sweep = 0.7 - 0.4 * np.cos(np.arange(steps) / 300)
    running = np.rint(64 * sweep[:, None] * rng.uniform(0.8, 1.2, shape)).astype(int)
    mean = np.full(shape, tokens) if tokens else rng.uniform(800, 2400, shape)
    begun = rng.integers(1, 4000, shape) * (rng.random(shape) < 0.01)
    backlog, computed = np.zeros(ranks, int), np.zeros(shape, int)
    for step, new in enumerate(begun if chunk else ()):
        backlog += new
        computed[step] = np.minimum(backlog, chunk)
        backlog -= computed[step]
    columns = (running * mean).astype(int), running, computed, computed * rng.uniform(0, 4e3, shape)
    for row in zip(*(column.tolist() for column in columns), strict=True):
        yield Made(*row)


def work(cost: StepTime, step: Made) -> list[float]:
    return list(map(cost.work_s, step.loads, step.running, step.prompts))


def learn(fit: StepFit, step: Made, seconds: float) -> None:
    likely = None
    if fit.fitted is not None:
        guess = work(fit.fitted, step)
        likely = guess.index(max(guess))
    fit.observe(*step, seconds, likely=likely)


def learned(
    steps: int, seed: int, cost: StepTime = COST, *, noise: float = 0.0, **kinds: int
) -> FittedStepTime:
    rng, fit = np.random.default_rng(seed + 1000), StepFit()
    for step in made(steps, seed, **kinds):
        learn(fit, step, (cost.base_s + max(work(cost, step))) * (1 + noise * rng.normal()))
    found = fit.finish()
    assert found is not None
    return found


def off(found: FittedStepTime, cost: StepTime) -> list[float]:
    """How far each number is off, as a share of it."""
    numbers = zip(NUMBERS, astuple(cost), strict=True)
    return [abs(getattr(found, name) / true - 1) for name, true in numbers]


def inside(found: FittedStepTime, cost: StepTime) -> list[bool]:
    numbers = zip(found.intervals, astuple(cost), strict=True)
    return [low <= true <= high for (low, high), true in numbers]


@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
def test_exact_steps_show_their_exact_cost(ranks: int) -> None:
    found = learned(512, 0, ranks=ranks)
    assert max(off(found, COST)) < 1e-6
    assert found.known == NUMBERS
    assert found.explained == pytest.approx(1)
    assert found.extras == {}


def test_requests_may_cost_so_much_that_they_decide_which_rank_is_the_slowest() -> None:
    cost = replace(COST, per_token_s=1e-8, per_request_s=4e-4)
    assert max(off(learned(2 * LEAST_STEPS, 0, cost), cost)) < 1e-6


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_intervals_hold_the_truth_as_often_as_they_say(noise: float) -> None:
    found = [learned(2000, seed, noise=noise) for seed in range(30)]
    held = np.array([inside(each, COST) for each in found])
    near = np.array([off(each, COST) for each in found]) < 0.05
    assert (held.mean(axis=0) >= 0.9).all(), held.mean(axis=0)
    assert (held | near).all(axis=1).mean() >= 0.9
    missed = np.array([astuple(each)[:4] for each in found]) - astuple(COST)
    halves = np.array([each.intervals for each in found]) @ (-0.5, 0.5)
    widths = halves.mean(axis=0) / np.sqrt((missed**2).mean(axis=0))
    assert (widths < 2.5).all(), "standard deviations; 1.96 would be exact"


def test_it_says_how_well_it_predicts_steps_that_it_has_not_learned() -> None:
    found = learned(2000, 0, noise=0.1)
    assert found.decode_error == pytest.approx(0.0675, rel=0.2), "the median of |N(0, 0.1)|"
    assert found.prompt_error == pytest.approx(0.0675, rel=0.2)
    assert 0.9 < found.explained < 1
    without = learned(2000, 0, noise=0.1, chunk=0)
    assert without.prompt_error is None
    assert learned(LEAST_STEPS, 0).decode_error is None, "none predicted yet"


def test_a_cost_of_nothing_is_known_to_be_nothing() -> None:
    for cost in (replace(COST, per_request_s=0.0), replace(COST, per_token_s=0.0)):
        for seed in range(6):
            found = learned(1024, seed, cost, noise=0.03)
            assert found.known == NUMBERS
            assert min(low for low, _ in found.intervals) >= 0
            assert found.seconds(100_000, 60, 512) == pytest.approx(
                cost.seconds(100_000, 60, 512), rel=0.02
            )


def test_what_never_varies_or_never_comes_is_not_known() -> None:
    found = learned(1024, 0, noise=0.03, chunk=0)
    assert found.known == NUMBERS[:3]
    assert found.per_prompt_token_s == 0
    fit = StepFit()
    for step in made(1024, 0):
        learn(fit, step._replace(running=[9] * 8), COST.seconds(max(step.loads), 9))
    assert fit.fitted is not None
    assert fit.fitted.per_token_s == pytest.approx(COST.per_token_s, rel=1e-6)
    assert "per_request_s" not in fit.fitted.known
    assert "base_s" not in fit.fitted.known, "9 requests may be any part of it"


def test_what_a_rare_and_long_step_tells_within_a_few_percent_is_known() -> None:
    """A prompt's step is many others long: as a share of those, its interval is wide."""
    found = learned(700, 0, noise=0.15, chunk=4000)
    low, high = found.intervals[3]
    assert 0.02 < (high - low) / 2 / COST.per_prompt_token_s < 0.1
    assert inside(found, COST)[3]
    assert "per_prompt_token_s" in found.known


def test_a_single_step_with_prompts_does_not_tell_their_cost() -> None:
    held = 0
    for seed in range(20):
        rng, fit = np.random.default_rng(seed), StepFit()
        for number, step in enumerate(made(600, seed, chunk=0)):
            prompted = step._replace(prompts=[100 * (number == 300)] * 8)
            seconds = COST.base_s + max(work(COST, prompted))
            fit.observe(*prompted, seconds * (1 + 0.1 * rng.normal()))
        found = fit.finish()
        assert found is not None
        assert "per_prompt_token_s" not in found.known
        held += inside(found, COST)[3]
    assert held >= 18


CONVEX: dict[str, Callable[[float, float, float], float]] = {
    "tokens": lambda load, running, prompt: 1e-12 * load**2,
    "requests": lambda load, running, prompt: 2e-5 * prompt + 1e-4 * running**2 / 40,
    "prompts": lambda load, running, prompt: 2e-4 + 1e-8 * load + 1e-5 * prompt**2 / 256,
    "below the line": lambda load, running, prompt: 1e-7 * load - 2e-3,
}


@pytest.mark.parametrize("law", CONVEX)
@pytest.mark.parametrize("ranks", [1, 4])
def test_where_the_line_would_begin_below_zero_steps_are_still_predicted(
    law: str, ranks: int
) -> None:
    """C is 0 then, and the other costs are those that fit best beside it."""
    rng, fit = np.random.default_rng(0), StepFit()
    steps = []
    for _ in range(1500):
        loads, running = rng.integers(50_000, 100_000, ranks), rng.integers(20, 60, ranks)
        prompts = np.where(rng.random(ranks) < 0.3, rng.integers(1, 512, ranks), 0)
        each = [CONVEX[law](*row) for row in zip(loads, running, prompts, strict=True)]
        seconds = max(each) * (1 + 0.01 * rng.normal())
        step = Made(loads.tolist(), running.tolist(), prompts.tolist(), [0.0] * ranks)
        steps.append((step, seconds))
        learn(fit, step, seconds)
    found = fit.finish()
    assert found is not None
    predicted = np.array([found.base_s + max(work(found, step)) for step, _ in steps])
    true = np.array([seconds for _, seconds in steps])
    assert predicted.sum() == pytest.approx(true.sum(), rel=0.1)
    assert np.median(np.abs(predicted / true - 1)) < 0.2


def test_requests_and_tokens_that_come_together_share_their_cost() -> None:
    found = learned(2000, 0, noise=0.03, tokens=1000)
    assert found.known == ("base_s", "per_prompt_token_s")
    assert min(found.per_token_s, found.per_request_s) > 0
    assert all(inside(found, COST))
    true, told = COST.seconds(60_000, 60), found.seconds(60_000, 60)
    assert told == pytest.approx(true, rel=0.02), "what there is, is predicted all the same"


def test_hiccups_are_left_out() -> None:
    rng, fit = np.random.default_rng(3), StepFit()
    for step in made(2000, 3):
        seconds = (COST.base_s + max(work(COST, step))) * (1 + 0.03 * rng.normal())
        learn(fit, step, seconds + (rng.random() < 0.02))
    assert fit.fitted is not None
    assert all(inside(fit.fitted, COST))
    assert max(off(fit.fitted, COST)) < 0.1
    assert fit.fitted.explained > 0.95


def test_prompts_that_come_later_are_learned() -> None:
    fit = StepFit()
    for chunk, steps in ((0, MEMORY_STEPS), (512, 600)):
        for step in made(steps, 0, chunk=chunk):
            learn(fit, step, COST.base_s + max(work(COST, step)))
    assert fit.fitted is not None
    assert max(off(fit.fitted, COST)) < 0.02


def test_the_cost_of_prompts_is_kept_while_none_come() -> None:
    """Long answers leave no slot for thousands of steps; then prompts come again."""
    rng, fit = np.random.default_rng(0), StepFit()
    for chunk, steps in ((512, 1000), (0, 2 * MEMORY_STEPS)):
        for step in made(steps, 0, chunk=chunk):
            learn(fit, step, (COST.base_s + max(work(COST, step))) * (1 + 0.03 * rng.normal()))
    assert fit.fitted is not None
    assert all(inside(fit.fitted, COST))
    assert fit.fitted.known == NUMBERS


@pytest.mark.parametrize("wrong_s", [1e-200, 1e-9, 2e-6])
def test_a_step_of_no_time_does_not_end_the_fit(wrong_s: float) -> None:
    """Where no rank had anything, and no step has a fixed cost."""
    rng, fit = np.random.default_rng(0), StepFit()
    for number in range(600):
        load = 0 if number == 10 else int(rng.integers(1000, 100_000))
        step = Made([load, load // 2], [9 * (load > 0)] * 2, [0, 0], [0.0, 0.0])
        seconds = 1e-7 * load * (1 + 0.02 * rng.normal())
        learn(fit, step, seconds if load else wrong_s)
    assert fit.fitted is not None
    assert fit.fitted.explained > 0.9


def test_steps_that_are_short_beside_those_with_prompts_are_no_change() -> None:
    """A full batch of prompts takes twenty times as long as decoding."""
    fit, decodes = StepFit(), 0
    for number in range(4000):
        # From a fit on, so that the next one learns from decode-only steps.
        decodes += bool(decodes) or (number > 2500 and fit.finish() is not None)
        prompts = 0 if decodes else 2000 - 10 * (number % 7)
        step = Made([1000 + number % 500] * 2, [3, 3], [prompts, 0], [0.0, 0.0])
        learn(fit, step, COST.base_s + max(work(COST, step)))
        if decodes == 600:
            break
    assert fit.fitted is not None
    assert fit.fitted.per_prompt_token_s == pytest.approx(COST.per_prompt_token_s, rel=1e-3)
    assert fit.fitted.decode_error is not None
    assert fit.fitted.decode_error < 1e-3


def test_an_engine_that_changes_is_learned_anew() -> None:
    rng, fit = np.random.default_rng(0), StepFit()
    later = StepTime(9e-3, 3e-7, 1e-5, 1e-4)
    for cost, steps in ((COST, MEMORY_STEPS), (later, MEMORY_STEPS // 3)):
        for step in made(steps, 0):
            learn(fit, step, (cost.base_s + max(work(cost, step))) * (1 + 0.02 * rng.normal()))
    assert fit.fitted is not None
    assert fit.fitted.seconds(60_000, 60, 512) == pytest.approx(
        later.seconds(60_000, 60, 512), rel=0.05
    )


def test_old_steps_are_forgotten() -> None:
    fit, later = StepFit(), replace(COST, base_s=1.02 * COST.base_s)
    for cost in (COST, later):
        for step in made(MEMORY_STEPS + 256, 0):
            learn(fit, step, cost.base_s + max(work(cost, step)))
    assert fit.fitted is not None
    assert max(off(fit.fitted, later)) < 1e-5, "a change too small to be noticed passes too"


@pytest.mark.parametrize("times", ["noise", "alike", "falling", "few", "none"])
def test_nothing_is_told_where_nothing_shows(times: str) -> None:
    rng, fit = np.random.default_rng(1), StepFit()
    for number in range({"few": LEAST_STEPS - 1, "none": 0}.get(times, 512)):
        load = 10_000 if times == "alike" else 10_000 + 50 * (number % 100)
        step_s = {"noise": 5e-3 + rng.normal(0, 1e-3), "falling": 1 / load}.get(times, 1e-7 * load)
        fit.observe([load], [10], [0], [0.0], step_s)
    fit.observe([10_000], [10], [0], [0.0], 0.0)
    assert fit.finish() is None


@pytest.mark.parametrize("worth", [50, 500, 2000])
def test_the_slowest_rank_may_have_the_most_of_nothing(worth: int) -> None:
    """Nearly all ranks compute a full batch: of these the fullest is the slowest."""
    cost = replace(COST, per_request_s=0.0, per_prompt_token_s=worth * COST.per_token_s)
    rng, fit = np.random.default_rng(worth), StepFit()
    loads = rng.uniform(100_000, 900_000, 8)
    for _ in range(300):
        loads = np.clip(loads + rng.normal(0, 20_000, 8), 100_000, 900_000)
        running = np.rint(loads / 14_000).astype(int)
        prompts = np.where(rng.random(8) < 0.8, 2048 - running, 0)
        columns = loads.astype(int).tolist(), running.tolist(), prompts.tolist()
        step = Made(*columns, (500.0 * prompts).tolist())
        learn(fit, step, cost.base_s + max(work(cost, step)))
    assert fit.fitted is not None
    assert fit.fitted.per_prompt_token_s == pytest.approx(cost.per_prompt_token_s, rel=0.05)


@pytest.mark.parametrize(
    ("full", "noise", "short"), [(2 * LEAST_STEPS, 0.0, 0.0), (4000, 0.005, 0.01)]
)
def test_the_first_steps_with_fewer_prompt_tokens_are_no_hiccups(
    full: int, noise: float, short: float
) -> None:
    """Prompts filled every step before: what they cost might have been a part of C.

    ``short``: share of the steps that are shorter than what they cost, for no reason.
    """
    rng, fit = np.random.default_rng(3), StepFit()
    for number in range(full + 512):
        loads = rng.integers(10_000, 40_000, 4).tolist()
        fewer = number >= full and number % 25 == 0
        most = int(rng.integers(50, 600)) if fewer else 700
        prompts = [int(most * share) for share in (1, *rng.integers(0, 2, 3))]
        step = Made(loads, [8] * 4, prompts, [0.0] * 4)
        seconds = (COST.base_s + max(work(COST, step))) * (1 + noise * rng.normal())
        learn(fit, step, seconds * (0.6 if rng.random() < short else 1.0))
    assert fit.fitted is not None
    assert fit.fitted.per_prompt_token_s == pytest.approx(COST.per_prompt_token_s, rel=0.05)


@pytest.mark.parametrize("told", [True, False])
def test_the_slowest_rank_need_not_be_the_fullest(told: bool) -> None:
    """Ranks of different speed: only their waits tell which one was the slowest."""
    rng, fit, slow = np.random.default_rng(0), StepFit(), np.array([1.0, 2.0, 1.0, 1.0])
    for step in made(1024, 0, ranks=4):
        each = slow * work(COST, step)
        slowest = int(each.argmax())
        seconds = (COST.base_s + float(each.max())) * (1 + 0.01 * rng.normal())
        fit.observe(*step, seconds, slowest=slowest if told else None)
    assert fit.fitted is not None
    twice = 2 * COST.per_prompt_token_s
    near = abs(fit.fitted.per_token_s / (2 * COST.per_token_s) - 1) < 0.1
    assert near is told
    assert twice > fit.fitted.per_prompt_token_s > COST.per_prompt_token_s


@pytest.mark.parametrize(
    ("extra", "cost"),
    [
        ("prompt_context", 1e-8),
        pytest.param("prompt_context", 5e-10, id="a twelfth of the error"),
        ("with_prompts", 8e-3),
        ("graph_batch", 2e-4),
    ],
)
def test_a_further_term_is_kept_where_it_predicts_better(extra: str, cost: float) -> None:
    rng, fit = np.random.default_rng(0), StepFit()
    for step in made(2000, 0):
        ranks = work(COST, step)
        slowest = ranks.index(max(ranks))
        much = {
            "prompt_context": step.contexts[slowest],
            "with_prompts": max(step.prompts) > 0,
            "graph_batch": graph_size(max(step.running)),
        }[extra]
        seconds = COST.base_s + max(ranks) + cost * much
        learn(fit, step, seconds * (1 + 0.01 * rng.normal()))
    assert fit.fitted is not None
    assert fit.fitted.extras[extra] == pytest.approx(cost, rel=0.15)
    assert fit.fitted.decode_error == pytest.approx(0.00675, rel=0.4)
    assert fit.fitted.prompt_error == pytest.approx(0.00675, rel=0.4)
    any_s, token_s = fit.fitted.prompts_s(300.0)
    rest_s = fit.fitted.rest_s(90_000, 40, 64)
    paid = {"prompt_context": 512 * 300.0, "with_prompts": 1, "graph_batch": 0}[extra] * cost
    padded = 64 * cost if extra == "graph_batch" else 0.0
    assert rest_s == pytest.approx(COST.seconds(90_000, 40) + padded, rel=0.02)
    assert any_s + 512 * token_s == pytest.approx(512 * COST.per_prompt_token_s + paid, rel=0.05)


def test_no_further_term_is_kept_where_there_is_none() -> None:
    found = [learned(2000, seed, noise=0.05) for seed in range(8)]
    assert all(each.extras == {} for each in found)
    assert found[0].rest_s(90_000, 40, 64) == found[0].seconds(90_000, 40)
    assert found[0].prompts_s(300.0) == (0.0, found[0].per_prompt_token_s)


def test_batches_are_padded_to_the_sizes_of_graphs() -> None:
    sizes = {0: 0, 1: 1, 2: 2, 3: 4, 5: 8, 64: 64, 65: 72, 257: 272}
    assert {batch: graph_size(batch) for batch in sizes} == sizes


@pytest.mark.parametrize("seed", [0, 3])
def test_terms_that_vary_in_a_few_early_steps_alone_are_told_apart_or_not(seed: int) -> None:
    """Ten steps at first have other requests and no prompts; the others leave no noise."""
    rng, fit, cost = np.random.default_rng(seed), StepFit(), StepTime(11e-3, 9.5e-8, 0, 5e-6)
    for number in range(600):
        early = number < 10
        prompts = [0] * 4 if early else rng.integers(500, 2500, 4).tolist()
        loads = rng.integers(4000, 30000, 4).tolist()
        step = Made(loads, [3 if early else 2] * 4, prompts, [each * 2000.0 for each in prompts])
        learn(fit, step, (3 if early else 1) * (cost.base_s + max(work(cost, step))))
    found = fit.finish()
    assert found is not None
    assert found.per_prompt_token_s == pytest.approx(cost.per_prompt_token_s, rel=0.01)
