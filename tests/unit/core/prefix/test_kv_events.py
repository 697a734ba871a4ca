"""What vLLM's KV events tell, as ids and snapshots of the cache."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from router.core.errors import SnapshotError
from router.core.prefix.ids import chain, seed
from router.core.prefix.kv_events import KvEvent, KvEventStream, decode_events
from router.core.prefix.prefixes import Prefixes
from router.core.types import Content, Request, Snapshot
from tests.support.core import token

PROMPT = list(range(3, 163))
SIZE = 16


def stored(first: int, last: int, prompt: list[int] = PROMPT, **more: Any) -> KvEvent:
    """Blocks of a prompt, with their numbers as hashes."""
    fields: dict[str, Any] = {
        "block_hashes": [*range(first, last)],
        "parent_block_hash": first - 1 if first else None,
        "token_ids": prompt[first * SIZE : last * SIZE],
        "block_size": SIZE,
        "medium": "GPU",
        "group_idx": 0,
    }
    return KvEvent("BlockStored", **{**fields, **more})


def removed(*hashes: int | bytes, **more: Any) -> KvEvent:
    fields = {"block_hashes": [*hashes], "medium": "GPU", "group_idx": 0, **more}
    return KvEvent("BlockRemoved", **fields)


class Told:
    """A worker's events, and the prefixes that they feed."""

    def __init__(self, *, repeats: bool = False, **more: int) -> None:
        self.stream = KvEventStream(repeats, **more)
        self.prefixes = Prefixes(10_000)
        self.number = 0

    def tell(self, *events: KvEvent) -> None:
        self.hear(self.stream.published(self.number, [*events]))
        self.number += 1

    def hear(self, snapshots: Iterable[Snapshot]) -> None:
        for one in snapshots:
            self.prefixes.heard("a", one, 0.0)

    def hits(self, prompt: list[int] = PROMPT, lora: str = "", salt: str = "") -> int:
        """Blocks of a prompt that count as cached; a token follows it."""
        content = Content(pieces=chain(prompt, seed(lora, salt)))
        request = Request(token(1), "g", len(prompt) + 1, content=content)
        self.prefixes.forget(request.id)
        return self.prefixes.hits(request, ("a",))[0] // SIZE


def test_blocks_follow_from_their_parents() -> None:
    told = Told()
    told.tell(stored(0, 3))
    told.tell(stored(3, 5), stored(7, 9))
    assert told.hits() == 5
    assert told.prefixes.held("a") == 5, "6 is unknown, and so are those after it"
    told.tell(removed(4), stored(5, 6))
    assert told.hits() == 4
    told.tell(removed(9, 3))
    assert told.hits() == 3
    told.tell(KvEvent("AllBlocksCleared"), stored(0, 1))
    assert (told.hits(), told.prefixes.held("a")) == (1, 1)
    told.tell(stored(1, 2))
    told.tell(KvEvent("AllBlocksCleared"))
    assert told.prefixes.held("a") == 0


def test_the_last_change_of_a_message_counts() -> None:
    told = Told()
    told.tell(stored(0, 2), removed(1), stored(1, 3), removed(2))
    assert told.hits() == 2


def test_blocks_in_the_memory_of_the_cpu_stay_cached() -> None:
    told = Told()
    told.tell(stored(0, 3))
    told.tell(stored(0, 3, medium="CPU"), stored(1, 3, medium="CPU"))
    told.tell(removed(0, 1, 2))
    assert told.hits() == 3, "the engine loads them"
    told.tell(removed(2, medium="CPU"), removed(2, medium="CPU"))
    assert told.hits() == 2
    told.tell(stored(0, 1))
    told.tell(removed(0, 1, medium="CPU"))
    assert told.hits() == 1


@pytest.mark.parametrize(
    "event",
    [
        removed(0, medium="CPU"),
        stored(0, 2, medium="CPU", group_idx=1),
        stored(2, 3, medium="CPU"),
        stored(0, 2, medium="STORAGE"),
        removed(0, medium="STORAGE"),
    ],
)
def test_what_is_not_cached_as_it_enters_the_memory_of_the_cpu_does_not_count(
    event: KvEvent,
) -> None:
    told = Told()
    told.tell(stored(0, 2), event)
    told.tell(stored(0, 2), removed(0, 1))
    told.tell(removed(0, 1))
    assert told.hits() == 0


def test_a_reset_forgets_the_memory_of_the_cpu() -> None:
    told = Told()
    told.tell(stored(0, 2), stored(0, 2, medium="CPU"))
    told.tell(KvEvent("AllBlocksCleared"), stored(0, 2))
    told.tell(removed(0, 1))
    assert told.hits() == 0


def test_after_a_gap_the_next_that_leaves_either_memory_counts() -> None:
    told = Told()
    told.tell(stored(0, 2), stored(0, 2, medium="CPU"))
    told.number += 1
    told.tell(removed(1))
    assert told.hits() == 1
    told.tell(stored(0, 1), stored(0, 1, medium="CPU"))
    told.tell(removed(0))
    assert told.hits() == 1


def test_a_block_is_gone_when_all_that_have_its_content_are() -> None:
    told = Told()
    told.tell(stored(0, 2), stored(0, 2))
    told.tell(removed(0))
    assert told.hits() == 2
    told.tell(removed(0))
    assert told.hits() == 0


def test_adapters_and_salts_are_kept_apart() -> None:
    told = Told()
    told.tell(
        stored(0, 2, lora_id=1, lora_name="l", extra_keys=[["l", "s"], ["l"]]),
        stored(2, 3, lora_id=1, lora_name="l", extra_keys=[["l"]]),
    )
    assert [told.hits(), told.hits(lora="l"), told.hits(salt="s")] == [0, 0, 0]
    assert told.hits(lora="l", salt="s") == 3
    told.tell(stored(0, 2, block_hashes=[b"a", b"b"], extra_keys=[["s"], None]))
    assert told.hits(salt="s") == 2
    told.tell(stored(0, 1, block_hashes=[b"c"], lora_id=1))
    assert told.hits() == 0, "nobody knows which adapter"


