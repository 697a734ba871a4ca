"""Hits of waiting requests: what is kept, and what changes it."""

from __future__ import annotations

import msgspec

from router.core.prefix.ids import block_ids, chain, seed
from router.core.prefix.prefixes import LOOK_AGAIN_S, Prefixes
from router.core.prefix.text_chunks import seed as text_seed
from router.core.prefix.text_chunks import text_content
from router.core.types import Content, PromptChain, Request, Snapshot
from tests.support.core import part, snapshot, token

PROMPT = list(range(1000))
PIECES = chain(PROMPT, seed())
WORKERS = ("a", "b", "c")


def asks(number: int, tokens: list[int] | None = None, prompt_tokens: int = 0) -> Request:
    tokens = PROMPT if tokens is None else tokens
    content = Content(pieces=chain(tokens, seed()))
    return Request(token(number), "default", prompt_tokens or len(tokens), content=content)


def blocks(start: int, end: int, size: int = 16, pieces: bytes = PIECES) -> bytes:
    return block_ids(pieces, size)[8 * start : 8 * end]


class Told:
    """Prefixes, and workers that tell their blocks."""

    def __init__(self, *, most_answers: int = 100, **sizes: int) -> None:
        self.prefixes = Prefixes(10_000, most_answers)
        self.sequence = 0
        self.now_s = 1.0
        for worker, size in sizes.items():
            self.full(worker, size=size)

    def full(self, worker: str, stored: bytes = b"", size: int = 16) -> None:
        told = msgspec.structs.replace(self._snapshot("full"), cache_block=size)
        self.hear(worker, msgspec.structs.replace(told, blocks_stored=stored))

    def delta(self, worker: str, stored: bytes = b"", removed: bytes = b"") -> None:
        told = msgspec.structs.replace(
            self._snapshot("delta"), cache_block=16, blocks_stored=stored, blocks_removed=removed
        )
        self.hear(worker, told)

    def hear(self, worker: str, told: Snapshot) -> None:
        self.prefixes.heard(worker, told, self.now_s)

    def hits(self, request: Request) -> list[int]:
        return list(self.prefixes.hits(request, WORKERS))

    def _snapshot(self, kind: str) -> Snapshot:
        self.sequence += 1
        return snapshot("full" if kind == "full" else "delta", self.sequence)


def test_hits_are_whole_blocks_and_never_the_last_token() -> None:
    told = Told(a=16, b=16)
    told.delta("a", blocks(0, 62))
    told.delta("b", blocks(0, 10))
    assert told.hits(asks(1)) == [992, 160, 0]
    assert told.hits(asks(2, PROMPT[:160])) == [144, 144, 0], "an engine computes the last token"
    assert told.hits(asks(3, PROMPT[:161])) == [160, 160, 0]
    assert told.hits(asks(4, [*PROMPT[:100], 9, *PROMPT[100:]])) == [96, 96, 0]
    assert told.hits(asks(5, [])) == [0, 0, 0]


def test_the_blocks_of_a_prompt_by_the_size_that_a_worker_tells() -> None:
    told = Told(a=16, b=64)
    assert told.prefixes.blocks("a", asks(1, PROMPT[:160])) == blocks(0, 10)
    assert told.prefixes.blocks("b", asks(1)) == blocks(0, 15, 64)
    assert told.prefixes.blocks("b", Request(token(2), "default", 100)) == b""


def test_workers_with_blocks_of_different_sizes() -> None:
    told = Told(a=16, b=64, c=32)
    told.delta("a", blocks(0, 13))
    told.delta("b", blocks(0, 4, 64))
    told.delta("c", blocks(1, 9, 32))
    assert told.hits(asks(1)) == [208, 256, 0]
    assert told.hits(asks(2, PROMPT[:256])) == [208, 192, 0]
    told.delta("c", blocks(0, 1, 32))
    assert told.hits(asks(1)) == [208, 256, 288]


def test_what_is_not_known_is_no_hit() -> None:
    told = Told(a=16, b=0, c=20)
    told.delta("a", blocks(0, 5))
    told.delta("b", blocks(0, 5))
    assert told.hits(asks(1)) == [80, 0, 0]
    assert told.hits(Request(token(2), "default", 100)) == [0, 0, 0]
    assert [told.prefixes.tells(worker) for worker in WORKERS] == [True, False, False]
    assert [told.prefixes.block_tokens(worker) for worker in WORKERS] == [16, None, None]
    told.prefixes.lost("a")
    told.prefixes.lost("b")
    assert not told.prefixes.told
    assert told.hits(asks(1)) == [0, 0, 0]


