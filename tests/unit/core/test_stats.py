"""Counters of the hot path."""

from router.core.stats import Histogram


def test_a_bucket_has_what_is_at_most_its_bound() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 9):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14)
