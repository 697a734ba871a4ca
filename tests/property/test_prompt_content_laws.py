from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.emulator.prompt_content import Content, whole_tokens
from loadgen.emulator.text import CHARS_PER_TOKEN, estimate_text_tokens

ids = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
texts = st.text(max_size=120)
sizes = st.integers(1, 9)


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@settings(deadline=None)
@given(ids, ids, ids, sizes)
def test_chains_are_alike_as_far_as_tokens_are(
    shared: list[int], one: list[int], other: list[int], size: int
) -> None:
    chains = [Content([*shared, *rest]).chain(size, "m") for rest in (one, other)]
    tokens = [[*shared, *rest] for rest in (one, other)]
    same = alike(*map(tuple, tokens))
    assert [len(chain) for chain in chains] == [len(each) // size for each in tokens]
    assert alike(*chains) == same // size


@settings(deadline=None)
@given(texts, texts, sizes)
def test_chains_of_texts_are_alike_as_far_as_characters_are(
    one: str, other: str, size: int
) -> None:
    texts = [whole_tokens(one), whole_tokens(one + other)]
    chains = [Content(text).chain(size, "m") for text in texts]
    assert [len(text) // CHARS_PER_TOKEN for text in texts] == [
        estimate_text_tokens(one),
        estimate_text_tokens(one + other),
    ]
    codes = [tuple(map(ord, text)) for text in texts]
    assert alike(*chains) == alike(*codes) // (size * CHARS_PER_TOKEN)


@settings(deadline=None)
@given(ids.filter(len), texts.filter(len), st.text(), st.text())
def test_a_salt_separates_everything(tokens: list[int], text: str, one: str, other: str) -> None:
    for content in (Content(tokens), Content(whole_tokens(text))):
        chains = [content.chain(1, salt) for salt in (one, other)]
        assert (chains[0] == chains[1]) == (one == other)
        assert not set(chains[0]) & set(chains[1]) or one == other


@settings(deadline=None)
@given(texts, st.data())
def test_token_ids_are_those_of_the_tokens(text: str, data: st.DataObject) -> None:
    whole = whole_tokens(text)
    tokens = len(whole) // CHARS_PER_TOKEN
    start = data.draw(st.integers(0, tokens))
    every = Content(whole).ids(0, tokens)
    assert Content(whole).ids(start, tokens) == every[start:]
    assert Content([5, 6, 7]).ids(1, 3) == [6, 7]


def test_token_ids_beyond_any_vocabulary_have_a_chain() -> None:
    assert len(Content([2**70, 1]).chain(1, "m")) == 2
