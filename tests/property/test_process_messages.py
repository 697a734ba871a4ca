"""What processes tell each other arrives as it was said, however the bytes come cut."""

import math
from collections.abc import Iterable, Sequence
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.access.key_ring import Key, Rate, digest_of
from router.core.errors import (
    DisplacedError,
    EvenstepError,
    KeyLimitError,
    NoWorkerError,
    PoolFullError,
    QueueTimeoutError,
    TargetError,
)
from router.core.events import (
    Arrived,
    Began,
    Ended,
    Failed,
    Progressed,
    PromptCounted,
    Refused,
    RestRequested,
    Returned,
    Succeeded,
)
from router.core.queue.retry import Deadlines
from router.core.targets import Targets, Verdict
from router.core.types import Content, Outcome, Request, WorkerSpec
from router.dispatch.models import Route
from router.http.port import EndingSettings, HttpLimits
from router.processes import messages as m
from router.processes.directory import Access, Directory, GroupCard, Patience, Serving
from router.processes.peer import Frames, append
from router.proxy.answers import error_answer
from router.proxy.context import RelaySettings

names = st.sampled_from(["", "a", "es-1", "gr\u00fcn", "x" * 40])
# The largest that the wire takes is drawn as well: sizes that come from settings and clients.
counts = st.integers(0, 2**40) | st.just(2**63 - 1)
times = st.floats(0, 1e9) | st.sampled_from([5e-324, 1.7e308, math.inf])
spans = st.floats(0, 1e9, exclude_min=True)
outcomes = st.sampled_from(Outcome)
requests = st.builds(
    Request,
    id=names,
    group=names,
    prompt_tokens=counts,
    slots=st.integers(1, 9),
    max_tokens=st.none() | counts,
    priority=st.integers(-(2**63), 2**63 - 1),
    arrival_s=times,
    tenant=names,
    queue_timeout_s=st.none() | times,
    avoid=st.frozensets(names, max_size=3),
    targets=st.none() | st.builds(Targets, st.none() | spans, st.none() | spans),
    content=st.none() | st.builds(Content, st.binary(), st.binary(), st.just(bytes(50_000))),
)
tallies = st.builds(
    m.GroupTally,
    *(st.lists(counts, max_size=4), times, st.lists(counts, max_size=4), times, counts),
    st.dictionaries(st.sampled_from(get_args(Verdict)), counts, max_size=3),
)
from_proxies = st.one_of(
    st.builds(
        m.Hello, counts, counts, st.lists(st.builds(m.Held, requests, names, counts), max_size=2)
    ),
    st.builds(Arrived, requests),
    st.builds(Returned, names, requests),
    st.builds(Ended, names, outcomes, st.none() | times),
    st.builds(Began, names, names, times, st.booleans()),
    st.builds(Progressed, names, counts),
    st.builds(PromptCounted, names, counts, counts),
    st.builds(Succeeded, names, names, times),
    st.builds(Failed, names, names, times, st.booleans()),
    st.builds(Refused, names, names),
    st.builds(RestRequested, names, times, times),
    st.builds(m.Trouble, names, names),
    st.builds(
        m.Tally,
        st.dictionaries(names, tallies, max_size=2),
        counts,
        st.dictionaries(counts, counts, max_size=2),
        counts,
        counts,
    ),
    st.builds(m.Tried, counts, names),
    st.builds(m.Followed, counts),
    st.just(m.Beat()),
)
DIRECTORY = Directory(
    groups={
        "g": GroupCard(3.5, "g/prefill", frozenset({"a", "b"}), ranks={"a": 0, "b": 3}, asks=True)
    },
    models={"tiny": "g"},
    aliases={"small": "tiny"},
    known=("tiny", "small"),
    ranked=frozenset({"http://a"}),
    patience=Patience(RelaySettings(3, Deadlines(1.0, None, 2.0), worker_headers=True), 0.2, 5.0),
    access=Access((Key("me", digest_of(b"sesame"), 2.0, 3, Rate(5, 60.0)),), hidden=True),
    serving=Serving(
        HttpLimits(), (b"cert", None), EndingSettings(0.5, 30.0), "info", "json", "key", 2.0
    ),
    absent={"tiny": frozenset({"a"})},
    adapters=frozenset({"tiny"}),
)
from_deciders = st.one_of(
    st.builds(m.Given, names, st.builds(WorkerSpec, names, names, rank=st.none() | counts)),
    st.builds(m.Denied, names, names, names, st.none() | counts),
    st.builds(m.Recall, names, names, st.booleans()),
    st.builds(m.Told, counts, st.just(DIRECTORY)),
    st.builds(m.Try, counts, st.tuples(st.binary(), st.none() | st.binary())),
)


