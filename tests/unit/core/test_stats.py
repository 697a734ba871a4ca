"""Counters of the hot path."""

from router.core.process_counts import DECIDER, PROXY, ProcessCounts
from router.core.stats import Histogram


def test_a_bucket_has_what_is_at_most_its_bound() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 9):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14)


def test_counts_are_taken_here_and_added_elsewhere() -> None:
    here, elsewhere = Histogram((1, 2)), Histogram((1, 2))
    here.observe(0.5)
    elsewhere.observe(3)
    elsewhere.add(*here.take())
    assert (here.counts, here.total) == ([0, 0, 0], 0)
    assert (elsewhere.counts, elsewhere.total) == ([1, 0, 1], 3.5)


def test_processes_by_role() -> None:
    counts = ProcessCounts(proxies=2, proxy_restarts={0: 1, 1: 3}, decider_restarts=5)
    assert counts.up() == {PROXY: 2, DECIDER: 1}
    assert counts.restarts() == {PROXY: 4, DECIDER: 5}
