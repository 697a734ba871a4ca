from __future__ import annotations

import msgspec
import pytest

from router.core.errors import InputError
from router.core.state.closed_step import ClosedStep, StepPart
from router.recording.lines import (
    DroppedLine,
    Header,
    Line,
    RecordedGroup,
    RecordedWorker,
    RequestLine,
    StepLine,
    WorkerLine,
    encode,
    read,
    step_line,
)

HEADER = Header(
    evenstep="0.1.0",
    source="serve",
    started_unix_s=1e9,
    policy="bfio",
    dispatch="pool",
    groups={"g": RecordedGroup(True, (RecordedWorker("a", 0), RecordedWorker("b", 1)))},
)
STEP = StepLine(1, "g", 0.5, 0.03, [10, None], [2, None])
REQUEST = RequestLine(0, "g", 0.1, 0.2, 0.3, 0.4, "a", 5, 7, "completed")


def recorded(*lines: Line) -> list[bytes]:
    return [encode(line) for line in lines]


def fault(lines: list[bytes]) -> str:
    with pytest.raises(InputError) as refused:
        read(lines, "file")
    return str(refused.value)


def test_the_keys_of_the_lines_are_the_documented_ones() -> None:
    assert encode(REQUEST) == (
        b'{"request":0,"group":"g","arrival_s":0.1,"dispatched_s":0.2,"first_token_s":0.3,'
        b'"ended_s":0.4,"worker":"a","prompt_tokens":5,"output_tokens":7,"outcome":"completed",'
        b'"slots":1}\n'
    )
    keys = "step group time_s step_s loads running pool queued together waiting_s"
    others = "waited_s power_w preemptions prompts tokens"
    assert " ".join(msgspec.json.decode(encode(STEP))) == f"{keys} {others}"
    assert encode(HEADER).startswith(b'{"recording":1,"evenstep":"0.1.0","source":"serve",')


def test_blocks_are_written_where_they_are_known() -> None:
    line = msgspec.structs.replace(REQUEST, blocks=[3, 2, 9, 1])
    assert encode(line).endswith(b'"slots":1,"blocks":[3,2,9,1]}\n')
    (read_again,) = read(recorded(HEADER, line), "file").requests
    assert list(read_again.block_numbers) == [3, 4, 9]
    assert list(REQUEST.block_numbers) == []


def test_a_prompt_has_no_more_blocks_than_tokens() -> None:
    broken = msgspec.structs.replace(REQUEST, blocks=[3, 10**12, 9])
    assert list(broken.block_numbers) == [3, 4, 5, 6, 7]


def test_a_worker_is_known_by_what_it_told_last() -> None:
    told = WorkerLine("b", "g", 64, 1000), WorkerLine("b", "g", 32, 500, block_tokens=64)
    workers = read(recorded(HEADER, told[0], STEP, told[1]), "file").header.groups["g"].workers
    assert workers == (RecordedWorker("a", 0), RecordedWorker("b", 1, 32, 500, 64))


def test_a_recording_may_break_off_anywhere_behind_its_header() -> None:
    header, step, request = recorded(HEADER, STEP, REQUEST)
    for cut in range(1, len(request) - 1):
        recording = read([header, step, request[:cut]], "file")
        assert (recording.steps, recording.requests) == ((STEP,), ())
        assert not recording.complete
    assert read([header, step, request[:-1]], "file").requests == (REQUEST,)
    assert read([header, step, request], "file").complete


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "file: is empty; give a file that --record wrote"),
        ([b"what\n"], "file: line 1: JSON is malformed"),
        ([b"\xff\n"], "file: line 1: "),
        (recorded(STEP), "file: line 1: is not the header of a recording; give a file that"),
        ([b'{"recording":2}\n'], "file: line 1: schema 2 of recordings, while this evenstep reads"),
        ([b'{"recording":1}\n'], "file: line 1: Object missing required field `evenstep`"),
        ([encode(HEADER)[:-9]], "file: line 1: "),
        (
            [*recorded(HEADER), b'{"step":1}\n', *recorded(STEP)],
            "file: line 2: Object missing required field `group`; remove the line, or record anew",
        ),
        (
            [*recorded(HEADER), b"{}\n"],
            "file: line 2: is not a step, a request, a worker or a change of policy",
        ),
        ([*recorded(HEADER), b"\n"], "file: line 2: "),
        (
            recorded(HEADER, msgspec.structs.replace(STEP, group="h")),
            "file: line 2: group 'h' is not in the header",
        ),
        (
            recorded(HEADER, msgspec.structs.replace(STEP, running=[1])),
            "file: line 2: 1 values for 2 workers",
        ),
        (
            recorded(HEADER, msgspec.structs.replace(STEP, loads=[-1, None])),
            "file: line 2: Expected `int` >= 0 - at `$.loads[0]`; remove the line",
        ),
        (
            recorded(HEADER, msgspec.structs.replace(REQUEST, output_tokens=10**13)),
            "file: line 2: Expected `int` <= 1000000000000 - at `$.output_tokens`; remove",
        ),
        (
            recorded(HEADER, msgspec.structs.replace(REQUEST, slots=0)),
            "file: line 2: Expected `int` >= 1 - at `$.slots`; remove the line",
        ),
    ],
)
def test_what_is_no_recording_is_refused_with_the_line_and_the_mend(
    lines: list[bytes], message: str
) -> None:
    assert message in fault(lines)