def framed(messages: Iterable[msgspec.Struct]) -> bytes:
    data = bytearray()
    for message in messages:
        append(message, data)
    return bytes(data)


def taken_apart(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Frames of bytes that come in pieces."""
    frames, found, at = Frames(), [], 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        found += [bytes(frame) for frame in frames.feed(data[at:cut])]
        at = cut
    return found


@given(st.lists(from_proxies, max_size=9), st.lists(counts, max_size=20))
def test_what_a_proxy_says(said: list[msgspec.Struct], cuts: list[int]) -> None:
    frames = taken_apart(framed(said), cuts)
    assert [m.from_proxy.decode(frame) for frame in frames] == said


@given(st.lists(from_deciders, max_size=9), st.lists(counts, max_size=20))
def test_what_the_deciding_process_says(said: list[msgspec.Struct], cuts: list[int]) -> None:
    frames = taken_apart(framed(said), cuts)
    assert [m.from_decider.decode(frame) for frame in frames] == said


def test_what_cannot_be_written_leaves_the_rest_as_it_was() -> None:
    data = bytearray(framed([m.Trouble("a", "b")]))
    before = bytes(data)
    beyond = Request("es-1", "g", 1, priority=2**64)
    for message in (Arrived(beyond), m.Trouble("a", "\ud800"), Progressed("a", -(2**63) - 1)):
        with pytest.raises((OverflowError, ValueError)):
            append(message, data)
        assert data == before


@pytest.mark.parametrize(
    "error",
    [
        NoWorkerError("nobody"),
        QueueTimeoutError("no slot became free within 3 s"),
        PoolFullError(7, 2),
        DisplacedError(7, 3),
        KeyLimitError("5 requests", 11),
        TargetError("in 9 s", 8),
        TargetError("in 9 s", None),
    ],
)
def test_errors_are_told_as_they_are(error: EvenstepError) -> None:
    (frame,) = taken_apart(framed([m.denied("es-1", error)]), [])
    message = m.from_decider.decode(frame)
    assert isinstance(message, m.Denied)
    again = m.error_of(message)
    assert (type(again), str(again)) == (type(error), str(error))
    assert error_answer(again) == error_answer(error)


def test_an_error_that_nobody_expects_is_one_of_the_routers() -> None:
    assert type(m.error_of(m.Denied("es-1", "Surprise", "what?"))) is EvenstepError


def test_a_length_that_nobody_says_is_no_frame() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().feed(b"\xff\xff\xff\xff"))


@given(from_deciders.filter(lambda message: not isinstance(message, m.Beat)))
def test_one_end_does_not_take_what_it_says_itself(message: msgspec.Struct) -> None:
    (frame,) = taken_apart(framed([message]), [])
    with pytest.raises(msgspec.ValidationError):
        m.from_proxy.decode(frame)


def test_a_directory_knows_what_it_was_told() -> None:
    tiny = Route("tiny", "g", frozenset({"a"}), None, "g/prefill")
    assert DIRECTORY.route("small") == DIRECTORY.route("tiny") == tiny
    assert DIRECTORY.route(None) == Route(None, "g", frozenset(), None, "g/prefill")
    assert DIRECTORY.tokens("g", 8) == 3
    divided = msgspec.structs.replace(DIRECTORY, divided=frozenset({"tiny"}))
    assert divided.route("small") == tiny._replace(divided=True)
