"""Speculative decoding in a real vLLM: what the router knows, beside what vLLM counts."""

import json
from collections.abc import Iterator

import pytest

from router.core.state.feed import Feed
from router.core.types import Snapshot
from tests.support.engine import Installation
from tests.support.engine_watch import Watched, counted, told, watching

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCKS = 24
MAX_TOKENS = 150
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
FLAGS = (
    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
    *("--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-seqs", "8"),
    *("--max-model-len", "512", "--max-num-batched-tokens", "128", "--enable-prefix-caching"),
    *("--speculative-config", json.dumps(DRAFTS)),
)


@pytest.fixture(scope="module")
def watched(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    with watching(engine_installation, tmp_path_factory.mktemp("drafts"), *FLAGS) as watched:
        yield watched


def made(snapshots: list[Snapshot]) -> tuple[list[int], Feed]:
    """Output tokens of each step, as a router knows them, and its last state."""
    feed, made = Feed(), {}
    steps, before = [], 0
    for snapshot in snapshots:
        feed.apply(snapshot, 0.0)
        for engine_id, part in feed._parts.items():
            made[engine_id] = feed.rows.generated_tokens(part.place)
        for _, departure in feed.departures:
            if departure.completed:  # one that is preempted makes nothing in that step
                made[departure.engine_id] = departure.generated_tokens
        feed.departures.clear()
        total = sum(made.values())
        steps += [total - before] if total > before else []
        before = total
    return steps, feed


def test_the_router_knows_what_each_step_made(watched: Watched) -> None:
    """Under memory pressure: requests are preempted and computed anew."""
    done = watched.complete(0, range(1, 13), MAX_TOKENS, temperature=0)
    assert done == 12 * MAX_TOKENS
    watched.rest()

    snapshots, counts = watched.stream.snapshots, watched.counts
    first = next(i for i, one in enumerate(snapshots) if one.kind != "full" and one.step_s == 0)
    steps, feed = made(snapshots[first:])
    assert steps == [one["generated"] for one in counts if one["generated"]]
    assert sum(steps) == 12 * MAX_TOKENS
    assert sum(one["kept"] for one in counts) > 0.2 * sum(steps)
    assert sum(one.kind == "growth" for one in snapshots) > 0.5 * len(steps)
    assert (feed.load_tokens, feed.running, feed.gaps) == (0, 0, 0)
    assert snapshots[-1].preemptions_total > 0
    assert [moment for moment, *_ in told(snapshots)] == [
        moment for moment, _ in counted(counts, BLOCKS)
    ]
