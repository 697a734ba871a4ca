"""Ids of pieces: what else decides them beside tokens."""

from router.core.prefix.ids import chain, packed_tokens, seed


def test_multimodal_content_changes_its_piece_and_all_after_it() -> None:
    tokens = list(range(64))
    plain, pictured = chain(tokens, seed()), chain(tokens, seed(), {2: b"cat"})
    assert plain[:16] == pictured[:16]
    assert not {plain[16:24], plain[24:]} & {pictured[16:24], pictured[24:]}


def test_tokens_of_any_size_are_packed() -> None:
    assert packed_tokens([1, -1]) == packed_tokens([1, 0xFFFF_FFFF])
    assert len(packed_tokens([1 << 40, 2])) == 8
