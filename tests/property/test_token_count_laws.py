"""Laws of counting a stream's tokens: some reads together come to the same as each event alone."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.stats import TokenStats
from router.proxy.dialects import COMPLETIONS, MESSAGES
from router.proxy.event_stream import EventStream, Passing, TokenTimes

TOKEN = b'data: {"choices":[{"index":0,"text":" a"}]}\n\n'
QUOTING = b'data: {"choices":[{"index":0,"text":"data: b"}]}\r\n\r\n'
LONG = b'data: {"choices":[{"index":0,"text":"' + b"c" * 700 + b'"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"total_tokens":9}}\n\n'
COMPLETION_EVENTS = st.sampled_from([TOKEN, TOKEN, TOKEN, QUOTING, LONG, USAGE, b": ping\n\n"])
MESSAGE_EVENTS = st.sampled_from(
    [
        b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n',
        b'event: content_block_stop\ndata: {"type":"content_block_stop"}\n\n',
    ]
)
ENDINGS = st.sampled_from([[], [b"data: [DONE]\n\n"]])


class Counted:
    """What is known of a stream in the end."""

    def __init__(self, stream: EventStream, answers: int) -> None:
        self.stream = stream
        self.stats = TokenStats()
        self.times = TokenTimes(self.stats, answers)
        self.passed: list[bytes] = []
        self.clock = iter(range(10**6)).__next__

    def known(self) -> object:
        self.times.end()
        stream, stats = self.stream, self.stats
        between = stats.itl_s.counts, stats.itl_s.total
        each = stats.tpot_s.counts, stats.tpot_s.total
        return b"".join(self.passed), stream.events, stream.tokens, stream.done, between, each


def one_by_one(counted: Counted, reads: list[bytes]) -> None:
    for read in reads:
        if events := counted.stream.feed(read):
            counted.passed.append(events)
            counted.times.passed(counted.stream.tokens, counted.clock())


def together(counted: Counted, reads: list[bytes]) -> None:
    told: list[int] = []
    passing = Passing(
        counted.stream, counted.times, counted.passed.append, counted.clock, told.append
    )
    for read in reads:
        passing.take(read)
    passing.count()
    assert told == sorted(told)
    assert not told or told[-1] == counted.stream.tokens


@pytest.mark.parametrize(
    ("make", "events"),
    [
        pytest.param(COMPLETIONS.stream, COMPLETION_EVENTS, id="completions"),
        pytest.param(MESSAGES.stream, MESSAGE_EVENTS, id="messages"),
    ],
)
@given(data=st.data())
def test_reads_that_are_counted_together_come_to_the_same(
    make: Callable[[], EventStream], events: st.SearchStrategy[bytes], data: st.DataObject
) -> None:
    read = st.lists(events, min_size=1, max_size=3).map(b"".join)
    reads = data.draw(st.lists(read, max_size=40)) + data.draw(ENDINGS)
    if data.draw(st.booleans()):
        whole = b"".join(reads)
        reads = _cut_at(whole, data.draw(st.lists(st.integers(0, len(whole)), max_size=40)))
    answers = data.draw(st.integers(1, 2))
    alone, joined = Counted(make(), answers), Counted(make(), answers)

    one_by_one(alone, reads)
    together(joined, reads)

    assert joined.known() == alone.known()


def _cut_at(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, *cuts, len(stream)})
    return [stream[start:end] for start, end in pairwise(places)]
