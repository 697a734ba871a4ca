"""A tier of waiting requests, from which a policy may choose freely."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import overload

import numpy as np

from router.core.forecast.forecast import Ints
from router.core.types import Assignment, Request

_ID, _PROMPT_TOKENS, _SLOTS = attrgetter("id"), attrgetter("prompt_tokens"), attrgetter("slots")


@dataclass(frozen=True, slots=True, eq=False)
class Tier(Sequence[Request]):
    """Requests, oldest first, with columns of shape (R,) of what is needed of all.

    To touch every request of a long pool costs more than the choice among them. Workers in
    ``avoid`` failed them; those in ``lacks`` do not serve their model. ``adapter`` is that of all;
    empty: they have none, or no worker is short of places for adapters.
    """

    requests: Sequence[Request]
    prompt_tokens: Ints
    slots: Ints
    by_id: Mapping[str, Request]
    avoid: Set[str] = frozenset()
    lacks: Set[str] = frozenset()
    adapter: str = ""

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        avoid: Set[str] = frozenset(),
        lacks: Set[str] = frozenset(),
        adapter: str = "",
    ) -> Tier:
        if isinstance(requests, Tier):
            return requests
        count = len(requests)
        return cls(
            requests,
            np.fromiter(map(_PROMPT_TOKENS, requests), dtype=np.int64, count=count),
            np.fromiter(map(_SLOTS, requests), dtype=np.int64, count=count),
            dict(zip(map(_ID, requests), requests, strict=True)),
            avoid=avoid,
            lacks=lacks,
            adapter=adapter,
        )

    def of_same(self, requests: Sequence[Request]) -> Tier:
        """These requests of the tier, for which the same workers are eligible."""
        return Tier.of(requests, self.avoid, self.lacks, self.adapter)

    def of_those(self, ids: Set[str]) -> Tier:
        """Only these requests, as far as they are in the tier."""
        return self.of_same([each for each in self.requests if each.id in ids])

    def without(self, entered: Iterable[Assignment], most: int | None = None) -> Tier:
        """Those that have not entered; so many of the oldest, or all."""
        ids = {each.request_id for each in entered}
        left = (each for each in self.requests if each.id not in ids)
        return self.of_same(list(islice(left, most)))

    def parts(self, late_since: float = -math.inf, *, by_adapter: bool = False) -> Iterator[Tier]:
        """Subtiers by eligible workers.

        Those with requests that arrived up to ``late_since`` come by age. Else the one that may go
        to all comes last.
        """

        def turn(part: tuple[tuple[Set[str], str], Sequence[Request]]) -> tuple[float, bool]:
            (lacks, _), requests = part
            return min(requests[0].arrival_s, late_since), not lacks

        alike: dict[tuple[frozenset[str], str], list[Request]] = {}
        for request in self.requests:
            key = request.lacks, request.adapter if by_adapter else ""
            alike.setdefault(key, []).append(request)
        for (lacks, adapter), requests in sorted(alike.items(), key=turn):
            yield Tier.of(requests, self.avoid, lacks, adapter)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self.requests[index]
