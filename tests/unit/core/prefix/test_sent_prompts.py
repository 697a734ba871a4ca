"""What is guessed of caches that nobody tells of: by what workers were sent."""

from array import array

import numpy as np
import pytest

from router.core.prefix.ids import chain, seed
from router.core.prefix.prefixes import LOOK_AGAIN_S, Prefixes
from router.core.prefix.sent_prompts import (
    KEPT_S,
    MOST_TOKENS,
    PART_TOKENS,
    SentPrompts,
    ends,
    parts,
)
from router.core.prefix.sessions import MOST_NAME_BYTES, session_content
from router.core.prefix.text_chunks import seed as text_seed
from router.core.prefix.text_chunks import text_content
from router.core.types import Content, Request
from tests.support.core import token

WORKERS = ("a", "b")
PROMPT = list(range(1000))


def ids(tokens: list[int], salt: str = "") -> Content:
    return Content(pieces=chain(tokens, seed("", salt)))


def text(*messages: bytes, salt: bytes = b"") -> Content:
    return text_content(text_seed({"cache_salt": salt}), messages)


def session(name: bytes, tenant: str = "", salt: bytes = b"") -> Content:
    found = session_content(tenant, name, salt)
    assert found is not None
    return found


class Guessed:
    """Prefixes of workers that tell nothing, on a clock."""

    def __init__(self) -> None:
        self.prefixes, self.now_s, self.number = Prefixes(10_000), 100.0, 0

    def send(
        self, worker: str, content: Content, tokens: int = 1000, most: int = MOST_TOKENS
    ) -> None:
        self.prefixes.guess(worker, content, tokens, self.now_s, most)

    def hits(self, content: Content | None, tokens: int = 1000) -> list[int]:
        """As for a new request."""
        self.number += 1
        return self.again(Request(token(self.number), "", tokens, content=content))

    def again(self, request: Request) -> list[int]:
        return list(self.prefixes.hits(request, WORKERS))


def test_a_worker_has_the_leading_parts_of_what_it_was_sent() -> None:
    guessed = Guessed()
    guessed.send("a", ids(PROMPT))
    guessed.send("b", ids(PROMPT[:300]))
    whole = 1000 // PART_TOKENS * PART_TOKENS
    assert guessed.hits(ids(PROMPT)) == [whole, 256]
    assert guessed.hits(ids([*PROMPT, 5]), 1001) == [whole, 256]
    assert guessed.hits(ids([*PROMPT[:130], *PROMPT]), 1130) == [128, 128]
    assert guessed.hits(ids([7, *PROMPT])) == [0, 0]
    assert guessed.hits(None) == [0, 0]


def test_the_last_token_is_always_computed() -> None:
    guessed = Guessed()
    for content in (ids(PROMPT[:PART_TOKENS]), text(b"x" * 512), session(b"s")):
        guessed.send("a", content, PART_TOKENS)
        assert guessed.hits(content, PART_TOKENS) == [PART_TOKENS - 1, 0]
        assert guessed.hits(content, 0) == [0, 0]


def test_a_text_has_its_share_of_the_tokens_by_its_bytes() -> None:
    guessed = Guessed()
    guessed.send("a", text(b"x" * 600, b"y" * 200), 200)
    assert guessed.hits(text(b"x" * 600, b"y" * 200, b"z" * 1200), 500) == [200, 0]
    assert guessed.hits(text(b"x" * 600, b"z" * 200), 200) == [150, 0]
    assert guessed.hits(text(b"x" * 599), 150) == [int(150 * 512 / 599), 0]
    assert guessed.hits(text(), 10) == [0, 0], "no bytes, no tokens"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ids(PROMPT, "one"), ids(PROMPT, "other")),
        (text(b"x" * 900, salt=b"one"), text(b"x" * 900, salt=b"other")),
        (session(b"s", salt=b"one"), session(b"s", salt=b"other")),
    ],
    ids=["ids", "text", "session"],
)
def test_salts_share_nothing(one: Content, other: Content) -> None:
    guessed = Guessed()
    guessed.send("a", one)
    assert guessed.hits(one)[0] > 800
    assert guessed.hits(other) == [0, 0]


def test_a_session_counts_all_that_its_last_turn_left() -> None:
    guessed = Guessed()
    waiting = Request(token(0), "", 5000, content=session(b"s", "alice"))
    guessed.send("b", session(b"s", "alice"), 700)
    assert guessed.again(waiting) == [0, 700]
    guessed.send("b", session(b"s", "alice"), 900)
    assert guessed.again(waiting) == [0, 900], "with the answer"
    assert guessed.hits(session(b"s", "bob"), 5000) == [0, 0], "another tenant's"
    assert guessed.hits(session(b"t", "alice"), 5000) == [0, 0]


@pytest.mark.parametrize("name", [b"", b"s" * (MOST_NAME_BYTES + 1)])
def test_names_that_are_none_are_ignored(name: bytes) -> None:
    assert session_content("", name) is None
    assert session_content("", b"s" * MOST_NAME_BYTES) is not None


def test_what_a_worker_has_no_room_for_is_forgotten_the_oldest_first() -> None:
    guessed = Guessed()
    first, second = ids(PROMPT), ids(PROMPT[::-1])
    guessed.send("a", first, most=1500)
    waiting = Request(token(0), "", 1000, content=first)
    assert guessed.again(waiting) == [896, 0]
    guessed.send("a", second, most=1500)
    assert guessed.hits(second) == [896, 0]
    left = guessed.again(waiting)[0]
    assert 0 < left <= 1500 - 896, "its end has gone, its beginning is left"
    guessed.send("a", first, most=1500)
    assert guessed.hits(first) == [896, 0]
    guessed.send("a", second, most=100)
    assert guessed.hits(second) == [0, 0], "more than all its memory"


def test_what_was_not_sent_for_long_counts_no_more() -> None:
    guessed = Guessed()
    guessed.send("a", ids(PROMPT))
    guessed.send("b", session(b"s"))
    guessed.now_s += KEPT_S / 2
    guessed.send("a", ids(PROMPT[:512]))
    guessed.now_s += KEPT_S / 2 + LOOK_AGAIN_S
    guessed.send("a", session(b"other"))
    assert guessed.hits(ids(PROMPT)) == [512, 0]
    assert guessed.hits(session(b"s")) == [0, 0], "on other workers too"


def test_bounds_hold_and_beginnings_outlive_ends() -> None:
    sent = SentPrompts()
    sent.most_tokens = 1000
    for number in range(50):
        content = ids([number % 7] * 400 + [number] * 300)
        sent.add(parts(content), ends(content, 700), float(number))
        sent.forget(float(number))
        known = [sent.tokens_of(part) for part in array("Q", parts(content))]
        assert known == sorted(known, reverse=True)
        assert sum(known) <= 1000
    assert sent.forget(50 + KEPT_S)
    assert not sent.forget(50 + KEPT_S)


def test_ends_are_those_of_the_parts() -> None:
    assert np.array_equal(ends(ids(PROMPT[:300]), 300), [128, 256])
    assert np.array_equal(ends(text(b"x" * 1024), 256), [0, 128, 256])
    assert np.array_equal(ends(session(b"s"), 9), [9])
