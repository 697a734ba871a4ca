"""Laws of the replay's arithmetic and of its event reader."""

import json
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.emulator.prompt_content import Content
from loadgen.replay.stream import CompletionStream
from loadgen.replay.workload import Workload
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, TraceRequest
from loadgen.traces.trace_files import BLOCK_TOKENS

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


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5 * BLOCK_TOKENS)), min_size=1, max_size=8)
)
def test_prompts_share_what_the_trace_says(asked: list[tuple[int, int]]) -> None:
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for kind, prompt_tokens in asked:
        # Prompts of a kind begin alike: its number in all blocks but those in a second form.
        blocks = -(-prompt_tokens // BLOCK_TOKENS)
        content = [kind % 2 if n < 2 else kind for n in range(blocks)]
        chain = [tuple(content[: n + 1]) for n in range(blocks)]
        rows.append(
            TraceRequest(
                prompt_tokens, 1, blocks=tuple(ids.setdefault(part, len(ids)) for part in chain)
            )
        )
    work = Workload(rows, Arrivals("closed", 1), "m", 1, 3)
    prompts = [json.loads(body)["prompt"] for body in work.bodies()]
    assert [len(prompt) for prompt in prompts] == [row.prompt_tokens for row in rows]
    for (one, first), (other, second) in product(zip(rows, prompts, strict=True), repeat=2):
        alike = sum(a == b for a, b in zip(one.blocks, other.blocks, strict=False))
        chains = [Content(each).chain(BLOCK_TOKENS, "m") for each in (first, second)]
        found = sum(a == b for a, b in zip(*chains, strict=False))
        assert found == min(alike, *map(len, chains))


def test_prompts_without_prefixes_share_none() -> None:
    rows = [TraceRequest(600, 1)] * 50
    work = Workload(rows, Arrivals("closed", 1), "m", 1, 3)
    prompts = [json.loads(body)["prompt"] for body in work.bodies()]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 50