def test_keys_of_later_versions_are_passed_over() -> None:
    later = encode(REQUEST).replace(b"}\n", b',"later":[1]}\n')
    assert read([*recorded(HEADER), later], "file").requests == (REQUEST,)


def test_lines_that_are_missing_are_counted() -> None:
    recording = read(recorded(HEADER, DroppedLine(3), STEP, DroppedLine(2)), "file")
    assert (recording.steps, recording.dropped) == ((STEP,), 5)


def test_imbalance_counts_idle_workers_and_leaves_out_the_dead() -> None:
    loads: list[list[int | None]] = [[10, 0, None], [None], []]
    steps = [msgspec.structs.replace(STEP, loads=each) for each in loads]
    assert [step.imbalance_tokens for step in steps] == [10, 0, 0]


def test_a_step_lists_its_workers_in_the_order_of_the_header() -> None:
    parts = {"b": StepPart(7, 1, 2, 300.0, 512), "c": StepPart(5, 3, 1, None)}
    closed = ClosedStep(4, 0.25, parts, True, 0.5, 1, None, 9)
    line = step_line("g", ("a", "b", "c"), closed, 1.23456789, pool=6)
    assert line == StepLine(
        step=4,
        group="g",
        time_s=1.234568,
        step_s=0.25,
        loads=[None, 7, 5],
        running=[None, 1, 3],
        pool=6,
        queued=3,
        together=True,
        waiting_s=0.5,
        power_w=[None, 300.0, None],
        preemptions=1,
        prompts=[None, 512, 0],
        tokens=9,
    )
    unmetered = ClosedStep(4, 0.25, {"c": parts["c"]}, True, None, 0)
    assert step_line("g", ("a", "c"), unmetered, 1.0, pool=0).power_w is None


def test_who_comes_later_is_listed_after_the_others() -> None:
    wide = msgspec.structs.replace(
        STEP, loads=[1, 2, 3], running=[1, 1, 1], power_w=[1.0, 2.0, 3.0]
    )
    narrow = msgspec.structs.replace(STEP, loads=[1, 2], running=[1, 1], power_w=[1.0, 2.0])
    unmetered = msgspec.structs.replace(narrow, power_w=None, prompts=[0, 5])
    other = msgspec.structs.replace(STEP, group="h", loads=[5], running=[1], power_w=None)
    came = WorkerLine("c", "g", 8, None, 2), WorkerLine("x", "h", None, None, None, False)

    recording = read(recorded(HEADER, narrow, unmetered, came[0], wide, came[1], other), "file")

    assert recording.header.groups["g"].workers[2] == RecordedWorker("c", 2, 8)
    assert recording.header.groups["h"] == RecordedGroup(False, (RecordedWorker("x"),))
    first, second, third, last = recording.steps
    assert (first.loads, first.running, first.power_w) == (
        [1, 2, None],
        [1, 1, None],
        [1.0, 2.0, None],
    )
    assert (second.loads, second.power_w) == ([1, 2, None], None)
    assert (first.prompts, second.prompts) == (None, [0, 5, None])
    assert (third, last) == (wide, other)
    assert "2 values for 3 workers" in fault(recorded(HEADER, came[0], narrow))
