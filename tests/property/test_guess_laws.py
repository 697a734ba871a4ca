"""Guesses of what is cached: kept answers are fresh ones, and no guess is beyond what was sent."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.core.prefix.ids import chain, seed
from router.core.prefix.prefixes import Prefixes
from router.core.prefix.sessions import session_content
from router.core.prefix.text_chunks import seed as text_seed
from router.core.prefix.text_chunks import text_content
from router.core.types import Content, Request
from tests.support.core import snapshot, token

WORKERS = ("a", "b", "c")
SALTS = ("", "other")
# A prompt is a path in a tree: conversations that share their beginnings.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@st.composite
def contents(draw: st.DrawFn) -> tuple[str, Content | None, int]:
    path, salt = draw(PATHS), draw(st.sampled_from(SALTS))
    match draw(st.integers(0, 2)):
        case 0:
            prompt = [choice for choice in path for _ in range(200)]
            return salt, Content(pieces=chain(prompt, seed("", salt))), len(prompt)
        case 1:
            parts = [b"%d" % choice * 800 for choice in path]
            told = {"cache_salt": salt.encode()}
            return salt, text_content(text_seed(told), parts), 200 * len(path)
    return salt, session_content("", b"%d" % path[0], salt.encode()), 200 * len(path)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(WORKERS), contents()), max_size=30),
    st.lists(contents(), min_size=1, max_size=5),
    st.integers(0, 2000),
    st.integers(0, 30),
)
def test_kept_guesses_are_fresh_ones(
    sent: list[tuple[str, tuple[str, Content | None, int]]],
    waiting: list[tuple[str, Content | None, int]],
    most_tokens: int,
    begins: int,
) -> None:
    """The last worker begins to publish KV events at some time, which tell nothing of texts."""
    prefixes, seen = Prefixes(10_000), set()
    for now_s, (worker, (salt, content, tokens)) in enumerate(sent):
        assert content is not None
        if now_s == begins:
            first = structs.replace(snapshot("full", 1), cache_block=16)
            prefixes.heard(WORKERS[-1], first, float(now_s), texts=False)
        prefixes.guess(worker, content, tokens, float(now_s), most_tokens)
        seen.add((worker, salt))
        for number, (its, asked, size) in enumerate(waiting):
            found = list(prefixes.hits(Request(token(number), "", size, content=asked), WORKERS))
            other = Request(token(100 + number), "", size, content=asked)
            assert found == list(prefixes.hits(other, WORKERS))
            prefixes.forget(other.id)
            for each, cached in zip(WORKERS, found, strict=True):
                assert 0 <= cached <= min(most_tokens, size - 1)
                assert not cached or (each, its) in seen, "salts share nothing"
