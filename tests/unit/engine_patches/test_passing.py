"""What Nested WAIT learns: the shares of requests that pass from one segment to the next."""

import numpy as np
import pytest

from engine_patches.admission.ledger import Ticket
from engine_patches.admission.theory.passing import SEGMENTS, Passing
from router.core.forecast.forecast import Floats

CAP = 1000
NONE_BEYOND = np.zeros(2)


def shares(passing: Passing, *lengths: int, beyond: Floats = NONE_BEYOND) -> list[float]:
    alive = np.exp(passing.log_alive(beyond)(np.array([0.0, *lengths])))
    return list(alive[1:] / alive[:-1])


def end(
    passing: Passing, tokens: int, times: int = 1, *, by_itself: bool = True, cap: int = CAP
) -> None:
    for number in range(times):
        ticket = Ticket(str(number), 5, cap, generated_tokens=tokens)
        passing.ended(ticket, by_itself=by_itself)


def test_shares_are_learned_from_ends() -> None:
    passing = Passing((4, 8))
    end(passing, 4, 60)
    end(passing, 8, 30)
    end(passing, 9, 10)

    assert shares(passing, 4, 8) == pytest.approx([0.4, 0.25], abs=0.03)


@pytest.mark.parametrize(
    ("tokens", "cap", "by_itself", "beyond"),
    [
        pytest.param(7, CAP, False, 0.5, id="withdrawn"),
        pytest.param(7, 7, True, 0.5, id="cut off at its cap"),
        pytest.param(CAP, CAP, True, 51 / 52, id="cut off in the last segment"),
    ],
)
def test_who_is_cut_off_has_passed_and_not_ended(
    tokens: int, cap: int, by_itself: bool, beyond: float
) -> None:
    passing = Passing((4, 8))
    end(passing, 4, 50)
    end(passing, tokens, 50, by_itself=by_itself, cap=cap)

    assert shares(passing, 4, 8) == pytest.approx([0.5, beyond], abs=0.02)


def test_who_runs_has_passed_what_lies_behind() -> None:
    passing = Passing((4, 8))
    end(passing, 4, 50)

    assert shares(passing, 4, 8, beyond=np.array([50.0, 20.0])) == pytest.approx(
        [0.5, 21 / 22], abs=0.02
    )


def test_old_ends_fade() -> None:
    passing = Passing((4, 8))
    end(passing, 4, 1000)
    end(passing, 9, 3000)

    assert shares(passing, 4)[0] > 0.94


def test_within_a_segment_and_beyond_the_last_ends_come_evenly() -> None:
    passing = Passing((4, 8), [0.5, 0.25])

    assert shares(passing, 2, 4, 6, 8, 12, 16) == pytest.approx(
        [0.5**0.5, 0.5**0.5, 0.5, 0.5, 0.25, 0.25]
    )


def test_given_shares_stay() -> None:
    passing = Passing((4, 8), [0.5, 0.25])
    end(passing, 4, 100)

    assert shares(passing, 4, 8) == pytest.approx([0.5, 0.25])


def test_no_length_is_predicted() -> None:
    passing, ticket = Passing(SEGMENTS), Ticket("a", 5, 77, kind=3)

    assert (passing.predict(ticket, 9), passing.kind(ticket)) == (77, 3)
