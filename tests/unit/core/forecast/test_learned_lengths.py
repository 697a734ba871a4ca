"""What is learned of output lengths where requests stop running and go on."""

from collections.abc import Callable

import pytest

from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    Event,
    FeedStale,
    Progressed,
    SnapshotReceived,
    WorkerUp,
)
from router.core.forecast.end_signals import Departure, SurvivalSignal
from router.core.forecast.look_ahead import LookAhead
from router.core.state.cluster import Cluster
from router.core.types import Outcome, Snapshot, WorkerSpec
from tests.support.core import part, request, running, snapshot, token
from tests.support.lookahead import running as nobody

OUTPUT = 100
OURS, THEIRS = part(1), "cmpl-somebody-elses"


def grown(sequence: int, steps: int) -> list[Snapshot]:
    """So many steps in which all that runs grows by a token."""
    return [snapshot("delta", sequence + each) for each in range(steps)]


def told(*messages: Snapshot) -> list[Event]:
    return [SnapshotReceived("a", message, 0.0) for message in messages]


def seen(engine_id: str) -> list[Snapshot]:
    """A request from its first token on, until it has ninety-one."""
    return [
        snapshot("full", 1),
        snapshot("delta", 2, running(engine_id, 100, 1)),
        *grown(3, 90),
    ]


def undisturbed(engine_id: str) -> list[Event]:
    return told(*seen(engine_id), *grown(93, 8), snapshot("delta", 101, finished=(engine_id,)))


def preempted(engine_id: str) -> list[Event]:
    """It loses its slot, computes anew what it had in two chunks, and gets its last tokens."""
    return told(
        *seen(engine_id),
        snapshot("delta", 93, preempted=(engine_id,), waiting=1),
        snapshot("delta", 94, waiting=1),
        snapshot("delta", 95, running(engine_id, 100, 91, 80)),
        snapshot("delta", 96, running(engine_id, 100, 92)),
        *grown(97, 7),
        snapshot("delta", 104, finished=(engine_id,)),
    )


def preempted_briefly(engine_id: str) -> list[Event]:
    """As before, but computed anew in one chunk, which yields a token too."""
    return told(
        *seen(engine_id),
        snapshot("delta", 93, preempted=(engine_id,), waiting=1),
        snapshot("delta", 94, running(engine_id, 100, 92)),
        *grown(95, 7),
        snapshot("delta", 102, finished=(engine_id,)),
    )


def silent(engine_id: str) -> list[Event]:
    """Snapshots stop for some tokens; of these nothing is learned."""
    return [
        *told(*seen(engine_id)),
        FeedStale("a"),
        *told(snapshot("full", 95, running(engine_id, 100, 94))),
        *told(*grown(96, 5), snapshot("delta", 101, finished=(engine_id,))),
    ]


def answered(engine_id: str) -> list[Event]:
    """Snapshots stop for good: its stream tells the rest."""
    end = Ended(token(1), Outcome.COMPLETED)
    return [*told(*seen(engine_id)), FeedStale("a"), Progressed(token(1), OUTPUT), end]


SEEN = [(undisturbed, OUTPUT), (preempted, OUTPUT), (preempted_briefly, OUTPUT), (silent, 97)]


def departures(story: list[Event]) -> list[Departure]:
    cluster = Cluster([WorkerSpec("a", "", slots=8)])
    for event in (WorkerUp("a"), Arrived(request(1)), Dispatched(token(1), "a"), *story):
        cluster.apply(event)
    return cluster.groups["default"].departures


STORIES = [
    *((story(engine_id), tokens) for engine_id in (OURS, THEIRS) for story, tokens in SEEN),
    (answered(OURS), OUTPUT),
]


@pytest.mark.parametrize(("story", "tokens"), STORIES)
def test_a_token_is_learned_once(story: list[Event], tokens: int) -> None:
    look_ahead = LookAhead(signal := SurvivalSignal(memory_steps=1e12, borrowed=1e-9))
    for _ in range(400):
        for departure in departures(story):
            look_ahead.ended(departure)
    # A delta that calls a request preempted does not say whether it had a token in that step.
    assert look_ahead._lengths.mean_tokens == pytest.approx(tokens, abs=3)
    look_ahead.advance(1000)
    signal.observe(nobody([]))
    survival = signal.survival(100)
    assert survival[OUTPUT - 1] == pytest.approx(1, abs=0.05)
    assert survival[OUTPUT] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("story", "parts"),
    [
        (undisturbed, [(0, 100)]),
        # What came in the step of a preemption is not known, and is in both.
        (preempted, [(0, 92), (91, 100)]),
        (preempted_briefly, [(0, 92), (91, 100)]),
        (silent, [(0, 91), (94, 100)]),
        (answered, [(0, 91), (91, 100)]),
    ],
)
def test_each_token_is_in_one_departure(
    story: Callable[[str], list[Event]], parts: list[tuple[int, int]]
) -> None:
    told = [(each.from_tokens, each.generated_tokens) for each in departures(story(OURS))]
    assert told == parts
