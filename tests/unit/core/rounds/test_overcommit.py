"""Over-commit by the measured slot bubble."""

import pytest

from router.core.rounds.overcommit import MOST, RETRY_REVIEWS, REVIEW_STEPS, Overcommit
from router.core.state.barrier import StepTotals

SLOTS = 100


class Fleet:
    """Sums over steps in which so many slots stand empty and so many requests enter."""

    def __init__(self) -> None:
        self.totals = StepTotals()

    def run(self, steps: int, empty: int, entered: int) -> StepTotals:
        old = self.totals
        self.totals = StepTotals(
            steps=old.steps + steps,
            free_slots=old.free_slots + steps * empty,
            entered=old.entered + steps * entered,
        )
        return self.totals


def test_nothing_is_decided_on_few_steps() -> None:
    overcommit, fleet = Overcommit(), Fleet()
    overcommit.review(fleet.run(REVIEW_STEPS - 1, empty=50, entered=5), SLOTS)
    assert (overcommit.requests, overcommit.bubble_steps) == (0, None)
    overcommit.review(fleet.run(1, empty=50, entered=5), SLOTS)
    assert (overcommit.requests, overcommit.bubble_steps) == (1, 10)


@pytest.mark.parametrize(
    ("empty", "expected"),
    [(3, [1, MOST, MOST]), (1, [0, 0, 0])],
    ids=["too much is lost", "a little is lost"],
)
def test_it_rises_while_much_slot_time_is_lost(empty: int, expected: list[int]) -> None:
    overcommit, fleet = Overcommit(), Fleet()
    found = []
    for _ in expected:
        overcommit.review(fleet.run(REVIEW_STEPS, empty, entered=2), SLOTS)
        found.append(overcommit.requests)
    assert found == expected


def test_it_falls_where_next_to_nothing_is_lost_for_long() -> None:
    overcommit, fleet = Overcommit(), Fleet()
    for _ in range(MOST):
        overcommit.review(fleet.run(REVIEW_STEPS, empty=9, entered=2), SLOTS)
    found = []
    for _ in range(RETRY_REVIEWS + MOST):
        overcommit.review(fleet.run(REVIEW_STEPS, empty=0, entered=2), SLOTS)
        found.append(overcommit.requests)
    assert found == [MOST] * (RETRY_REVIEWS - 1) + [1, 0, 0]
    assert overcommit.bubble_steps == 0


@pytest.mark.parametrize("needed", [1, MOST])
def test_it_does_not_fall_because_it_works(needed: int) -> None:
    """Slots stand empty below the number that is needed, and never from it on."""
    overcommit, fleet = Overcommit(), Fleet()
    found = []
    for _ in range(10 * RETRY_REVIEWS):
        empty = 5 if overcommit.requests < needed else 0
        overcommit.review(fleet.run(REVIEW_STEPS, empty, entered=2), SLOTS)
        found.append(overcommit.requests)
    assert found[needed - 1] == needed
    assert set(found[needed:]) <= {needed, needed - 1}
    assert found.count(needed - 1) <= 10, "a lower number is tried now and then, for one review"


def test_where_nobody_enters_nothing_is_learned() -> None:
    overcommit = Overcommit()
    overcommit.review(Fleet().run(REVIEW_STEPS, empty=9, entered=0), SLOTS)
    assert (overcommit.requests, overcommit.bubble_steps) == (0, None)


def test_a_fixed_number_is_kept_and_the_bubble_measured() -> None:
    overcommit = Overcommit(3)
    overcommit.review(Fleet().run(REVIEW_STEPS, empty=9, entered=2), SLOTS)
    assert (overcommit.requests, overcommit.bubble_steps) == (3, 4.5)
