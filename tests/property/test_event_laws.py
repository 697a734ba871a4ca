"""Laws of cutting a stream of events: nothing is lost, and what passes ends with an event."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.proxy.event_stream import ENDS as EVENT_ENDS
from router.proxy.event_stream import EventStream

ENDS = st.sampled_from([b"\n\n", b"\r\n\r\n"])
LINES = st.sampled_from(
    [b"data: {}", b'data: {"text":"data: [DONE]"}', b"event: ping", b": comment", b"data: [DONE]"]
)
EVENTS = st.builds(bytes.__add__, LINES, ENDS)
ODD = st.lists(st.sampled_from([b"\r", b"\n", b"data:", b"x"]), max_size=6).map(b"".join)
STREAMS = st.lists(EVENTS | ODD).map(b"".join)
CUTS = st.lists(st.integers(0, 300))


def chunks(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    return [stream[start:end] for start, end in pairwise(places)]


@given(STREAMS, CUTS)
def test_every_byte_passes_once_and_in_order(stream: bytes, cuts: list[int]) -> None:
    events = EventStream()

    passed = b"".join(events.feed(chunk) for chunk in chunks(stream, cuts))

    assert passed + events.rest() == stream


@given(STREAMS, CUTS)
def test_what_has_passed_ends_with_an_event(stream: bytes, cuts: list[int]) -> None:
    events = EventStream()
    for chunk in chunks(stream, cuts):
        passed = events.feed(chunk)
        assert not passed or passed.endswith((*EVENT_ENDS, b"\n\r"))
        assert not events.rest().endswith(EVENT_ENDS)


@given(st.lists(EVENTS).map(b"".join), CUTS)
def test_how_the_bytes_are_cut_does_not_matter(stream: bytes, cuts: list[int]) -> None:
    whole, pieces = EventStream(), EventStream()
    whole.feed(stream)
    for chunk in chunks(stream, cuts):
        pieces.feed(chunk)

    assert (pieces.done, pieces.events, pieces.rest()) == (whole.done, whole.events, whole.rest())


@given(st.lists(EVENTS, min_size=1), st.data())
def test_no_event_waits_longer_than_for_its_end(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(events)
    cut = data.draw(st.integers(0, len(stream)))
    reader = EventStream()

    passed = reader.feed(stream[:cut])

    ends = (len(b"".join(events[:count])) for count in range(len(events) + 1))
    assert len(passed) >= max(end for end in ends if end <= cut)
