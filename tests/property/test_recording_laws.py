"""What is recorded is read back, whatever it is and wherever it breaks off."""

from collections import defaultdict
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from router.recording.lines import (
    DroppedLine,
    Header,
    LineReader,
    RecordedGroup,
    RecordedWorker,
    RequestLine,
    StepLine,
    WorkerLine,
    encode,
    read,
)

WORKERS = 3
counts = st.integers(0, 10**12)
seconds = st.floats(-1e9, 1e9, allow_nan=False)
places = st.lists(st.none() | counts, min_size=WORKERS, max_size=WORKERS)
watts = st.lists(st.none() | seconds, min_size=WORKERS, max_size=WORKERS)
groups = st.sampled_from(["g", "default/prefill", "a\nb"])
steps = st.builds(
    StepLine,
    *(counts, groups, seconds, seconds, places, places, counts, counts, st.booleans()),
    *(st.none() | seconds, st.none() | seconds, st.none() | watts, counts),
)
requests = st.builds(
    RequestLine,
    *(counts, groups, seconds, st.none() | seconds, st.none() | seconds, seconds),
    *(st.none() | st.text(), counts, counts, st.text(), st.integers(1, 9)),
    st.just(UNSET) | st.lists(counts),
)
# a to c are in the header, d and e come later.
workers = st.builds(
    WorkerLine, st.sampled_from("abcde"), groups, st.none() | counts, st.none() | counts
)
Told = StepLine | RequestLine | WorkerLine | DroppedLine


def widened(told: Iterable[Told]) -> list[Told]:
    """The same, in which steps list those who have come."""
    came: defaultdict[str, set[str]] = defaultdict(set)
    lines: list[Told] = []
    for line in told:
        if isinstance(line, WorkerLine):
            came[line.group] |= {line.worker} - set("abc")
        elif isinstance(line, StepLine):
            later: list[int | None] = [7] * len(came[line.group])
            loads, running = line.loads + later, line.running + later
            power_w = None if line.power_w is None else [*line.power_w, *later]
            line = replace(line, loads=loads, running=running, power_w=power_w)
        lines.append(line)
    return lines


def narrowed(steps: Iterable[StepLine]) -> list[list[int | None]]:
    """Their loads without the places of those who come later."""
    return [[*step.loads[:WORKERS], *filter(None, step.loads[WORKERS:])] for step in steps]


lines = st.lists(steps | requests | workers | st.builds(DroppedLine, counts), max_size=6).map(
    widened
)
ids = [RecordedWorker(name) for name in ("a", "b", "c")]
headers = st.builds(
    Header,
    evenstep=st.text(),
    source=st.sampled_from(["serve", "observe"]),
    started_unix_s=seconds,
    policy=st.none() | st.text(),
    dispatch=st.none() | st.text(),
    power_levels=st.none() | st.tuples(seconds, seconds, seconds),
    groups=st.just({g: RecordedGroup(True, tuple(ids)) for g in ("g", "default/prefill", "a\nb")}),
)


@given(headers, lines)
def test_what_is_written_is_read(header: Header, told: list[Told]) -> None:
    written = b"".join(map(encode, (header, *told)))
    reader = LineReader("test")
    assert list(reader.read(written.splitlines(keepends=True))) == [header, *told]
    assert reader.complete


@given(headers, lines, st.integers(0, 10**6))
def test_what_breaks_off_is_read_up_to_there(
    header: Header,
    told: list[Told],
    cut: int,
) -> None:
    first, rest = encode(header), b"".join(map(encode, told))
    kept = rest[: cut % (len(rest) + 1)]
    recording = read((first + kept).splitlines(keepends=True), "test")
    whole = read((first + rest).splitlines(keepends=True), "test")
    assert narrowed(recording.steps) == narrowed(whole.steps[: len(recording.steps)])
    assert recording.requests == whole.requests[: len(recording.requests)]
    cut_off = bool(kept) and not kept.endswith(b"\n")
    assert recording.complete or cut_off
    assert recording.complete == (not cut_off or kept + b"\n" in [rest[: len(kept) + 1]])