def test_a_worker_may_change_the_size_of_its_blocks() -> None:
    told = Told(a=16)
    told.delta("a", blocks(0, 5))
    told.full("a", blocks(0, 2, 64), size=64)
    assert told.hits(asks(1)) == [128, 0, 0]
    told.full("a", size=0)
    assert not told.prefixes.told


def test_nothing_is_known_where_nobody_has_told_anything() -> None:
    prefixes = Prefixes()
    assert list(prefixes.hits(asks(1), WORKERS)) == [0, 0, 0]
    assert not prefixes.told
    assert prefixes.index is None


def test_a_kept_answer_follows_its_boundaries() -> None:
    told = Told(a=16, b=16)
    told.delta("a", blocks(0, 8))
    told.delta("b", blocks(0, 3))
    assert told.hits(asks(1)) == [128, 48, 0]
    told.delta("b", blocks(3, 5))
    assert told.hits(asks(1)) == [128, 80, 0]
    told.delta("a", removed=blocks(6, 8))
    assert told.hits(asks(1)) == [96, 80, 0]
    told.delta("b", removed=blocks(0, 5))
    assert told.hits(asks(1)) == [96, 0, 0]
    told.delta("b", blocks(0, 62))
    assert told.hits(asks(1)) == [96, 992, 0]
    told.full("b", blocks(0, 1))
    assert told.hits(asks(1)) == [96, 16, 0]
    cleared = snapshot("delta", 99)
    told.hear("a", msgspec.structs.replace(cleared, cache_block=16, blocks_cleared=True))
    assert told.hits(asks(1)) == [0, 16, 0]


def test_a_hole_elsewhere_is_seen_after_a_while() -> None:
    told = Told(a=16)
    told.delta("a", blocks(0, 8))
    assert told.hits(asks(1)) == [128, 0, 0]
    told.delta("a", removed=blocks(3, 4))
    assert told.hits(asks(1)) == [128, 0, 0]
    assert told.hits(asks(2)) == [48, 0, 0]
    told.now_s += LOOK_AGAIN_S
    told.delta("a")
    assert told.hits(asks(1)) == [48, 0, 0]


def test_requests_that_part_after_the_hit_share_an_answer() -> None:
    """Each has its own tail, and its own bound."""
    told = Told(a=16, b=16)
    told.delta("a", blocks(0, 4))
    waiting = [asks(number, [*PROMPT[:800], number, *PROMPT[801:]]) for number in range(20)]
    short = asks(50, PROMPT[:100])
    early = asks(51, [*PROMPT[:70], 5, *PROMPT[71:]])
    ends = asks(52, PROMPT[:160], prompt_tokens=400)
    for _ in range(2):
        assert [told.hits(one)[0] for one in (*waiting, short, early, ends)] == [64] * 23
    told.delta("a", blocks(4, 10))
    expected = [160] * 20 + [96, 64, 160]
    assert [told.hits(one)[0] for one in (*waiting, short, early, ends)] == expected
    told.delta("b", blocks(0, 2))
    told.prefixes.forget(waiting[0].id)
    told.delta("a", blocks(10, 60))
    expected = [800] * 20 + [96, 64, 160]
    assert [told.hits(one)[0] for one in (*waiting, short, early, ends)] == expected
    told.full("b", blocks(0, 60))
    assert [told.hits(one)[1] for one in (*waiting, short, early, ends)] == expected


def test_what_waits_no_more_is_not_watched() -> None:
    told = Told(a=16)
    told.delta("a", blocks(0, 4))
    told.hits(asks(1))
    told.hits(asks(2))
    told.prefixes.forget(token(1))
    told.prefixes.forget(token(1))
    assert told.prefixes._watched
    told.prefixes.forget(token(2))
    assert not told.prefixes._watched
    assert not told.prefixes._answers


