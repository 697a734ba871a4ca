"""What waits for several groups: which of it each one chooses from."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from router.core.queue.pool import Pool
from router.core.rounds.barriers import Barrier
from router.core.rounds.sharing import MOST_ALLOTTED, Kept, Sharing
from router.core.types import WorkerView
from tests.support.core import request, token


@dataclass
class Group:
    """One worker with slots, and its own decider."""

    name: str
    slots: int
    version: int | None = 1
    made: int = 0

    @property
    def group(self) -> Any:
        return self

    @property
    def capacity(self) -> int:
        return self.slots

    @property
    def barrier(self) -> Barrier:
        self.made += 1
        view = WorkerView(
            id=self.name, load_tokens=0, requests=0, capacity=self.slots, slots=8, service_rate=1.0
        )
        return Barrier.of([view], together=True).now(None, None)


class Scene:
    def __init__(self, *slots: int) -> None:
        self.groups: list[Any] = [
            Group(name, each) for name, each in zip("abc", slots, strict=False)
        ]
        self.pool, self.sharing = Pool(1000, 5.0), Sharing(self.groups)

    def come(self, *numbers: int) -> None:
        for number in numbers:
            self.pool.add(request(number, 10))
            self.sharing.came(request(number, 10))

    def send(self, group: Any, number: int) -> None:
        self.pool.remove(token(number))
        group.slots -= 1
        group.version += 1
        self.sharing.settle(group)

    def take(self, group: Any) -> set[str] | None:
        share = self.sharing.take(group, self.pool, crowded=self.sharing.crowded(self.pool))
        return None if share is None else set(share)

    @property
    def choosers(self) -> Set[str]:
        return self.sharing.choosers(self.pool)

    @property
    def made(self) -> int:
        return sum(group.made for group in self.groups)


def test_all_are_allotted_at_once_and_what_comes_later_beside_them() -> None:
    scene = Scene(3, 3)
    a, b = scene.groups
    scene.come(1, 2)
    assert "a" in scene.choosers
    assert scene.take(a) == {token(1)}
    scene.send(a, 1)
    scene.come(3)
    assert scene.take(b) == {token(2)}
    assert scene.take(a) == {token(3)}
    assert scene.made == 2, "each group was looked at once"


def test_a_group_that_changes_after_its_round_has_another_share() -> None:
    scene = Scene(1, 1)
    a, b = scene.groups
    scene.come(1)
    assert scene.take(a) == {token(1)}, "it does not send it"
    a.slots, a.version = 0, 2
    assert scene.take(b) == set(), "b has its round by what was allotted before"
    b.version = 2
    assert scene.take(b) == {token(1)}


def test_groups_that_change_without_notice_have_another_share_each_time() -> None:
    scene = Scene(1, 1)
    a, _ = scene.groups
    a.version = None
    scene.come(1)
    assert scene.take(a) == scene.take(a) == {token(1)}
    assert a.made == 2


def test_what_has_left_is_no_reason_for_a_round() -> None:
    scene = Scene(1, 1)
    scene.come(1)
    (chosen,) = scene.choosers
    scene.pool.remove(token(1))
    assert scene.choosers == set()
    assert scene.take(scene.groups["ab".index(chosen)]) == set()


def test_forgotten_shares_are_made_anew() -> None:
    scene = Scene(1, 1)
    a, b = scene.groups
    scene.come(1)
    assert scene.take(a) == {token(1)}
    a.slots = 0
    scene.sharing.forget()
    assert scene.take(b) == {token(1)}


def test_requests_that_entered_unseen_count_too() -> None:
    scene = Scene(1, 1)
    scene.take(scene.groups[0])
    scene.pool.add(request(1, 10))
    assert any(scene.take(group) for group in scene.groups)


def test_with_fewer_slots_than_requests_or_many_requests_each_chooses_from_all() -> None:
    few, many, alone = Scene(1, 1), Scene(1000, 1000), Scene(5)
    few.come(1, 2, 3)
    many.come(*range(MOST_ALLOTTED + 1))
    alone.come(1)
    for scene in (few, many, alone):
        assert scene.choosers == {group.name for group in scene.groups}
        assert [scene.take(group) for group in scene.groups] == [None] * len(scene.groups)
    assert (few.choosers, alone.choosers) == ({"a", "b"}, {"a"})
    assert many.choosers == set(), "one more of very many is no matter before a change"
    many.groups[0].version = 2
    assert many.choosers == {"a"}
    many.groups[1].version = None
    assert many.choosers == {"a", "b"}
    assert few.sharing.crowded(few.pool)
    assert not many.sharing.crowded(many.pool)
    few.groups[0].slots = 0
    assert few.choosers == {"b"}


def test_a_newcomer_gets_a_slot_that_has_become_free() -> None:
    scene = Scene(1, 1)
    a, b = scene.groups
    scene.come(1, 2)
    for group, number in ((a, 1), (b, 2)):
        assert scene.take(group) == {token(number)}
        scene.send(group, number)
    b.slots, b.version = 1, 3
    scene.come(3)
    assert scene.choosers == {"b"}


def test_a_group_that_fills_leaves_its_share_to_others() -> None:
    scene = Scene(1, 1)
    a, b = scene.groups
    scene.come(1)
    assert scene.choosers == {"a"}
    a.slots, a.version = 0, 2
    assert scene.choosers == {"b"}
    assert scene.take(b) == {token(1)}


def test_requests_that_leave_before_they_are_sent_take_no_slot() -> None:
    scene = Scene(1, 1)
    scene.come(1, 2)
    assert scene.choosers == {"a", "b"}
    for number in (1, 2):
        scene.pool.remove(token(number))
    scene.come(3)
    assert len(scene.choosers) == 1


def test_many_requests_that_came_since_a_round_from_few_are_looked_at() -> None:
    alone, two = Scene(1000), Scene(1000, 1000)
    for scene in (alone, two):
        scene.come(1)
        for group in scene.groups:
            scene.take(group)
        scene.come(*range(2, MOST_ALLOTTED + 2))
        assert scene.choosers == {group.name for group in scene.groups}


def test_what_is_kept_is_made_anew_after_a_change() -> None:
    kept, made = Kept[int](), iter(range(10))
    found = [kept.of(seen, lambda: next(made)) for seen in (1, 1, 2, None, None)]
    assert found == [0, 0, 1, 2, 3]
