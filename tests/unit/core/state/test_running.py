"""Running requests as arrays."""

import random

import numpy as np

from router.core.forecast.forecast import NO_CAP, Running
from router.core.state.running_table import RunningTable, WorkerRows, joined


def rows(running: Running) -> set[tuple[int, int, int, int]]:
    columns = running.id, running.worker, running.prompt_tokens, running.generated_tokens
    return set(zip(*(column.tolist() for column in columns), strict=True))


def test_requests_of_a_worker_grow_with_its_ticks_and_with_no_others() -> None:
    table = RunningTable()
    one, two = table.worker(), table.worker()
    first, second = one.add(100, 0, 0), two.add(50, 7, 0)
    one.tick()
    one.tick()
    two.tick()
    third = one.add(10, 3, 0)
    one.tick()
    assert rows(table.running([0, 1])) == {
        (first, 0, 100, 3),
        (second, 1, 50, 8),
        (third, 0, 10, 4),
    }


def test_workers_are_numbered_as_they_are_asked_for() -> None:
    table = RunningTable()
    ids = [table.worker().add(10 * index, 0, 0) for index in range(3)]
    assert rows(table.running([2, 0])) == {(ids[2], 0, 20, 0), (ids[0], 1, 0, 0)}
    assert len(table.running([])) == 0
    assert len(table) == 3


def test_what_is_known_of_a_request_is_kept() -> None:
    rows_of = RunningTable().worker()
    number = rows_of.new_id()
    assert rows_of.add(9, 1, 4, 33, 0.25, number) == number
    assert rows_of.add(9, 1, 4) != number
    running = rows_of._table.running([0])
    assert running.max_tokens.tolist() == [33, NO_CAP]
    assert running.prefill_left.tolist() == [4, 4]
    assert running.end_probability[0] == 0.25
    assert np.isnan(running.end_probability[1])


def test_rows_come_and_go_like_entries_of_a_dictionary() -> None:
    rng = random.Random(3)
    table = RunningTable()
    workers = [table.worker() for _ in range(3)]
    expected: dict[int, tuple[WorkerRows, int, int, int]] = {}
    for _ in range(1500):
        if expected and rng.random() < 0.45:
            number = rng.choice([*expected])
            worker, *_, place = expected.pop(number)
            worker.remove(place)
        else:
            worker, prompt, generated = rng.choice(workers), rng.randrange(99), rng.randrange(9)
            place = worker.free_place(None)
            added = worker.add(prompt, generated, 0, place=place)
            expected[added] = worker, prompt, generated, place
    shown = {(number, rows.worker, p, g) for number, (rows, p, g, _) in expected.items()}
    assert all(rows.generated_tokens(place) == g for rows, _, g, place in expected.values())
    assert rows(table.running([0, 1, 2])) == shown


def test_whatever_changes_gives_a_worker_another_version_and_no_other_worker() -> None:
    table = RunningTable()
    one, two = table.worker(), table.worker()
    seen, still = {one.version}, two.version
    one.add(9, 0, 0)
    changes = one.tick, one.change, lambda: one.remove(0), lambda: one.add(9, 0, 0)
    for change in (*changes, lambda: one.grow(b"\2")):
        seen.add(one.version)
        change()
        assert one.version not in seen
    assert two.version == still
    seen.add(one.version)
    table.release(one.worker)
    assert table.worker().version not in seen, "another worker in its place"


def test_joined() -> None:
    table = RunningTable()
    one, two = table.worker(), table.worker()
    one.add(5, 0, 0)
    two.add(6, 0, 0)
    both = joined(table.running([0]), table.running([1]))
    assert both.prompt_tokens.tolist() == [5, 6]


def test_a_place_far_off_and_the_first_that_is_free() -> None:
    rows = RunningTable().worker()
    rows.add(5, 0, 0, place=rows.free_place(200))
    for number in range(200):
        assert rows.free_place(None) == number
        rows.add(5, number, 0)
    assert (rows.free_place(None), rows.free_place(200)) == (201, 200)
    assert rows.taken(200)
    assert rows.resident_tokens()[:3] == [5, 6, 7]
    full = RunningTable().worker()
    for _ in range(64):
        full.add(5, 0, 0)
    assert full.free_place(None) == 64
