"""Recordings where a trace is asked for, and whole."""

import gzip
from pathlib import Path

import pytest
from msgspec import structs

from loadgen.traces.recordings import load_recording
from loadgen.traces.trace import Trace, TraceRequest, load_trace
from router.core.errors import InputError
from router.recording.lines import (
    Header,
    RecordedGroup,
    RecordedWorker,
    RequestLine,
    StepLine,
    encode,
)

HEADER = Header(
    evenstep="0.1.0",
    source="observe",
    started_unix_s=1e9,
    groups={"g": RecordedGroup(False, (RecordedWorker("a"),))},
)
STEP = StepLine(1, "g", 0.5, 0.03, [10], [2])
REQUEST = RequestLine(0, "g", 0.25, None, None, 2.0, "a", 5, 7, "completed")
LINES = [
    encode(HEADER),
    encode(STEP),
    encode(REQUEST),
    encode(structs.replace(REQUEST, request=1, arrival_s=-0.5, output_tokens=3)),
]


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_the_requests_of_a_recording_are_a_trace(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = b"".join(LINES)
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    trace = load_trace(path)
    assert trace == Trace(name, "recording", (TraceRequest(5, 7, 0.25), TraceRequest(5, 3, -0.5)))
    assert [request.arrival_s for request in trace.earliest()] == [0.0, 0.75]
    recording = load_recording(path)
    assert (recording.steps, len(recording.requests)) == ((STEP,), 2)


def test_requests_without_output_are_skipped_and_parts_share_theirs(tmp_path: Path) -> None:
    path = tmp_path / "r"
    wide = structs.replace(REQUEST, slots=3, output_tokens=8)
    empty = structs.replace(REQUEST, prompt_tokens=0, output_tokens=0, outcome="failed")
    path.write_bytes(encode(HEADER) + encode(wide) + encode(empty))
    trace = load_trace(path)
    assert [request.output_tokens for request in trace.requests] == [2, 3, 3]


def test_a_client_may_have_asked_for_any_number_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "r"
    refused = structs.replace(REQUEST, slots=10**15, output_tokens=0)
    short = structs.replace(REQUEST, slots=10**15, output_tokens=2)
    path.write_bytes(encode(HEADER) + encode(refused) + encode(short))
    trace = load_trace(path)
    assert [request.output_tokens for request in trace.requests] == [1, 1]


def test_a_request_longer_than_any_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(encode(HEADER) + encode(structs.replace(REQUEST, prompt_tokens=10**9)))
    with pytest.raises(InputError, match="request 0 has more than 100000000 tokens; remove its"):
        load_trace(path)


def test_a_gzipped_recording_may_break_off_anywhere(tmp_path: Path) -> None:
    lines = [LINES[0], *(encode(structs.replace(STEP, step=n)) for n in range(4000))]
    packed = gzip.compress(b"".join(lines))
    path = tmp_path / "r.gz"
    path.write_bytes(packed[: len(packed) // 2])
    recording = load_recording(path)
    assert not recording.complete
    steps = [step.step for step in recording.steps]
    assert steps == list(range(len(steps)))
    assert 1000 < len(steps) < 4000


def test_a_recording_without_requests_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(b"".join(LINES[:2]))
    with pytest.raises(InputError, match="has no request with output tokens"):
        load_trace(path)
    path.write_bytes(LINES[0] + b"oops\n")
    for load in (load_trace, load_recording):
        with pytest.raises(InputError, match=rf"{path}: line 2: .*; remove the line, or record"):
            load(path)
    with pytest.raises(InputError, match="nowhere: No such file or directory; give the path of a"):
        load_recording(tmp_path / "nowhere")
