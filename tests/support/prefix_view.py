"""What a router knows of a prefix cache that has read every message."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import takewhile

from router.core.types import PromptChain, Snapshot


class PrefixView:
    """Ids of the blocks held, and the chains of requests."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.chains: dict[str, list[PromptChain]] = {}

    def apply(self, snapshot: Snapshot) -> None:
        if snapshot.blocks_cleared or snapshot.kind == "full":
            self.held.clear()
        removed = {*array("Q", snapshot.blocks_removed)}
        stored = [*array("Q", snapshot.blocks_stored)]
        # Net changes: nothing is removed that was not held, and nothing stored that was.
        assert removed <= self.held
        self.held -= removed
        assert self.held.isdisjoint(stored)
        self.held.update(stored)
        assert len(stored) == len({*stored})
        for one in snapshot.chains:
            self.chains.setdefault(one.id, []).append(one)

    def all_of(self, snapshots: Iterable[Snapshot]) -> PrefixView:
        for one in snapshots:
            self.apply(one)
        return self

    def leading(self, ids: bytes) -> int:
        """Number of leading blocks of a chain that are held."""
        return len([*takewhile(self.held.__contains__, array("Q", ids))])

    def chain(self, id_: str) -> bytes:
        """Ids of all its blocks; each part begins where the one before ends."""
        told = b""
        for one in self.chains.get(id_, ()):
            assert one.first * 8 == len(told)
            told += one.blocks
        return told
