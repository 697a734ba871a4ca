"""What an engine without the plug-in has cached, by the KV events that vLLM publishes.

Its block hashes are its own, so each is followed to our id: a block's id follows from its parent's
and its tokens. A block whose parent or adapter is unknown is left out, and so are all after it;
likewise blocks of images and other embeddings, for which no router computes ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from router.core.errors import SnapshotError
from router.core.prefix.ids import PIECE_TOKENS, block_ids, chain, seed
from router.core.types import Snapshot

MOST_BLOCKS = 1 << 20
# Of a block; vLLM's have some hundreds.
_MOST_TOKENS = 1 << 20
# Messages that wait until the engine has repeated those before.
_MOST_HELD = 4096
# Attention whose blocks are a whole prompt's; None: the engine does not say.
_WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention")

Hash = int | bytes


class KvEvent(msgspec.Struct, gc=False):
    """The fields of all events of vLLM's ``distributed/kv_events.py`` that matter."""

    type: str
    block_hashes: list[Hash] = []
    parent_block_hash: Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[KvEvent]


_decoder = msgspec.msgpack.Decoder(_Batch)


def decode_events(batch: bytes) -> list[KvEvent]:
    """Decode a message; raises ``SnapshotError`` if it is none."""
    try:
        return _decoder.decode(batch).events
    except (msgspec.DecodeError, ValueError) as error:
        raise SnapshotError(f"no batch of KV events: {error}") from None


