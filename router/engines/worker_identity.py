"""Which worker a snapshot stream belongs to, and which ranks share a URL."""

from collections import Counter
from collections.abc import Iterable, Mapping

from router.core.types import Snapshot, WorkerSpec
from router.core.worker_specs import default_worker_id

_DEFAULT_GROUP = "default"


def given_names(specs: Iterable[WorkerSpec]) -> Mapping[str, str | None]:
    """Expected snapshot names by worker id; ranks behind one URL have one name, if any."""
    specs = list(specs)
    workers_at = Counter(spec.url for spec in specs)
    return {
        spec.id: None
        if workers_at[spec.url] > 1 or spec.id == default_worker_id(spec.url, spec.rank)
        else spec.id
        for spec in specs
    }


def foreign_stream(spec: WorkerSpec, named: str | None, snapshot: Snapshot) -> str | None:
    """Why a snapshot cannot be this worker's, None if it may be.

    Defaults prove nothing: no ``rank``, the group ``default``, the plug-in's name of group and
    rank. ``named``: the user's name of a worker with a URL of its own.
    """
    rank, group = spec.rank, spec.group
    if rank is not None and rank != snapshot.rank:
        return _mismatch("rank", rank, snapshot.rank)
    if group != snapshot.group and _DEFAULT_GROUP not in (group, snapshot.group):
        return _mismatch("group", group, snapshot.group)
    nameless = snapshot.worker in ("", f"{snapshot.group}-{snapshot.rank}")
    if named is not None and not nameless and named != snapshot.worker:
        return _mismatch("worker", named, snapshot.worker)
    return None


def _mismatch(what: str, wanted: object, told: object) -> str:
    return (
        f"the stream is that of {what} {told}, not of {what} {wanted}: "
        "correct the worker's snapshots=, or what it is called on either side"
    )


class SharedUrls:
    """URLs shared by several ranks: requests there must name the rank.

    Once shared, always shared: else the engine would choose among all ranks, also those that left.
    """

    def __init__(self, specs: Iterable[WorkerSpec]) -> None:
        self._url_of: dict[str, str] = {}
        self.shared: set[str] = set()
        for spec in specs:
            self.join(spec)

    def join(self, spec: WorkerSpec) -> None:
        if spec.url in self._url_of.values():
            self.shared.add(spec.url)
        self._url_of[spec.id] = spec.url

    def leave(self, worker_id: str) -> None:
        del self._url_of[worker_id]
