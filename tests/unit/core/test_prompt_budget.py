"""The prompt budget of a step, by hand: without targets, with one, with both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest

from router.core.errors import ConfigError
from router.core.prompt_budget import PromptBudget, StepSeen
from router.core.step_fit import FittedStepTime
from router.core.step_time import StepBudget, StepTime
from router.core.targets import Targets

# 10 ms without prompts; a prompt token takes 0.1 ms.
COST = StepTime(10e-3, per_prompt_token_s=1e-4)
REST_S = 10e-3


def seen(step_s: float = 0.02, unstarted: int = 0, firsts: int = 1, tokens: int = 10) -> StepSeen:
    return StepSeen(step_s, tokens, firsts, unstarted, REST_S)


def test_where_prompts_cost_nothing_engines_keep_their_own() -> None:
    assert PromptBudget(Targets(1.0, 0.04)).after(seen(), StepTime(10e-3, 1e-7)) is None


@pytest.mark.parametrize(("most", "tokens"), [(None, 512), (2048, 512), (256, 256)])
def test_until_steps_tell_their_cost_the_budget_is_a_usual_one(
    most: int | None, tokens: int
) -> None:
    assert PromptBudget(Targets(), most).after(seen(), None) == (tokens, 1)


@pytest.mark.parametrize(("known", "budget"), [((), (512, 1)), (("per_prompt_token_s",), None)])
def test_that_prompts_cost_nothing_must_be_known(
    known: tuple[str, ...], budget: tuple[int, int] | None
) -> None:
    cost = FittedStepTime(10e-3, 1e-7, known=known)
    assert PromptBudget(Targets()).after(seen(), cost) == budget


def test_a_step_that_seems_to_take_no_time_leaves_prompts_some_tokens() -> None:
    assert PromptBudget(Targets()).after(StepSeen(0.0, 0, 0, 0, 0.0), COST) == (64, 1)


def test_steps_without_a_target_leave_what_was_learned_for_one() -> None:
    budget = PromptBudget(Targets(tpot_s=0.02))
    for _ in range(1000):
        learned = budget.after(seen(0.03), COST)
    budget.targets = Targets()
    for _ in range(1000):
        budget.after(seen(0.04), COST)
    budget.targets = Targets(tpot_s=0.02)
    assert budget.after(seen(0.03), COST) == learned != (100, 1)


@pytest.mark.parametrize(("computed", "tokens"), [(100, 300), (200, 500), (300, 1200)])
def test_where_prompts_fill_most_of_the_time_they_take_more_of_a_step(
    computed: float, tokens: int
) -> None:
    budget = PromptBudget(Targets())
    filled = replace(seen(0.04), prompt_tokens=computed)
    for _ in range(1000):
        chosen = budget.after(filled, COST)
    assert chosen is not None
    assert chosen.tokens == pytest.approx(tokens, abs=1)
    for _ in range(1000):
        chosen = budget.after(seen(0.04), COST)
    assert chosen == (300, 1)


@pytest.mark.parametrize(
    ("targets", "most", "tokens"),
    [
        (Targets(), None, 300),
        (Targets(), 256, 256),
        (Targets(tpot_s=0.025), None, 150),
        (Targets(tpot_s=1.0), None, 300),
        (Targets(tpot_s=0.005), None, 12),
        (Targets(ttft_s=1.0), None, 300),
    ],
    ids=[
        "three times the rest of a step",
        "never more than the engines'",
        "what the TPOT target leaves",
        "no more than pays, whatever the target",
        "an eighth of a step where the target leaves nothing",
        "first tokens are soon enough",
    ],
)
def test_the_budget_of_a_step(targets: Targets, most: int | None, tokens: int) -> None:
    assert PromptBudget(targets, most).after(seen(), COST) == StepBudget(tokens)


def test_what_any_prompts_add_leaves_less_for_their_tokens() -> None:
    """5 ms in any case, and each token with 1,000 before it takes 0.2 ms."""
    best = (10e-3, 0.0, 0.0, 1e-4, 1e-7, 5e-3, 0.0)
    cost = FittedStepTime(10e-3, per_prompt_token_s=1.5e-4, predicting=best)
    after = StepSeen(0.02, 10, 1, 0, REST_S, before_tokens=1000.0)
    assert PromptBudget(Targets(tpot_s=0.025)).after(after, cost) == StepBudget(50)
    free = FittedStepTime(10e-3, per_prompt_token_s=1e-4, predicting=(*best[:3], 0, 0, 5e-3, 0))
    assert PromptBudget(Targets(tpot_s=0.025), 2048).after(after, free) == StepBudget(2048)


# Beside the 10 ms any prompts add 5, and each token .01.
UNEVEN = FittedStepTime(
    10e-3, per_prompt_token_s=1e-5, predicting=(10e-3, 0.0, 0.0, 1e-5, 0.0, 5e-3, 0.0)
)


@pytest.mark.parametrize(
    ("targets", "budget"),
    [
        (Targets(), (3000, 1)),
        (Targets(ttft_s=1.0), (3000, 1)),
        (Targets(tpot_s=0.05), (2500, 1)),
        (Targets(tpot_s=0.02), (500, 1)),
        (Targets(tpot_s=0.015), (2500, 20)),
        (Targets(tpot_s=0.011), (2000, 20)),
        (Targets(1.0, 0.02), (1500, 2)),
        (Targets(1.0, 0.013), (1900, 8)),
    ],
    ids=[
        "none: nobody has asked for short steps",
        "first tokens alone: each step",
        "tokens: three times R in each step",
        "what is left in each step suffices",
        "nothing is left in each step: three times R in one of twenty",
        "an eighth of R on average where the target leaves less",
        "both: shorter windows, as the mean alone is to keep the target",
        "no shorter one has room for many tokens",
    ],
)
def test_windows_where_any_prompts_add_much(targets: Targets, budget: tuple[int, int]) -> None:
    chosen = PromptBudget(targets).after(seen(0.01), UNEVEN)
    assert chosen == pytest.approx(budget, rel=0.01)


def test_steps_are_filled_by_what_any_prompts_add_too() -> None:
    """Two thirds of steps of 60 ms: of 45 ms of prompts, 15 are what any add."""
    cost = FittedStepTime(
        15e-3, per_prompt_token_s=1e-5, predicting=(15e-3, 0.0, 0.0, 1e-5, 0.0, 15e-3, 0.0)
    )
    budget, chosen = PromptBudget(Targets()), None
    for _ in range(1000):
        computed = chosen.tokens if chosen else 0
        full = StepSeen(30e-3 + 1e-5 * computed, 10, 1, 9, 15e-3, prompt_tokens=computed)
        chosen = budget.after(full, cost)
    assert chosen is not None
    assert chosen.tokens == pytest.approx(12 * 15e-3 / 1e-5, rel=0.01)


def test_windows_do_not_tell_what_any_prompts_add() -> None:
    """All prompts come in large pieces then, so that their tokens may seem to cost it."""
    budget, seems = PromptBudget(Targets(tpot_s=0.015)), StepTime(10e-3, 0, 0, 1.2e-5)
    known, kept = [budget.after(seen(), each) for each in (seems, UNEVEN, seems)][-2:]
    assert known == pytest.approx((2500, 20), abs=1)
    assert kept == pytest.approx((25e-3 / 1.2e-5, 20), abs=1)
    light = StepSeen(0.01, 10, 1, 0, 5e-3)
    again = [budget.after(each, seems) for each in (light, seen())]
    assert [each.every for each in again if each is not None] == [1, 1]


def test_where_all_steps_miss_the_target_windows_tell_what_any_prompts_add() -> None:
    """As long as hardly a step is without prompts, what they add seems to be the rest of a step."""
    unknown, known = FittedStepTime(10e-3, 0, 0, 1e-5), replace(UNEVEN, judged=True)
    budget = PromptBudget(Targets(tpot_s=0.012))
    made = [budget.after(seen(0.016), unknown) for _ in range(30)]
    every = [each.every for each in made if each is not None]
    assert every == [1] * 26 + [20] * 4
    after = budget.after(seen(0.016), known)
    assert after is not None
    assert after.every == 20
    other = PromptBudget(Targets(tpot_s=0.012))
    for _ in range(30):
        other.after(seen(0.016), unknown)
    assert other.after(seen(0.016), replace(unknown, judged=True)) == pytest.approx((125, 1), 1)


def test_there_is_always_some_room_for_prompts() -> None:
    assert PromptBudget(Targets(tpot_s=1e-3)).after(seen(), StepTime(1e-2, 0, 0, 1.0)) == (1, 1)


@pytest.mark.parametrize(("unstarted", "tokens"), [(50, 300), (100, 600), (900, 1200)])
def test_more_prompts_while_more_wait_than_arrive_within_the_target(
    unstarted: int, tokens: int
) -> None:
    """One first token in each step of 20 ms: 50 within a second."""
    assert PromptBudget(Targets(ttft_s=1.0)).after(seen(unstarted=unstarted), COST) == (tokens, 1)


def test_before_the_first_token_nothing_is_late() -> None:
    budget = PromptBudget(Targets(ttft_s=1.0, tpot_s=0.025))
    assert budget.after(seen(unstarted=900, firsts=0), COST) == (150, 1)


def steps(targets: Targets, waiting: Iterator[int], count: int) -> list[float]:
    """Lengths of steps that the budget fills where prompts wait; the last half."""
    budget, made, step_s = PromptBudget(targets), list[float](), REST_S
    for _ in range(count):
        unstarted = next(waiting)
        chosen = budget.after(seen(step_s, unstarted), COST)
        assert chosen is not None
        assert chosen.every == 1
        step_s = REST_S + (chosen.tokens * COST.per_prompt_token_s if unstarted else 0.0)
        made.append(step_s)
    return made[count // 2 :]


def test_with_both_targets_the_mean_over_tokens_meets_that_of_tokens() -> None:
    """Prompts wait in two of three steps; those without leave time to the others."""
    made = steps(Targets(ttft_s=1.0, tpot_s=0.025), cycle([9, 9, 0]), 20_000)
    assert sum(made) / len(made) == pytest.approx(0.025, rel=0.01)
    assert max(made) > 0.025


def test_with_a_target_of_tokens_alone_every_step_meets_it() -> None:
    assert max(steps(Targets(tpot_s=0.025), cycle([9, 9, 0]), 1000)) <= 0.025


def test_steps_that_vary_keep_a_target_of_tokens_alone_nineteen_times_in_twenty() -> None:
    budget, noise = PromptBudget(Targets(tpot_s=0.025)), cycle([0.9, 1.2, 1.0, 0.95, 1.05])
    made = [REST_S]
    for _ in range(4000):
        chosen = budget.after(seen(made[-1]), COST)
        assert chosen is not None
        made.append(next(noise) * (REST_S + chosen.tokens * COST.per_prompt_token_s))
    missed = [step_s > 1.02 * 0.025 for step_s in made[2000:]]
    assert sum(missed) / len(missed) == pytest.approx(0.05, abs=0.01)
    assert sum(made[2000:]) / 2000 > 0.8 * 0.025


def test_where_first_tokens_are_late_for_good_steps_are_longer_than_the_target() -> None:
    both = Targets(ttft_s=1.0, tpot_s=0.02)
    # One first token a step: some fifty a second, and four times as many wait.
    made = steps(both, cycle([200]), 20_000)
    assert sum(made) / len(made) > 0.025
    kept = steps(both, cycle([40]), 20_000)
    assert sum(kept) / len(kept) == pytest.approx(0.02, rel=0.01)


def test_a_step_without_output_corrects_nothing() -> None:
    budget = PromptBudget(Targets(ttft_s=1.0, tpot_s=0.02))
    first = budget.after(seen(tokens=0), COST)
    for _ in range(100):
        assert budget.after(seen(0.5, tokens=0), COST) == first


def test_a_first_step_of_no_time_is_harmless() -> None:
    assert PromptBudget(Targets(1.0, 0.02)).after(seen(0.0), COST) == (100, 1)


@pytest.mark.parametrize(
    ("targets", "name"),
    [((0.0, None), "target_ttft"), ((None, -1.0), "target_tpot"), ((None, 1e999), "target_tpot")],
)
def test_targets_are_times(targets: tuple[float | None, float | None], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} takes seconds above 0"):
        Targets(*targets)