class KvEventStream:
    """The events of one engine, as snapshots that tell of the cache alone.

    Messages are numbered from 0. While an engine repeats what was missed, later ones are held.

    Args:
        repeats: whether the engine can be asked for earlier messages.

    Attributes:
        missing: number from which on it should be asked; None: nothing is missing.
        starts: times that it has begun with an empty cache.
    """

    def __init__(self, repeats: bool, most_blocks: int = MOST_BLOCKS) -> None:
        self._repeats = repeats
        self._most_blocks = most_blocks
        self.starts = 0
        self.begin()

    def begin(self) -> None:
        """Forget all: the engine's cache may be another one."""
        self.starts += 1
        self._told = 0
        self._next, self._last = 0, -1
        self._held: dict[int, list[KvEvent]] = {}
        self.missing = 0 if self._repeats else None
        self._cut = False  # whether messages that the engine repeats were lost on the way
        self._block_tokens = 0
        self._group: int | None = None
        # Our id of each hash, and how many blocks have it.
        self._known: dict[Hash, tuple[bytes, int]] = {}
        self._offloaded: set[Hash] = set()  # in the CPU's memory too: a further copy

    def published(self, number: int, events: list[KvEvent]) -> Iterator[Snapshot]:
        """A message has arrived; they arrive in order, unless some are lost."""
        if number <= self._last:
            self.begin()
        self._last = number
        if self.missing is None and self._repeats and number > self._next:
            self.missing = self._next
        if self.missing is None:
            yield from self._apply(number, events)
            return
        self._held[number] = events
        if len(self._held) > _MOST_HELD:
            yield from self.complete()

    def repeated(self, number: int, events: list[KvEvent]) -> Iterator[Snapshot]:
        """The engine has sent an earlier message again; the first is the oldest that it has."""
        if self.missing is None or number < self._next:
            return
        self._cut |= number > self._next > self.missing
        if not self._cut:
            yield from self._apply(number, events)

    def complete(self) -> Iterator[Snapshot]:
        """The engine has repeated all that it still had, or does not answer.

        It sends up to 10,000 messages at once, more than sockets hold. What was lost is asked for
        again as long as some arrive.
        """
        came = self.missing is not None and self._next > self.missing
        if came and (self._cut or next(iter(self._held), 0) > self._next):
            self.missing, self._cut = self._next, False
            return
        self.missing, self._cut = None, False
        held, self._held = self._held, {}
        for number, events in held.items():
            if number >= self._next:
                yield from self._apply(number, events)

    def _apply(self, number: int, events: list[KvEvent]) -> Iterator[Snapshot]:
        if number > self._next:  # what was lost may have removed any: the next removal counts
            self._known = {hash_: (id_, 0) for hash_, (id_, _) in self._known.items()}
            self._offloaded.clear()
        self._next = number + 1
        changes: dict[bytes, bool] = {}  # the last one of each block counts
        cleared = False
        for event in events:
            if event.medium == "CPU" and event.group_idx == self._group:
                self._move(event, changes)
            if event.medium not in (None, "GPU"):
                continue
            if event.type == "BlockStored" and event.kv_cache_spec_kind in _WHOLE:
                self._store(event, changes)
            elif event.type == "BlockRemoved" and event.group_idx == self._group:
                self._remove(event.block_hashes, changes)
            elif event.type == "AllBlocksCleared":
                self._known.clear()
                self._offloaded.clear()
                changes.clear()
                cleared = True
        if not self._block_tokens or not (changes or cleared or not self._told):
            return
        self._told += 1
        yield Snapshot(
            kind="full" if self._told == 1 else "delta",
            group="",
            worker="",
            rank=0,
            epoch=f"events {self.starts}",
            sequence=self._told,
            step=0,
            time_s=0.0,
            step_s=0.0,
            cache_block=self._block_tokens,
            blocks_cleared=cleared,
            blocks_stored=b"".join(id_ for id_, stored in changes.items() if stored),
            blocks_removed=b"".join(id_ for id_, stored in changes.items() if not stored),
        )

    def _store(self, event: KvEvent, changes: dict[bytes, bool]) -> None:
        size, hashes = event.block_size, event.block_hashes
        if not 0 < size <= _MOST_TOKENS:
            return
        if not self._block_tokens and not size % PIECE_TOKENS:
            self._block_tokens, self._group = size, event.group_idx
        if (size, event.group_idx) != (self._block_tokens, self._group):
            return  # a part of a block, or another group's
        parent = self._parent(event)
        if parent is None or len(event.token_ids) != size * len(hashes):
            return
        extra = event.extra_keys or [None] * len(hashes)
        first = event.parent_block_hash is None
        own = array("Q", block_ids(chain(event.token_ids, parent), size))
        for place, (hash_, keys) in enumerate(zip(hashes, extra, strict=False)):
            if not _plain(keys, event.lora_name, salted=first and not place):
                return
            before = self._known.get(hash_)
            if before is None and len(self._known) >= self._most_blocks:
                return
            id_ = own[place : place + 1].tobytes()
            self._known[hash_] = id_, 1 if before is None else before[1] + 1
            changes[id_] = True

    def _parent(self, event: KvEvent) -> bytes | None:
        if event.parent_block_hash is not None:
            known = self._known.get(event.parent_block_hash)
            return None if known is None else known[0]
        if event.lora_id is not None and event.lora_name is None:
            return None
        keys = (event.extra_keys or [None])[0] or []
        salts = keys[1:] if event.lora_name else keys
        return seed(event.lora_name or "", str(salts[0]) if salts else "")

    def _move(self, event: KvEvent, changes: dict[bytes, bool]) -> None:
        """Blocks enter or leave the CPU's memory, from where the engine loads them.

        Such events leave out salts and images, so a block counts if it is cached as it enters.
        """
        if event.type == "BlockStored":
            for hash_ in self._known.keys() & {*event.block_hashes} - self._offloaded:
                id_, blocks = self._known[hash_]
                self._known[hash_] = id_, blocks + 1
                self._offloaded.add(hash_)
        elif left := self._offloaded & {*event.block_hashes}:
            self._offloaded -= left
            self._remove(left, changes)

    def _remove(self, hashes: Iterable[Hash], changes: dict[bytes, bool]) -> None:
        for hash_ in hashes:
            id_, blocks = self._known.pop(hash_, (b"", 0))
            if blocks > 1:
                self._known[hash_] = id_, blocks - 1
            elif id_:
                changes[id_] = False


def _plain(keys: list[Any] | None, lora: str | None, *, salted: bool) -> bool:
    """Whether a block has nothing beside its tokens but adapter and, if the first one, salt.

    vLLM names them in this order, and images and embeddings as something that is no text.
    """
    beside = (keys or [])[1 if lora else 0 :]
    return len(beside) <= salted and all(isinstance(key, str) for key in beside)
