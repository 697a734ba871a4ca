"""``evenstep bounds``."""

import json
from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]


def test_two_chains_at_seven_tenths(evenstep: Run) -> None:
    code, out, told = evenstep(
        "bounds", "--service-rates", "1,.5", "--slots", "3,4", "--rate", "3.5", "--json", "-"
    )

    assert code == 0
    found = json.loads(out)
    assert found["lower_s"] == pytest.approx(1.3998, rel=1e-3)
    assert found["exact_s"] == pytest.approx(1.5388, rel=1e-3)
    assert found["upper_s"] == pytest.approx(1.7881, rel=1e-3)
    assert (found["total_rate"], found["load"], found["stable"]) == (5, 0.7, True)
    assert "exact value: 1.53877 s" in told


def test_as_many_arrivals_as_can_be_served_are_too_many(evenstep: Run) -> None:
    arguments = ("--service-rates", "1,.5", "--slots", "3,4", "--rate", "5", "--json", "-")
    code, out, told = evenstep("bounds", *arguments)

    assert code == 0
    found = json.loads(out)
    assert [found[key] for key in ("lower_s", "exact_s", "upper_s", "stable")] == [None] * 3 + [
        False
    ]
    assert "unstable: the queue grows without end" in told


def test_many_slots_have_bounds_alone(evenstep: Run) -> None:
    arguments = ("--service-rates", "1,.5", "--slots", "3000,4000", "--rate", "3500", "--json", "-")
    code, out, told = evenstep("bounds", *arguments)

    assert code == 0
    assert json.loads(out)["exact_s"] is None
    assert "exact value: not for so many slots and speeds" in told


@pytest.mark.parametrize(
    ("rates", "slots", "rate", "message"),
    [
        ("1,x", "3,4", "1", "--service-rates takes requests per second from 1e-09 to 1e+09, got x"),
        ("1,0", "3,4", "1", "--service-rates takes requests per second"),
        ("1,inf", "3,4", "1", "--service-rates takes requests per second"),
        ("1", "3,4", "1", "--service-rates names 1 chains and --slots 2: one of each"),
        ("1,2", "3,0", "1", "--slots takes whole numbers above 0, parted by commas, got 0"),
        ("1,2", "3," + "9" * 5000, "1", "--slots takes whole numbers above 0"),
        ("1,2", "3,1.5", "1", "--slots takes whole numbers above 0"),
        ("1,2", "3,1000000", "1", "--slots may add up to 1,000,000 at most, got 1,000,003"),
        ("1,2", "3,4", "-1", "--rate takes requests per second"),
        ("1,2", "3,4", "nan", "--rate takes requests per second"),
    ],
)
def test_what_makes_no_sense_is_refused(
    evenstep: Run, rates: str, slots: str, rate: str, message: str
) -> None:
    code, out, told = evenstep(
        "bounds", "--service-rates", rates, "--slots", slots, "--rate", rate, "--json", "-"
    )

    assert (code, out) == (2, "")
    assert message in " ".join(told.split())
