"""With a tokenizer of one token for two bytes, and blocks of 16 tokens unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.prefix import correspondence
from router.core.prefix.correspondence import Correspondence
from router.core.prefix.ids import block_ids, chain
from router.core.prefix.ids import seed as id_seed
from router.core.prefix.text_chunks import seed, text_content
from router.core.types import Content

ROOT = seed({})
BLOCK = 16
# Bytes of a block.
WIDE = 2 * BLOCK


def content(*parts: str) -> Content:
    return text_content(ROOT, [part.encode() for part in parts])


def blocks(*parts: str) -> bytes:
    text = "".join(parts).encode()
    tokens = [int.from_bytes(text[at : at + 2]) for at in range(0, len(text), 2)]
    return block_ids(chain(tokens, id_seed()), BLOCK)


def text(name: str, blocks_: float) -> str:
    """A text of so many blocks that no other has."""
    size = int(blocks_ * WIDE)
    return (name * size)[:size]


class Router:
    """Requests one after the other, each told and ended at once."""

    def __init__(self, most_bytes: int = correspondence.MOST_BYTES) -> None:
        self.learned = Correspondence(BLOCK, most_bytes)
        self._requests = 0

    def told(self, *parts: str, answer: str = "", becomes: Sequence[str] | None = None) -> None:
        token = f"es-{self._requests}"
        self._requests += 1
        prompt = blocks(*(becomes or parts))
        self.learned.sent(token, content(*parts))
        self.learned.told(token, 0, prompt)
        if answer:
            self.learned.ended(token)  # the client may be done before the engine tells
            whole = blocks(*(becomes or parts), answer)
            self.learned.told(token, len(prompt) // 8, whole[len(prompt) :])
        self.learned.ended(token)

    def predicted(self, *parts: str) -> int:
        """Leading blocks that are right; it fails if one of them is not."""
        foretold = self.learned.predict(content(*parts))
        assert blocks(*parts).startswith(foretold)
        return len(foretold) // 8

    def foretold(self, *parts: str) -> int:
        return len(self.learned.predict(content(*parts))) // 8


def test_nothing_is_known_at_first() -> None:
    assert Router().predicted("anything") == 0


def test_an_equal_prompt_becomes_the_same_blocks() -> None:
    router = Router()
    for _ in range(2):
        router.told(text("a", 10), text("b", 5.5))
        assert router.predicted(text("a", 10), text("b", 5.5)) == 15


def test_a_first_part_has_its_share_of_the_blocks() -> None:
    router = Router()
    router.told(text("a", 10), text("b", 20))
    assert router.predicted(text("a", 10), text("c", 20)) == 10


def test_where_two_prompts_part_is_measured() -> None:
    """Here the first part takes more tokens than its share of the bytes."""
    router = Router()
    dense = text("a", 30)
    router.told(text("a", 10), text("b", 20), becomes=[dense, text("b", 20)])
    assert router.foretold(text("a", 10), text("c", 20)) == 16
    router.told(text("a", 10), text("c", 20), becomes=[dense, text("c", 20)])
    assert router.foretold(text("a", 10), text("d", 20)) == 30


def test_a_share_that_was_too_large_is_corrected() -> None:
    router = Router()
    router.told(text("a", 20), text("b", 10), becomes=[text("a", 5), text("b", 10)])
    assert router.foretold(text("a", 20), text("c", 10)) == 10
    router.told(text("a", 20), text("c", 10), becomes=[text("a", 5), text("c", 10)])
    assert router.foretold(text("a", 20), text("d", 10)) == 5


def test_a_prompt_within_a_longer_one() -> None:
    router = Router()
    router.told(text("a", 10), text("b", 20), text("c", 3))
    assert router.predicted(text("a", 10), text("b", 20)) == 30
    router.told(text("a", 10), text("b", 20))
    assert router.predicted(text("a", 10), text("b", 20), text("c", 3), text("d", 9)) == 33


def test_a_template_that_all_prompts_begin_with() -> None:
    """Its tokens are in no part of the text: the first chunk has no bytes."""
    router = Router()
    head = text("template", 6)
    for name in "ab":
        router.told(text(name, 10), becomes=[head, text(name, 10)])
    assert router.foretold(text("c", 10)) == 6


def test_the_next_turn_continues_with_the_answer() -> None:
    router = Router()
    asked, answer = text("asked", 4.5), text("answer", 8)
    router.told(asked, answer=answer)
    assert router.predicted(asked, answer, text("next", 3)) == 12
    router.told(asked, answer, text("next", 3), answer=text("again", 4))
    following = asked, answer, text("next", 3), text("again", 4), text("last", 2)
    assert router.predicted(*following) == 19


def test_a_prompt_of_less_than_a_block_is_answered() -> None:
    router = Router()
    router.told("asked", answer=text("answer", 8))
    assert router.predicted("asked", text("answer", 8), text("next", 3)) == 8


def test_a_message_of_another_length_is_no_answer() -> None:
    router = Router()
    asked = text("asked", 4)
    router.told(asked, answer=text("answer", 20))
    router.told(asked, answer=text("answer", 1))
    assert router.predicted(asked, text("other", 400), "next") == 4
    router.told(asked, text("other", 400), "next")


def test_of_several_answers_the_nearest_in_length_counts() -> None:
    router = Router()
    asked = text("asked", 4)
    lengths = 4, 12, 40
    for length in lengths:
        router.told(asked, answer=text(f"{length}", length))
    # Its bytes per token are learned: two here.
    for turn in range(30):
        router.told(text(f"{turn}", 3), answer=text(f"{turn}", 9))
        router.told(text(f"{turn}", 3), text(f"{turn}", 9), "next")
    for length in lengths:
        assert router.predicted(asked, text(f"{length}", length), "next") == 4 + length


def test_most_answers_to_one_prompt() -> None:
    router = Router()
    asked = text("asked", 4)
    for number in range(30):
        router.told(asked, answer=text(f"{number} ", 8))
        held = router.learned.memory_bytes
        if number == 8:
            first = held
    assert held == first
    assert router.predicted(asked, text("29 ", 8), "next") == 12, "the latest of equal length"


def test_answers_that_templates_leave_out_are_not_expected_for_long() -> None:
    """Reasoning is not repeated: the answer's blocks are not those of the message."""
    router = Router()
    for number in range(20):
        asked = text(f"{number} asked", 4)
        router.told(asked, answer=text("reasoning", 9))
        expected = router.foretold(asked, text("answer", 8), "next")
        assert expected == (13 if number < 7 else 4)
        router.told(asked, text("answer", 8), "next")


