import pytest

from loadgen.report.intervals import Estimate, estimate, paired


def test_the_interval_is_students() -> None:
    # Standard deviation 1, so that 2.776 / sqrt(5) is left (t with 4 degrees of freedom).
    found = estimate([10, 10, 12, 12, 11])
    assert found.mean == 11
    assert found.half_width == pytest.approx(2.776 / 5**0.5)


def test_two_values_say_little_and_one_nothing() -> None:
    assert estimate([1, 2]).half_width == pytest.approx(12.706 / 2)
    assert estimate([3]).half_width is None


def test_pairs_take_out_what_is_common() -> None:
    found = paired([90, 180, 270], [100, 200, 300])
    assert found.mean == pytest.approx(-0.1)


def test_a_pair_with_nothing_has_a_difference() -> None:
    assert paired([0, 0], [0, 0]) == Estimate(0, 0)
    assert paired([3, 90], [0, 45]) == Estimate(1, 0)
    assert paired([0, 0], [5, 7]) == Estimate(-1, 0)
