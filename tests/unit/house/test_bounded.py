"""What of a late answer is a server's own fault, and what is the machine's."""

import pytest

from tests.support.bounded import ASKER, Times, held_up_s


@pytest.mark.parametrize(
    ("took_s", "used_s", "kept_s", "asker_s", "counted_s"),
    [
        (0.5, 0.1, 0.0, 0.0, 0.1),  # the client was slow, or the machine
        (0.5, 0.5, 0.0, 0.0, 0.5),  # it computed all the time
        (4.0, 0.0, 0.0, 0.0, 4.0),  # its event loop waited for something else
        (2.5, 0.0, 0.1, 0.1, 2.3),
        (4.0, 0.2, 3.5, 0.0, 0.2),  # the machine was busy with others
        (4.0, 0.2, 0.0, 3.5, 0.2),
        (4.0, 1.0, 2.5, 0.0, 1.0),
    ],
)
def test_a_server_is_blamed_for_what_it_computes_and_for_hanging(
    took_s: float, used_s: float, kept_s: float, asker_s: float, counted_s: float
) -> None:
    before = {"7": Times(3.0, 5.0), ASKER: Times(1.0, 2.0)}
    after = {
        "7": Times(3.0 + used_s, 5.0 + kept_s),
        "8": Times(),
        ASKER: Times(9.0, 2.0 + asker_s),
    }
    assert held_up_s(took_s, before, after) == pytest.approx(counted_s)