def test_answers_are_bounded() -> None:
    told = Told(most_answers=3, a=16)
    told.delta("a", blocks(0, 4))
    for number in range(5):
        assert told.hits(asks(number)) == [64, 0, 0]
    assert len(told.prefixes._answers) == 3


def says(number: int, *messages: bytes, prompt_tokens: int = 1000) -> Request:
    content = text_content(text_seed({"model": b"m"}), messages)
    return Request(token(number), "default", prompt_tokens, content=content)


SYSTEM, QUESTION, OTHER = b"s" * 900, b"q" * 2000, b"o" * 1500


def entered(told: Told, worker: str, number: int, ids: bytes) -> None:
    """The worker admits a request, and computes its prompt."""
    chains = (PromptChain(part(number), 0, ids), PromptChain("another's", 0, ids))
    delta = msgspec.structs.replace(
        snapshot("delta", 900 + number), cache_block=16, blocks_stored=ids, chains=chains
    )
    told.hear(worker, delta)


def test_text_that_was_told_before_is_found_again() -> None:
    told = Told(a=16, b=16)
    first = says(1, SYSTEM, QUESTION)
    assert told.hits(first) == [0, 0, 0]
    told.prefixes.sent("a", first)
    entered(told, "a", 1, blocks(0, 40))
    told.prefixes.ended(token(1))
    assert told.hits(says(2, SYSTEM, QUESTION)) == [640, 0, 0]
    assert told.hits(says(3, QUESTION)) == [0, 0, 0]
    (begun, *_) = told.hits(says(4, SYSTEM, OTHER))
    assert 0 < begun < 640
    told.delta("a", removed=blocks(4, 40))
    assert told.hits(says(2, SYSTEM, QUESTION)) == [64, 0, 0]


def test_a_request_that_waits_learns_of_its_text_meanwhile() -> None:
    told = Told(a=16)
    first, waits = says(1, SYSTEM, QUESTION), says(2, SYSTEM, QUESTION)
    told.prefixes.sent("a", first)
    assert told.hits(waits) == [0, 0, 0]
    entered(told, "a", 1, blocks(0, 40))
    assert told.hits(waits) == [640, 0, 0]


def test_equal_texts_that_wait_share_an_answer() -> None:
    told = Told(a=16)
    told.prefixes.sent("a", says(1, SYSTEM, QUESTION))
    entered(told, "a", 1, blocks(0, 40))
    told.delta("a", removed=blocks(8, 40))
    waiting = [says(number, SYSTEM, QUESTION) for number in range(2, 6)]
    assert [told.hits(one)[0] for one in waiting] == [128] * 4
    told.delta("a", blocks(8, 20))
    assert [told.hits(one)[0] for one in waiting] == [320] * 4


def test_what_a_worker_without_blocks_receives_teaches_nothing() -> None:
    told = Told(a=16)
    told.prefixes.sent("b", says(1, SYSTEM, QUESTION))
    told.prefixes.sent("a", Request(token(9), "default", 100))
    entered(told, "a", 1, blocks(0, 40))
    assert told.hits(says(2, SYSTEM, QUESTION)) == [0, 0, 0]


def test_an_engine_that_can_tell_no_more_counts_as_knowing_nothing() -> None:
    told = Told(a=16)
    told.delta("a", blocks(0, 10))
    assert told.prefixes.told
    told.hear("a", snapshot("delta", 999))
    assert not told.prefixes.told
    assert told.hits(asks(1)) == [0, 0, 0]


def test_what_is_held_and_what_it_takes() -> None:
    assert (Prefixes().held("a"), Prefixes().memory_bytes) == (None, 0)
    told = Told(a=16, b=16)
    before = told.prefixes.memory_bytes
    told.delta("a", stored=blocks(0, 60))
    told.delta("a", removed=blocks(50, 60))
    assert [told.prefixes.held(worker) for worker in WORKERS] == [50, 0, None]
    assert told.prefixes.memory_bytes > before
    before = told.prefixes.memory_bytes
    text = text_content(text_seed({}), [b"a" * 5000])
    told.prefixes.sent("a", Request(token(1), "default", 1000, content=text))
    chains = (PromptChain(part(1), 0, blocks(0, 60)),)
    told.hear("a", msgspec.structs.replace(told._snapshot("delta"), cache_block=16, chains=chains))
    assert told.prefixes.memory_bytes > before
