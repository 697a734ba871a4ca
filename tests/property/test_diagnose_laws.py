"""Any recording is diagnosed, however odd; the order of the workers does not matter."""

import json
from dataclasses import asdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.diagnose.analysis.findings import Findings, findings
from loadgen.diagnose.analysis.verdict import Word
from loadgen.diagnose.analysis.window import Span, window_of
from loadgen.diagnose.diagnosis import diagnose_window, report
from loadgen.diagnose.words import answers
from router.recording.lines import Recording, StepLine
from tests.support.recorded import header, request, step

WORKERS = 3
TOKENS = st.one_of(st.none(), st.integers(0, 10_000))
PER_WORKER = [TOKENS] * WORKERS


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepLine, ...]:
    """A few steps, perhaps over and over."""
    kinds = draw(
        st.lists(
            st.tuples(
                st.tuples(*PER_WORKER),
                st.sampled_from([0.0, 0.001, 0.02, 3.0]),
                st.booleans(),
                st.integers(0, 3),
                st.integers(0, 40),
                st.sampled_from([None, 0.0, 0.01]),
                st.sampled_from([None, 120.0]),
            ),
            max_size=4,
        )
    )
    many = kinds * draw(st.sampled_from([1, 80]))
    return tuple(
        step(
            number,
            loads,
            step_s,
            time_s=0.02 * number,
            together=together,
            preemptions=preemptions,
            pool=pool,
            queued=pool // 2,
            waited_s=waited_s,
            power_w=[watts] * WORKERS,
        )
        for number, (loads, step_s, together, preemptions, pool, waited_s, watts) in enumerate(
            many, start=1
        )
    )


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    head = header(
        WORKERS,
        draw(st.sampled_from([None, 4, 100])),
        kv_tokens=draw(st.sampled_from([None, 1, 20_000])),
        dispatch=draw(st.sampled_from([None, "pool", "instant"])),
        power_levels=draw(st.sampled_from([None, (100.0, 200.0, 400.0)])),
    )
    ends = draw(st.lists(st.tuples(st.floats(0, 6), st.integers(0, 50)), max_size=5))
    repeated = ends * draw(st.sampled_from([1, 30]))
    requests = tuple(
        request(number, ended_s, output=output, outcome="completed" if output % 7 else "failed")
        for number, (ended_s, output) in enumerate(repeated)
    )
    return Recording(head, draw(steps()), requests)


@settings(max_examples=60, deadline=None)
@given(recordings())
def test_any_recording_has_a_verdict(whole: Recording) -> None:
    diagnosis = diagnose_window(window_of(whole, Span()), 0.3, ["fcfs"])
    told = json.loads(json.dumps(report(diagnosis), allow_nan=False))

    assert Word(told["verdict"]) is diagnosis.verdict.word
    assert all(diagnosis.verdict.reasons)
    assert (diagnosis.prospects is None) == (told["policies"] == [])
    assert all(answer for _, answer in answers(diagnosis))


@given(recordings())
def test_shares_are_shares(whole: Recording) -> None:
    found = findings(window_of(whole, Span()))
    shares = (
        found.barrier.together_share,
        found.barrier.stepping_share,
        found.barrier.attention_share,
        found.waiting.even_share,
        found.load.waiting_share,
        found.memory.held_share,
    )

    assert [share for share in shares if share is not None and not 0 <= share <= 1 + 1e-9] == []
    assert found.waiting.imbalance_tokens >= 0


@given(recordings(), st.permutations(range(WORKERS)))
def test_the_order_of_the_workers_does_not_matter(whole: Recording, order: list[int]) -> None:
    def turned(one: StepLine) -> StepLine:
        return msgspec.structs.replace(
            one,
            loads=[one.loads[rank] for rank in order],
            running=[one.running[rank] for rank in order],
        )

    other = Recording(whole.header, tuple(map(turned, whole.steps)), whole.requests)

    def of(recording: Recording) -> dict[str, object]:
        found: Findings = findings(window_of(recording, Span()))
        return asdict(found)["waiting"]  # type: ignore[no-any-return]

    assert of(other) == pytest.approx(of(whole))
