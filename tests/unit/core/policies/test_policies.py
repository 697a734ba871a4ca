"""The baselines' choices, by hand, and the table of policies."""

from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from router.core.kv_blocks import KvBlocks
from router.core.policies.baselines import (
    PerRequest,
    fcfs,
    power_of_two,
    round_robin,
    uniform,
    vllm_score_2026,
)
from router.core.policies.policy_table import ANY, POLICIES, POOL_ONLY, PolicySettings
from router.core.policies.room import Room
from router.core.types import Request, WorkerView
from tests.support.core import pairs, request, requests, views


def choose(name: str, waiting: Sequence[Request], workers: Sequence[WorkerView]) -> str:
    """The workers that a policy gives to the requests, in order of arrival."""
    policy = POLICIES[name].make(PolicySettings())
    done = policy.assign(waiting, workers)
    return "".join(worker for _, worker in sorted(pairs(done, waiting)))


@pytest.mark.parametrize(
    ("name", "workers", "sizes", "expected"),
    [
        ("fcfs", views([9, 0, 0], 2), [5, 5, 5], "aab"),
        ("fcfs", views([0, 0], [0, 5]), [5, 5], "bb"),
        ("jsq", views([0, 9, 5], 2, [2, 1, 1]), [5, 5, 5], "bca"),
        ("jsq", views([0, 0], [1, 9], [0, 5]), [5, 5, 5], "abb"),
        ("least_tokens", views([10, 0, 4], 2, [0, 5, 9]), [5, 5, 5], "bcb"),
        ("least_tokens", views([0, 100], [1, 9]), [5, 5], "ab"),
        ("round_robin", views([9, 0, 0], 2), [5, 5, 5, 5], "abca"),
        ("round_robin", views([9, 0, 0], [1, 0, 2]), [5, 5, 5], "acc"),
    ],
)
def test_choices(name: str, workers: list[WorkerView], sizes: list[int], expected: str) -> None:
    assert choose(name, requests(sizes), workers) == expected


def queued(
    requests: Sequence[int], waiting: Sequence[int], kv_usage: Sequence[float]
) -> list[WorkerView]:
    """Workers with so many requests, some of them queued, and so much of their KV memory in use."""
    plain = views([0] * len(requests), 9, requests)
    rows = zip(plain, waiting, kv_usage, strict=True)
    return [replace(view, waiting=queue, kv_usage=used) for view, queue, used in rows]


@pytest.mark.parametrize(
    ("name", "workers", "expected"),
    [
        # 4 * waiting + running: 14, 17 and 16; a request that is placed adds one.
        ("vllm_score_2025", queued([14, 17, 10], [0, 0, 2], [0, 0, 0]), "aaac"),
        ("vllm_score_2025", queued([3, 3], [0, 0], [0, 0.9]), "abab"),
        # Up to half of the KV memory a queue counts no more than what runs.
        ("vllm_score_2026", queued([14, 17, 10], [0, 0, 9], [0, 0, 0.5]), "cccc"),
        # 14, 17, and 10 + 6 * 2 * 0.4 = 14.8.
        ("vllm_score_2026", queued([14, 17, 10], [0, 0, 2], [0, 0, 0.9]), "acac"),
        ("vllm_score_2026", queued([0, 0, 0], [0, 0, 0], [0, 0, 0]), "abca"),
    ],
)
def test_vllm_scores(name: str, workers: list[WorkerView], expected: str) -> None:
    assert choose(name, requests([5] * len(expected)), workers) == expected


def test_vllm_score_2026_starts_its_scan_one_worker_further_each_time() -> None:
    policy, workers = vllm_score_2026(), views([0, 0, 0], 9)
    rounds = [policy.assign(requests([5]), workers) for _ in range(4)]
    assert "".join(done[0].worker_id for done in rounds) == "abca"
    assert policy.assign(requests([5]), views([0], 9))[0].worker_id == "a"


@pytest.mark.parametrize(
    "name",
    ["fcfs", "jsq", "least_tokens", "round_robin", "vllm_score_2025", "vllm_score_2026"],
)
def test_a_wide_request_goes_where_all_its_parts_fit(name: str) -> None:
    assert choose(name, [request(1, slots=3)], views([0, 50, 90], [1, 2, 4])) == "c"
    assert choose(name, [request(1, slots=9)], views([0, 50, 90], [1, 2, 4])) == "a"


def test_round_robin_goes_on_where_it_stopped() -> None:
    policy, waiting = round_robin(), requests([5, 5])
    rounds = [policy.assign(waiting, views([0, 0, 0], 9)) for _ in range(3)]
    assert "".join(a.worker_id for done in rounds for a in done) == "abcabc"
    shrunk = policy.assign(waiting, views([0, 0], 9))
    assert {a.worker_id for a in shrunk} == {"a", "b"}


def test_random_choices_are_uniform_and_follow_the_seed() -> None:
    waiting, workers = requests([1] * 900), views([0, 0, 0], 900)
    drawn = pairs(uniform(7).assign(waiting, workers), waiting)
    assert drawn == pairs(uniform(7).assign(waiting, workers), waiting)
    assert drawn != pairs(uniform(8).assign(waiting, workers), waiting)
    assert all(240 < count < 360 for count in Counter(worker for _, worker in drawn).values())


def test_power_of_two_takes_the_shorter_of_two_queues() -> None:
    waiting, workers = requests([1] * 40), views([0] * 4, 99, [0, 100, 200, 300])
    drawn = {a.worker_id for a in power_of_two(3).assign(waiting, workers)}
    assert drawn == {"a", "b", "c"}, "the longest queue is never the shorter one"
    alone = power_of_two(3).assign(waiting[:2], views([0], 2))
    assert [a.worker_id for a in alone] == ["a", "a"]


def test_every_row_says_what_it_is() -> None:
    assert set(POLICIES) >= {"bfio", "fcfs", "jsq", "least_tokens"}
    assert all(row.summary and row.dispatch in (ANY, POOL_ONLY) for row in POLICIES.values())
    pool_only = [name for name, row in POLICIES.items() if row.dispatch is POOL_ONLY]
    assert pool_only == ["balance_route", "fcfs", "jffc"]


def test_those_that_fit_nowhere_are_skipped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [*[900] * 2000, 30, *[900] * 2000, 40, *[20] * 2000]
    blocks = KvBlocks.plain(16)
    workers = [
        replace(views([0], 9, [1])[0], admissible_tokens=35),
        replace(views([0], 9, [1])[0], id="b", kv=blocks, admissible_blocks=3),
    ]
    looked: list[int] = []
    find = Room.open_to

    def counted(room: Room, one: Request) -> list[int]:
        looked.append(one.prompt_tokens)
        return find(room, one)

    monkeypatch.setattr(Room, "open_to", counted)
    done = PerRequest(fcfs).assign(requests(sizes), workers)
    assert [worker_id for _, worker_id in done] == ["a", "b"]
    assert looked == [900, 30, 900, 40, 20]


def test_a_room_writes_on_its_own_copy() -> None:
    workers = views([10, 20], [2, -1], [3, 4])
    room = Room(workers)
    assert room.open_to(request(1, slots=2)) == [0]
    room.place(0, request(1, 7, slots=2))
    assert (room.load_tokens, room.requests, room.capacity) == ([24, 20], [5, 4], [0, -1])
    assert room.open_to(request(2)) == []
    assert workers == views([10, 20], [2, -1], [3, 4])
