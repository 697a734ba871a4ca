"""A worker reserved for a request that fits nowhere yet, and what may enter beside it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from router.core.forecast.end_signals import CapSignal, Departure, Signal, SurvivalSignal
from router.core.forecast.forecast import NO_CAP, Running, WorkProfile
from router.core.forecast.look_ahead import LookAhead
from router.core.kv_blocks import KvBlocks
from router.core.policies.baselines import PerRequest, fcfs
from router.core.queue.tier import Tier
from router.core.rounds import assignment
from router.core.rounds.backfill import Backfill, Reservation
from router.core.targets import Targets
from router.core.types import Request, WorkerView
from tests.support.core import pairs, request, requests, views

# Tokens, and steps to the cap (None: no cap is known) of the requests of each worker.
Rows = Sequence[Sequence[tuple[int, int | None]]]
# They do not grow, so that sums are plain.
STILL = WorkProfile(growth=0)


def running(rows: Rows, places: Iterable[int]) -> Running:
    here = [(place, *row) for place in places for row in rows[place]]
    worker, tokens, caps = zip(*here, strict=True) if here else ((), (), ())
    ids = [100 * place + i for place in places for i in range(len(rows[place]))]
    none = np.zeros(len(here), dtype=np.int64)
    return Running(
        np.array(ids, dtype=np.int64),
        np.array(worker, dtype=np.int64),
        np.array(tokens, dtype=np.int64),
        none,
        np.array([NO_CAP if cap is None else cap for cap in caps], dtype=np.int64),
        np.full(len(here), np.nan),
        none,
        none,
    )


def workers(rows: Rows, rooms: Sequence[int], capacity: int = 9) -> list[WorkerView]:
    loads = [sum(tokens for tokens, _ in here) for here in rows]
    plain = views(loads, capacity, [len(here) for here in rows])
    return [
        msgspec.structs.replace(one, admissible_tokens=room)
        for one, room in zip(plain, rooms, strict=True)
    ]


def backfill(
    rows: Rows,
    ran: Sequence[int] | None = None,
    signal: Signal | None = None,
    *,
    now: float = 0.0,
    step_s: float = 1.0,
) -> Backfill:
    """``ran``: ids of those that ran at the first worker when it was reserved."""
    ahead = LookAhead(signal or CapSignal(STILL), STILL)
    made = {} if ran is None else {"a": Reservation(GIANT.id, np.array(ran, dtype=np.int64))}
    return Backfill(lambda places: running(rows, list(places)), ahead, made, set(), now, step_s)


def capped(number: int, tokens: int, cap: int | None, **changes: object) -> Request:
    return replace(request(number, tokens), max_tokens=cap, **changes)  # type: ignore[arg-type]


GIANT = request(7, 500)


def test_the_worker_with_most_room_is_reserved() -> None:
    rows: Rows = [[(400, 900)], [(200, 40), (200, 50)], [(300, 60)]]
    fleet = workers(rows, [150, 100, 200])
    assert backfill(rows).worker_for(GIANT, fleet, fleet) == "c"
    assert backfill(rows).worker_for(GIANT, fleet, fleet[:2]) == "a"


def test_it_stays_reserved_while_others_have_more_room() -> None:
    """Else a request would begin to wait anew for what runs there."""
    rows: Rows = [[(400, 64), (80, 30)], [(400, 64)], [(400, 64)]]
    fleet = workers(rows, [20, 90, 110])
    found = backfill(rows, ran=[0])
    assert found.worker_for(GIANT, fleet, fleet) == "a"
    assert found.worker_for(GIANT, fleet, fleet[1:]) == "c"


def test_another_gets_a_worker_of_its_own_if_there_is_one() -> None:
    rows: Rows = [[(400, 64), (80, 30)], [(400, 64)]]
    fleet = workers(rows, [20, 10])
    found, other = backfill(rows, ran=[0]), request(8, 500)
    assert found.worker_for(other, fleet, fleet) == "b"
    assert found.worker_for(other, fleet, fleet[:1]) == "a"
    assert found.made["a"].ran.tolist() == [0, 1], "what entered beside the first runs there now"


def test_who_stands_aside_takes_nothing_from_whom_a_worker_is_reserved_for() -> None:
    rows: Rows = [[(400, 60), (80, 30)]]
    fleet, found = workers(rows, [20]), backfill(rows, ran=[0])
    impatient = replace(request(8, 500), targets=Targets(5.0))
    assert found.worker_for(impatient, fleet, fleet) is None
    assert found.worker_for(GIANT, fleet, fleet) == "a"
    assert found.made["a"].ran.tolist() == [0]


def test_a_reservation_lasts_while_each_round_renews_it() -> None:
    rows: Rows = [[(400, 64)], [(400, 64)]]
    fleet, found = workers(rows, [100, 90]), backfill(rows)
    assert found.worker_for(GIANT, fleet, fleet) == "a"
    found.begin(found.look_ahead, 1.0, 1.0, lambda _: True)
    assert list(found.made) == ["a"]
    assert found.worker_for(GIANT, fleet, fleet[1:]) == "b"
    found.begin(found.look_ahead, 2.0, 1.0, lambda _: True)
    assert list(found.made) == ["b"]
    found.begin(found.look_ahead, 3.0, 1.0, lambda _: True)
    assert not found.made


def test_a_reservation_ends_with_its_requests_wait() -> None:
    rows: Rows = [[(400, 64)], [(400, 64)]]
    fleet, found = workers(rows, [100, 90]), backfill(rows)
    assert found.worker_for(GIANT, fleet, fleet) == "a"
    found.begin(found.look_ahead, 1.0, 1.0, lambda each: each != GIANT.id)
    assert not found.made


@pytest.mark.parametrize(
    ("target_s", "now", "step_s", "kept"),
    [
        (120.0, 20.0, 1.0, "a"),
        (50.0, 20.0, 1.0, None),
        (50.0, 20.0, 0.1, "a"),
        (50.0, 20.0, 0.0, "a"),
        (50.0, 51.0, 1.0, "a"),
        (None, 20.0, 1.0, "a"),
    ],
)
def test_it_stands_aside_if_it_could_fit_only_after_its_deadline(
    target_s: float | None, now: float, step_s: float, kept: str | None
) -> None:
    """By the steps at which memory is predicted it fits in 79; past its deadline it is late."""
    rows: Rows = [[(400, 60)]]
    giant = replace(GIANT, targets=Targets(target_s))
    found = backfill(rows, now=now, step_s=step_s)
    fleet = workers(rows, [200])
    assert found.worker_for(giant, fleet, fleet) == kept


def test_it_stands_aside_until_it_is_late() -> None:
    rows: Rows = [[(400, 60)]]
    giant, found = replace(GIANT, targets=Targets(50.0)), backfill(rows)
    fleet = workers(rows, [200])
    for now, kept in ((20.0, None), (49.0, None), (50.0, "a")):
        found.begin(found.look_ahead, now, 2.0 if now < 49 else 0.0, lambda _: True)
        aside = found.stands_aside(giant)
        assert (None if aside else found.worker_for(giant, fleet, fleet)) == kept
        assert not found.made or kept == "a" or found.aside
    found.begin(found.look_ahead, 51.0, 0.0, lambda _: False)
    assert not found.aside


def may_enter(
    rows: Rows,
    room: int,
    waiting: Sequence[Request],
    ran: Sequence[int] | None = None,
    signal: Signal | None = None,
    capacity: int = 9,
) -> tuple[list[int], int] | None:
    """Numbers of those that may enter beside the giant, and their memory."""
    ids = range(len(rows[0])) if ran is None else ran
    (worker,) = workers(rows, [room], capacity)
    found = backfill(rows, list(ids), signal).beside(GIANT, (worker, worker), 0, Tier.of(waiting))
    if found is None:
        return None
    return [int(one.id.removeprefix("es-"), 16) for one in found[0]], found[1]


# It fits once the 400 end, in 64 steps; 100 are then left of the 600 in all.
ROWS: Rows = [[(400, 64)]]


def test_what_ends_before_may_use_all_memory_and_the_rest_what_is_left_then() -> None:
    short, long = [capped(i, 50, 30) for i in range(9)], [capped(i, 50, 900) for i in range(9)]
    assert may_enter(ROWS, 200, short) == (list(range(9)), 200)
    assert may_enter(ROWS, 200, long) == (list(range(9)), 100)
    assert may_enter(ROWS, 200, [capped(0, 50, None), capped(1, 120, None)]) == ([0], 100)


def test_memory_counts_in_the_workers_own_units() -> None:
    """Of blocks of 100 tokens 2 are free, and 4 will be; the giant takes 5, and leaves 1."""
    (worker,) = workers(ROWS, [0])
    worker = msgspec.structs.replace(worker, kv=KvBlocks.plain(100), admissible_blocks=2)
    waiting = Tier.of([capped(0, 101, 900), *(capped(i, 50, 900) for i in (1, 2, 3))])
    found = backfill(ROWS, ran=[0]).beside(GIANT, (worker, worker), 0, waiting)
    assert found is not None
    assert ([one.prompt_tokens for one in found[0]], found[1]) == ([50, 50, 50], 1)


def test_those_enter_that_use_most_of_it() -> None:
    short, long = capped(1, 60, 30), [capped(i, 50, 900) for i in (2, 3, 4)]
    assert may_enter(ROWS, 200, [short, *long]) == ([1, 2, 3, 4], 100)
    more = [capped(i, 60, 30) for i in (5, 6, 7)]
    assert may_enter(ROWS, 200, [*long, *more]) == ([5, 6, 7], 200)


def test_what_has_entered_beside_counts_until_it_ends() -> None:
    rows: Rows = [[(400, 64), (80, None)]]
    assert may_enter(rows, 120, [capped(1, 15, None), capped(2, 25, None)], ran=[0]) == ([1], 20)
    # 100 of it let the giant in no later than if nothing had entered, but leave nothing.
    assert may_enter([[(400, 64), (100, None)]], 100, [capped(1, 15, None)], ran=[0]) is None


@pytest.mark.parametrize(
    ("rows", "room", "capacity", "why"),
    [
        ([[(400, None)]], 200, 9, "no length is known"),
        ([[(300, 64)]], 150, 9, "it fits an idle worker only"),
        (ROWS, 0, 9, "no memory is free"),
        (ROWS, 200, 1, "the last slot is the giant's"),
        ([[(400, 30_000)]], 200, 9, "it is too far ahead"),
    ],
)
def test_nothing_enters(rows: Rows, room: int, capacity: int, why: str) -> None:
    assert may_enter(rows, room, [capped(1, 10, 5)], capacity=capacity) is None, why


def test_nothing_enters_once_the_giant_would_fit_if_nothing_had_entered() -> None:
    assert may_enter([[(100, 64), (200, 30)]], 400, [capped(1, 10, 5)], ran=[0]) is None


def test_nothing_that_is_left_is_small_enough() -> None:
    assert may_enter(ROWS, 200, [capped(1, 150, None)]) is None
    assert may_enter(ROWS, 200, []) is None


def test_learned_lengths_tell_what_ends_before() -> None:
    """Prompts of a thousand tokens have long outputs, those of ten have short ones."""
    signal = SurvivalSignal(STILL)
    for _ in range(4000):
        signal.ended(Departure(1, 10, 5, True, NO_CAP))
        signal.ended(Departure(1, 900, 2000, True, NO_CAP))
    signal.advance(256)
    signal.observe(running([[]], [0]))
    rows: Rows = [[(900, None)]]
    giant, room = request(7, 1000), 500
    (worker,) = workers(rows, [room])
    waiting = Tier.of([*requests([10] * 9), request(9, 900)])
    found = backfill(rows, [0], signal).beside(giant, (worker, worker), 0, waiting)
    assert found is not None
    assert [one.prompt_tokens for one in found[0]] == [10] * 9
    assert found[1] > 9 * 10


# in a round


def entered(
    tiers: Sequence[Sequence[Request]], rows: Rows, rooms: Sequence[int], late_since: float = -1.0
) -> list[tuple[int, str]]:
    waiting = [one for tier in tiers for one in tier]
    fleet = workers(rows, rooms, capacity=3)
    done = assignment.assign(
        PerRequest(fcfs), tiers, fleet, late_since=late_since, backfill=backfill(rows)
    )
    return pairs(done, waiting)


def test_short_requests_enter_beside_a_late_one_up_to_its_slot() -> None:
    shorts = [capped(i, 50, 30) for i in range(4)]
    rows: Rows = [[(400, 64)], [(100, 500)]]
    assert entered([[GIANT, *shorts]], rows, [200, 40], 0.0) == [(1, "a"), (2, "a")]


def test_the_next_tiers_enter_beside_one_that_is_more_urgent() -> None:
    shorts = [capped(i, 50, 30) for i in range(4)]
    rows: Rows = [[(400, 64)], [(100, 500)]]
    assert entered([[GIANT], shorts[:1], shorts[1:]], rows, [200, 60]) == [
        (1, "b"),
        (2, "a"),
        (3, "a"),
    ]


def test_no_worker_is_kept_for_one_that_stands_aside() -> None:
    giant = replace(GIANT, targets=Targets(50.0))
    other = capped(1, 150, None)
    assert entered([[giant, other]], [[(400, 64)]], [200], 0.0) == [(1, "a")]
    assert entered([[GIANT, other]], [[(400, 64)]], [200], 0.0) == []


def test_another_may_have_the_worker_that_one_which_stands_aside_leaves() -> None:
    rows: Rows = [[(400, 64)]]
    impatient = replace(GIANT, targets=Targets(50.0))
    other, short = request(8, 500), capped(1, 150, None)
    found, fleet = backfill(rows), workers(rows, [200], capacity=3)
    found.aside.add(impatient.id)
    tiers = [[impatient, other], [short]]
    done = assignment.assign(PerRequest(fcfs), tiers, fleet, late_since=-1.0, backfill=found)
    assert not done
    assert found.made["a"].request_id == other.id


def test_those_that_may_not_use_the_reserved_worker_stay_outside() -> None:
    shorts = Tier.of([capped(i, 50, 30) for i in range(2)], lacks=frozenset("a"))
    assert entered([Tier.of([GIANT]), shorts], [[(400, 64)], [(9, 9)]], [200, 60]) == [(1, "b")]


def test_two_late_ones_have_a_worker_each() -> None:
    giants = [GIANT, request(8, 450)]
    rows: Rows = [[(400, 64)], [(400, 80)]]
    shorts = [capped(i, 50, 30) for i in range(6)]
    done = entered([[giants[0]], [giants[1]], shorts], rows, [200, 200])
    assert sorted(worker for _, worker in done) == ["a", "a", "b", "b"]


def test_a_reservation_ends_once_an_older_request_takes_its_worker() -> None:
    rows: Rows = [[(400, 64)], [(400, 90)]]
    found, fleet = backfill(rows, ran=[0]), workers(rows, [200, 100], capacity=3)
    short = capped(2, 50, 30)
    done = assignment.assign(
        PerRequest(fcfs), [[GIANT, short]], fleet, late_since=0.0, backfill=found
    )
    assert pairs(done, [GIANT, short]) == [(1, "b")]
    assert list(found.made) == ["a"]
    older = [request(1, 150)]
    assignment.assign(PerRequest(fcfs), [older, [GIANT]], fleet[:1], backfill=found)
    assert not found.made