@pytest.mark.parametrize(
    "more",
    [
        {"extra_keys": [[["image", 3]], None]},
        {"extra_keys": [[b"digest"], None]},
        {"extra_keys": [["salt", "more"], None]},
        {"token_ids": PROMPT[:20]},
        {"block_hashes": [1]},
        {"medium": "CPU"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"block_size": 20, "token_ids": PROMPT[:40]},
        {"block_size": 0},
        {"block_size": -16},
    ],
)
def test_what_has_no_ids_is_left_out(more: dict[str, Any]) -> None:
    told = Told()
    told.tell(stored(0, 2, **more), stored(2, 4))
    assert not told.prefixes.held("a")
    told.tell(stored(0, 2), KvEvent("Other"))
    assert told.hits() == 2


def test_one_group_of_blocks_of_one_size_is_told() -> None:
    told = Told()
    told.tell(stored(0, 4), removed(3, group_idx=1))
    told.tell(stored(4, 5, group_idx=1), stored(4, 5, block_size=8, token_ids=PROMPT[64:72]))
    assert told.hits() == 4


def test_embeddings_end_what_is_told_of_a_prompt() -> None:
    told = Told()
    told.tell(stored(0, 3, extra_keys=[None, [["image", 3]], None]), stored(3, 4))
    assert told.hits() == 1


def test_memory_is_bounded() -> None:
    told = Told(most_blocks=3)
    told.tell(stored(0, 5), stored(0, 1))
    assert told.hits() == 3
    told.tell(removed(2, 2), stored(2, 4))
    assert told.hits() == 3


def test_a_publisher_that_starts_anew_has_an_empty_cache() -> None:
    told = Told()
    told.tell(stored(0, 5))
    told.number = 0
    told.tell(stored(0, 2))
    assert told.hits() == 2


def test_without_repetition_it_goes_on_with_what_it_knows() -> None:
    told = Told()
    told.tell(stored(0, 2))
    told.number = 7
    told.tell(stored(4, 5), stored(2, 3))
    assert told.hits() == 3
    assert told.stream.missing is None


def test_what_was_missed_is_asked_for() -> None:
    told = Told(repeats=True)
    assert told.stream.missing == 0, "at the start"
    told.number = 2
    told.tell(stored(3, 4))
    assert not told.prefixes.told
    told.hear(told.stream.repeated(0, [stored(0, 2)]))
    told.hear(told.stream.repeated(0, [KvEvent("AllBlocksCleared")]))
    told.hear(told.stream.repeated(1, [stored(2, 3)]))
    assert told.hits() == 3
    told.tell(stored(4, 5))
    told.hear(told.stream.repeated(2, [stored(3, 4)]))
    told.hear(told.stream.complete())
    assert told.hits() == 5
    assert told.stream.missing is None
    told.hear(told.stream.repeated(9, [removed(0)]))
    assert told.hits() == 5, "nobody has asked"
    told.number = 5
    told.tell(stored(6, 7))
    assert told.stream.missing == 4
    told.hear(told.stream.complete())
    assert told.hits() == 5, "it had been thrown away: 6 has no parent"


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.core.prefix.kv_events._MOST_HELD", 2)
    told = Told(repeats=True)
    for place in range(3):
        told.tell(stored(place, place + 1))
    assert (told.hits(), told.stream.missing) == (3, None)


@pytest.mark.parametrize("size", [0, 1 << 63])
def test_no_engine_has_blocks_of_such_a_size(size: int) -> None:
    told = Told()
    told.tell(stored(0, 0, block_size=size))
    told.tell(stored(0, 3))
    assert told.hits() == 3


def test_a_removal_that_was_lost_is_made_up_for_by_the_next() -> None:
    told = Told()
    told.tell(stored(0, 2))
    told.number += 1  # its removal
    told.tell(stored(0, 2))
    told.tell(removed(1))
    assert told.hits() == 1


def test_repetitions_that_are_lost_on_the_way_are_asked_for_again() -> None:
    told = Told(repeats=True)
    stream = told.stream
    told.hear(stream.published(9, [stored(9, 10)]))
    told.hear(stream.repeated(0, [stored(0, 2)]))
    told.hear(stream.repeated(4, [stored(4, 6)]))
    told.hear(stream.complete())
    assert (stream.missing, told.hits()) == (1, 2), "between them some were lost"
    told.hear(stream.repeated(1, [stored(2, 4)]))
    told.hear(stream.complete())
    assert stream.missing == 2, "the end was lost"
    for number, blocks in ((2, (4, 6)), (3, (6, 9))):
        told.hear(stream.repeated(number, [stored(*blocks)]))
    told.hear(stream.complete())
    assert stream.missing == 4, "what is held comes later still"
    told.hear(stream.complete())
    assert told.hits() == 10
    assert told.stream.missing is None


def test_messages_are_vllm_s() -> None:
    event = {"type": "BlockStored", "block_hashes": [1, b"x"], "more": {"a": 1}, "lora_id": None}
    batch = [1.5, [event, {"type": "New", "field": 3}], 0, "more"]
    first, second = decode_events(msgspec.msgpack.encode(batch))
    assert (first.block_hashes, second.type) == ([1, b"x"], "New")
    for wrong in (b"", b"\xff", msgspec.msgpack.encode([1.0, [{"block_hashes": 3}]])):
        with pytest.raises(SnapshotError, match="no batch of KV events"):
            decode_events(wrong)
