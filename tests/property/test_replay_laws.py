"""Laws of the replay's arithmetic and of its event reader."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from loadgen.replay.replay_results import percentile
from loadgen.replay.stream import CompletionStream
from loadgen.traces.trace import Trace, TraceRequest

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1).map(sorted)


@given(VALUES, st.floats(0, 100))
def test_percentile_stays_between_its_neighbours(values: list[float], percent: float) -> None:
    rounding = 1e-6
    assert values[0] - rounding <= percentile(values, percent) <= values[-1] + rounding


@given(VALUES)
def test_the_median_is_a_percentile(values: list[float]) -> None:
    assert abs(percentile(values, 50) - statistics.median(values)) < 1e-6


BODY = (
    b'data: {"choices":[{"text":" a"}]}\n\n' * 3
    + b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(1, len(BODY) - 1), max_size=8).map(sorted))
def test_how_the_bytes_are_cut_does_not_matter(cuts: list[int]) -> None:
    stream = CompletionStream()
    for start, end in zip([0, *cuts], [*cuts, len(BODY)], strict=True):
        stream.feed(BODY[start:end], float(end))
    assert (stream.output_tokens, stream.done, stream.error) == (3, True, None)
    assert stream.first_s is not None
    assert len(stream.gaps_s) <= 2


@given(st.integers(1, 30), st.integers(1, 100), st.integers())
def test_a_sample_has_the_size_asked_for(rows: int, count: int, seed: int) -> None:
    trace = Trace("t", "f", tuple(TraceRequest(row + 1, 1) for row in range(rows)))
    drawn = trace.sample(count, seed)
    assert len(drawn) == count
    assert len(set(drawn)) == count or count > rows
