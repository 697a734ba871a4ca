from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.kv_blocks import KvBlocks
from router.core.types import KvGroup

FULL = KvGroup(16, 0, 1000)
WINDOW = KvGroup(16, 0, 1000, "sliding", 1024, 0, 1090, 66)
MAMBA = KvGroup(4096, 0, 1000, "mamba", 0, 0, 1, 2)
# Five layers of six see the last 1,024 tokens only; prompts enter in steps of 8,192 tokens.
GEMMA = KvBlocks.of([FULL, *[WINDOW] * 5])

GROUPS = st.builds(
    KvGroup,
    st.integers(1, 64),
    st.just(0),
    st.just(100),
    ahead_tokens=st.integers(0, 20),
    most_entering=st.sampled_from([0, 3, 40]),
    most_held=st.sampled_from([0, 2, 30]),
)


@pytest.mark.parametrize(
    ("kv", "tokens", "entering", "held"),
    [
        (KvBlocks.plain(), 7, 7, 7),
        (KvBlocks.plain(16), 33, 3, 3),
        (KvBlocks.of([FULL]), 16, 1, 1),
        (GEMMA, 160, 60, 60),
        (GEMMA, 160_000, 10_000 + 5 * 1090, 10_000 + 5 * 66),
        (KvBlocks.of([FULL, MAMBA]), 8192, 513, 514),
        (KvBlocks.of([KvGroup(16, 0, 9, ahead_tokens=4)]), 13, 2, 2),
        (KvBlocks.of([]), 100, 0, 0),
        (KvBlocks.of([KvGroup(0, 0, 0)]), 5, 5, 5),
    ],
)
def test_blocks_of_a_request(kv: KvBlocks, tokens: int, entering: int, held: int) -> None:
    assert (kv.entering(tokens), kv.held(tokens)) == (entering, held)


def test_windows_leave_room_for_far_longer_prompts_than_a_share_of_the_pool_each() -> None:
    blocks = 43_000
    assert GEMMA.tokens(blocks) == (blocks - 5 * 1090) * 16
    assert GEMMA.tokens(blocks) > 5 * blocks * 16 / 6


def test_only_groups_that_keep_every_token_share_blocks_for_good() -> None:
    assert GEMMA.shared(20_000) == 1250
    assert KvBlocks.of([FULL, FULL]).shared(31) == 2
    assert KvBlocks.of([WINDOW]).shared(20_000) == 0


def test_tokens_without_room_or_bounds() -> None:
    assert KvBlocks.of([FULL]).tokens(0) == 0
    assert KvBlocks.of([FULL]).tokens(-3) == 0
    assert GEMMA.tokens(-3) == 0
    assert KvBlocks.of([MAMBA]).tokens(3) == 3 * 4096
    assert KvBlocks.of([]).tokens(3) == 3
    assert KvBlocks.of([KvGroup(16, 0, 9, ahead_tokens=40)]).tokens(2) == 0


@pytest.mark.parametrize(
    ("group", "held"),
    [
        (KvGroup(4, 0, 99), [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]),
        (KvGroup(4, 0, 99, "sliding", 6), [1, 1, 1, 1, 2, 2, 2, 2, 3, 2, 2, 2, 3]),
        (KvGroup(4, 0, 99, "chunked", 8), [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 2]),
        (KvGroup(4, 0, 99, "mamba", 2, 8), [3, 3, 3, 3, 4, 3, 3, 3, 4, 3, 3, 3, 4]),
    ],
)
def test_growth_is_what_a_token_takes_less_what_its_window_leaves(
    group: KvGroup, held: list[int]
) -> None:
    kv = KvBlocks.of([group, group])
    grown = [kv.growth(np.array([tokens])) for tokens in range(2, len(held) + 1)]
    assert grown == [2 * (after - before) for before, after in pairwise(held)]
    assert kv.growth(np.arange(2, len(held) + 1)) == 2 * (held[-1] - held[0])


@pytest.mark.parametrize(("kind", "window", "leaves_at"), [("sliding", 6, 10), ("chunked", 8, 9)])
def test_what_a_step_under_way_still_reads_becomes_free_a_step_later(
    kind: str, window: int, leaves_at: int
) -> None:
    kv = KvBlocks.of([KvGroup(4, 0, 99, kind, window)])
    at, after = np.array([leaves_at]), np.array([leaves_at + 1])
    assert kv.growth(at, 1) - kv.growth(at) == -kv.growth(after, 1) > 0


@given(st.lists(GROUPS, max_size=4), st.lists(st.integers(1, 2000), min_size=1, max_size=9))
def test_elementwise_is_the_same(groups: list[KvGroup], tokens: list[int]) -> None:
    kv = KvBlocks.of(groups)
    each = np.array(tokens, dtype=np.int64)
    assert kv.each_entering(each).tolist() == [kv.entering(one) for one in tokens]
    assert kv.each_held(each).tolist() == [kv.held(one) for one in tokens]


@given(st.lists(GROUPS, min_size=1, max_size=4), st.integers(0, 300))
def test_the_most_tokens_fit_and_one_more_does_not(groups: list[KvGroup], blocks: int) -> None:
    kv = KvBlocks.of(groups)
    most = kv.tokens(blocks)
    assert not most or kv.entering(most) <= blocks
    if any(not group.most_entering for group in groups):
        assert kv.entering(most + 1) > blocks
