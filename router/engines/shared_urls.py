"""URLs behind which there are several ranks."""

from __future__ import annotations

from collections.abc import Iterable

from router.types import WorkerSpec


class SharedUrls:
    """Contains the URLs of which a request has to say which rank is meant.

    It has to from the second rank on, whoever leaves: else the engine would choose among all that
    it has, those that have left included.

    Args:
        specs: the workers.
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
        """All of them."""
        return frozenset(self._shared)

    def join(self, spec: WorkerSpec) -> None:
        """One more worker."""
        if spec.url in self._url_of.values():
            self._shared.add(spec.url)
        self._url_of[spec.id] = spec.url

    def leave(self, worker_id: str) -> None:
        """A worker is gone."""
        del self._url_of[worker_id]
