"""Bounds of the index of blocks, and where its rows lie."""

from array import array
from collections.abc import Iterable

import numpy as np

from router.core.prefix.block_index import BlockIndex
from router.core.prefix.id_table import IdTable


def packed(ids: Iterable[int]) -> bytes:
    return array("Q", ids).tobytes()


def leading(index: BlockIndex, ids: Iterable[int]) -> list[int]:
    return [int(count) for count in index.leading(packed(ids))[:3]]


def test_a_full_index_drops_new_ids_and_counts_them() -> None:
    index = BlockIndex(10)
    a, b = index.join(), index.join()
    index.store(a, packed(range(1, 9)))
    index.store(b, packed(range(5, 15)))
    assert leading(index, range(1, 15)) == [8, 0, 0]
    assert leading(index, range(5, 15)) == [4, 6, 0]
    assert (len(index), index.dropped) == (10, 4)
    index.remove(a, packed([1, 2, 3, 4]))
    index.settle()
    index.store(b, packed([11, 12, 13, 14]))
    assert leading(index, range(5, 15)) == [4, 10, 0]
    assert (len(index), index.dropped) == (10, 4)


def test_id_0_is_never_held() -> None:
    index = BlockIndex(10)
    worker = index.join()
    index.store(worker, packed([0, 7]))
    assert leading(index, [0]) == [0, 0, 0]
    assert leading(index, [7, 0]) == [1, 0, 0]
    assert (index.held(worker), index.dropped) == (1, 0)


def test_of_changes_in_a_row_the_last_counts() -> None:
    index = BlockIndex(10)
    worker = index.join()
    index.store(worker, packed([1, 2]))
    index.remove(worker, packed([1]))
    assert leading(index, [2]) == [1, 0, 0]
    assert leading(index, [1]) == [0, 0, 0]
    index.remove(worker, packed([2]))
    index.store(worker, packed([2]))
    index.store(worker, b"")
    assert leading(index, [2]) == [1, 0, 0]
    assert len(index) == 1


def test_many_changes_are_applied_before_anyone_looks() -> None:
    index = BlockIndex(1 << 15)
    worker = index.join()
    before = index.memory_bytes
    for start in range(1, 20_001, 100):
        index.store(worker, packed(range(start, start + 100)))
    assert index.memory_bytes > before + 16_000 * 20
    assert index.held(worker) == 20_000


def test_a_worker_that_comes_anew_holds_nothing() -> None:
    index = BlockIndex(100)
    a, b = index.join(), index.join()
    index.store(a, packed([1, 2, 3]))
    index.store(b, packed([1, 2]))
    index.leave(a)
    assert index.join() == a
    assert leading(index, [1, 2, 3]) == [0, 2, 0]
    index.store(a, packed([3]))
    assert leading(index, [3]) == [1, 0, 0]
    assert len(index) == 3


def test_no_chain_and_no_worker() -> None:
    index = BlockIndex(10)
    assert leading(index, [1, 2]) == []
    index.join()
    assert leading(index, []) == [0, 0, 0]


def test_ids_of_one_bucket_are_found_and_removed() -> None:
    table = IdTable(1000)
    ids = np.arange(1, 41, dtype=np.uint64) << np.uint64(32)
    rows = np.arange(1, 41)
    table.add(ids, rows)
    assert table.find(ids).tolist() == rows.tolist()
    more = np.arange(1, 901, dtype=np.uint64)
    table.add(more, np.arange(41, 941))
    assert table.find(ids).tolist() == rows.tolist()
    assert table.find(more).tolist() == list(range(41, 941))
    table.remove(ids[::2])
    assert table.find(ids).tolist() == [row * (row % 2 == 0) for row in rows.tolist()]
    assert len(table) == 920


def test_a_worker_of_another_word_keeps_its_blocks() -> None:
    index = BlockIndex(10)
    *_, last = [index.join() for _ in range(65)]
    index.store(0, packed([1, 2]))
    index.store(last, packed([2]))
    index.clear(0)
    assert (index.held(0), index.held(last), len(index)) == (0, 1, 1)
    assert index.leading(packed([2])).tolist() == [0] * 64 + [1] + [0] * 63


def test_a_long_chain_whose_blocks_were_stored_out_of_order_is_found_whole() -> None:
    index = BlockIndex(100_000)
    worker = index.join()
    ids = np.arange(1, 5001, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    for start in np.random.default_rng(0).permutation(500).tolist():
        index.store(worker, ids[10 * start : 10 * start + 10].tobytes())
    assert index.leading(ids.tobytes())[worker] == 5000
    index.remove(worker, ids[4321:4322].tobytes())
    assert index.leading(ids.tobytes())[worker] == 4321


def test_a_long_chain_that_was_stored_in_two_parts_is_found_whole() -> None:
    index = BlockIndex(100_000)
    worker = index.join()
    ids = np.arange(1, 5001, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    for part in (ids[:2507], np.array([1, 2, 3], np.uint64), ids[2507:]):
        index.store(worker, part.tobytes())
        index.settle()
    assert index.leading(ids.tobytes())[worker] == 5000
