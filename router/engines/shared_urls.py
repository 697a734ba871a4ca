from __future__ import annotations

from collections.abc import Iterable

from router.core.types import WorkerSpec


class SharedUrls:
    """URLs shared by several ranks: requests there must name the rank.

    Once shared, always shared: otherwise the engine would choose among all its ranks, also those
    that left.
    """

    def __init__(self, specs: Iterable[WorkerSpec]) -> None:
        self._url_of: dict[str, str] = {}
        self._shared: set[str] = set()
        for spec in specs:
            self.join(spec)

    def __contains__(self, url: object) -> bool:
        return url in self._shared

    @property
    def all(self) -> frozenset[str]:
        return frozenset(self._shared)

    def join(self, spec: WorkerSpec) -> None:
        if spec.url in self._url_of.values():
            self._shared.add(spec.url)
        self._url_of[spec.id] = spec.url

    def leave(self, worker_id: str) -> None:
        del self._url_of[worker_id]