def test_an_answer_is_not_expected_after_fewer_blocks_than_its_prompt_had() -> None:
    """The next turn has told that the prompt's last block is not repeated."""
    router = Router()
    asked, answer = text("asked", 4), text("answer", 8)
    for name in "ab":
        router.told(asked, answer=answer)
        router.told(asked, text(name, 8), "next", becomes=[text("asked", 3), text(name, 8)])
    router.told(asked, answer=answer)
    router.told(asked, text("c", 8), "more", becomes=[text("asked", 3), text("c", 8)])
    assert router.foretold(asked, answer, "next") == 3


def test_an_answer_of_no_full_block_teaches_nothing() -> None:
    router = Router()
    router.told(text("asked", 4), answer="yes")
    assert router.predicted(text("asked", 4), "yes", text("next", 8)) == 4


def test_token_ids_are_exact() -> None:
    learned = Correspondence(32)
    pieces = chain(range(100), id_seed())
    learned.sent("es-1", Content(pieces=pieces))
    learned.told("es-1", 0, block_ids(pieces, 32))
    assert learned.predict(Content(pieces=pieces)) == block_ids(pieces, 32)
    assert learned.memory_bytes == 0


def test_what_engines_tell_of_unknown_requests_is_ignored() -> None:
    learned = Correspondence(BLOCK)
    learned.told("es-1", 0, blocks(text("a", 4)))
    learned.ended("es-1")
    assert learned.memory_bytes == 0


def test_an_answer_whose_prompt_was_never_told_is_ignored() -> None:
    learned = Correspondence(BLOCK)
    learned.sent("es-1", content("asked"))
    learned.told("es-1", 4, blocks(text("a", 4)))
    assert learned.memory_bytes == 0


def test_memory_is_bounded_and_the_oldest_prompts_go() -> None:
    router = Router(most_bytes=20_000)
    for number in range(100):
        router.told(text(f"{number} ", 40), answer=text("answer", 5))
        assert router.learned.memory_bytes <= 20_000
    assert router.predicted(text("0 ", 40)) == 0
    assert router.predicted(text("99 ", 40)) == 40
    tiny = Router(most_bytes=100)
    tiny.told(text("a", 40))
    assert tiny.learned.memory_bytes == 0


def test_what_a_later_prompt_shares_outlives_an_older_one() -> None:
    router = Router(most_bytes=12_000)
    for number in range(30):
        router.told(text("system", 40), text(f"{number} ", 20))
        assert router.predicted(text("system", 40), text("new", 9)) == 40


def test_requests_that_never_end_are_bounded() -> None:
    learned = Correspondence(BLOCK)
    most = 70_000
    for number in range(most):
        learned.sent(f"es-{number}", content("asked"))
        if number % 50 == 0:
            learned.ended(f"es-{number}")
    for forgotten in (0, 1):  # one that ended, one that did not
        learned.told(f"es-{forgotten}", 0, blocks(text("a", 4)))
        assert learned.memory_bytes == 0
    learned.told(f"es-{most - 1}", 0, blocks(text("a", 4)))
    assert learned.memory_bytes


def test_texts_of_one_id_do_no_harm() -> None:
    router = Router()
    router.told(text("a", 4), text("b", 4))
    chunks = content(text("a", 4), text("b", 4)).chunks
    moved = Content(chunks=chunks[8:], sizes=content("x", "y").sizes[4:])
    assert router.learned.predict(moved) == b""
