from array import array

from router.core.prefix.text_chunks import CHUNK_BYTES, PART_END, seed, text_content
from router.core.types import Content

ROOT = seed({"model": b"m"})


def chunks(content: Content) -> list[bytes]:
    return [content.chunks[at : at + 8] for at in range(0, len(content.chunks), 8)]


def sizes(content: Content) -> list[int]:
    return list(array("I", content.sizes))


def test_a_part_ends_where_a_chunk_ends() -> None:
    content = text_content(ROOT, [b"a" * (CHUNK_BYTES + 3), b"b"])
    assert chunks(content)[0] == ROOT
    assert sizes(content) == [PART_END, CHUNK_BYTES, PART_END | 3, PART_END | 1]
    assert sizes(text_content(ROOT, [b"a" * CHUNK_BYTES, b""])) == [
        PART_END,
        PART_END | CHUNK_BYTES,
    ]


def test_the_next_turn_has_all_chunks_of_the_turn_before() -> None:
    turn = text_content(ROOT, [b"system", b"user" * 300])
    following = text_content(ROOT, [b"system", b"user" * 300, b"answer", b"user"])
    assert following.chunks.startswith(turn.chunks)


def test_a_chunk_stands_for_all_before_it() -> None:
    one, other = (text_content(ROOT, [first, b"same"]) for first in (b"x", b"y"))
    assert not set(chunks(one)[1:]) & set(chunks(other)[1:])


def test_what_decides_a_prompt_keeps_texts_apart() -> None:
    roots = [
        seed({}),
        seed({"model": b"m"}),
        seed({"model": b"m", "salt": b"s"}),
        seed({"model": b"m 4 salts"}),
        seed({"salt": b"m"}),
    ]
    assert len(set(roots)) == len(roots)
    texts = [chunks(text_content(root, [b"same text"]))[1] for root in roots]
    assert len(set(texts)) == len(roots)


def test_media_in_a_message_make_few_chunks() -> None:
    """Their number grows with the logarithm of a part's size."""
    content = text_content(ROOT, [bytes(8 << 20)])
    told = [size & ~PART_END for size in sizes(content)]
    assert sum(told) == 8 << 20
    assert len(told) < 2_500
    assert told[1:512] == [CHUNK_BYTES] * 511
    at = 0
    for size in told:
        assert size <= max(CHUNK_BYTES, at / 200)
        at += size
