from __future__ import annotations

from array import array

import pytest

from engine_patches.stream import cached_blocks
from engine_patches.stream.cached_blocks import MOST_BLOCKS, CachedBlocks, Changes, is_told
from router.core.types import PromptChain


def ids(*numbers: int) -> bytes:
    return array("Q", numbers).tobytes()


@pytest.fixture
def cached() -> CachedBlocks:
    """Holds blocks 1 and 2, as its readers know."""
    cached = CachedBlocks(16)
    cached.stored([1, 2])
    assert cached.take() == Changes(16, ids(1, 2), b"", False, [])
    return cached


def test_what_is_held_is_as_of_the_last_message(cached: CachedBlocks) -> None:
    cached.stored([3])
    cached.removed(1)
    assert cached.held() == ids(1, 2)
    assert cached.take() == Changes(16, ids(3), ids(1), False, [])
    assert cached.held() == ids(2, 3)
    assert cached.take() == Changes(16)._replace(chains=[])


def test_a_block_that_came_and_went_is_not_told(cached: CachedBlocks) -> None:
    cached.stored([3])
    cached.removed(3)
    cached.removed(1)
    cached.stored([1])
    assert cached.take()[1:4] == (b"", b"", False)


def test_a_content_goes_with_its_last_copy(cached: CachedBlocks) -> None:
    cached.stored([1, 1])
    assert cached.take().blocks_stored == b""
    cached.removed(1)
    cached.removed(1)
    assert cached.take().blocks_removed == b""
    cached.removed(1)
    assert cached.take().blocks_removed == ids(1)


def test_a_block_that_was_not_there_does_not_go(cached: CachedBlocks) -> None:
    cached.removed(7)
    assert cached.take()[1:4] == (b"", b"", False)


def test_what_was_stored_after_a_reset_is_told(cached: CachedBlocks) -> None:
    cached.stored([3])
    cached.cleared()
    cached.stored([2])
    assert cached.take()[1:4] == (ids(2), b"", True)
    assert cached.held() == ids(2)


def test_a_message_lists_no_more_than_a_cache_holds(
    cached: CachedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_blocks, "MOST_BLOCKS", 3)
    for gone in (1, 2):
        cached.removed(gone)
    cached.stored([3, 4])
    assert cached.take()[1:4] == (ids(3, 4), b"", True)


def test_long_chains_come_in_several_messages(
    cached: CachedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_blocks, "_MOST_CHAIN_BYTES", 16)
    cached.entered("a", array("Q", [1, 2]))
    cached.entered("b", array("Q", [1]))
    cached.left("a", 2, array("Q", [5]))
    cached.left("b", 1, array("Q"))
    assert cached.take().chains == [PromptChain("a", 0, ids(1, 2))]
    rest = [PromptChain("b", 0, ids(1)), PromptChain("a", 2, ids(5))]
    assert cached.take().chains == rest


def test_an_end_is_silent(cached: CachedBlocks) -> None:
    cached.stored([3])
    cached.end()
    assert (cached.take(), cached.held()) == (Changes(), b"")


def test_which_caches_are_told() -> None:
    assert is_told(16, MOST_BLOCKS)
    assert is_told(48, 10)
    assert not is_told(24, 10)
    assert not is_told(16, MOST_BLOCKS + 1)
