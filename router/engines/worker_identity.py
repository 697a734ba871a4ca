"""Check that a snapshot stream belongs to its configured worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from router.core.types import Snapshot, WorkerSpec
from router.core.worker_specs import default_worker_id

_DEFAULT_GROUP = "default"


def given_names(specs: Iterable[WorkerSpec]) -> Mapping[str, str | None]:
    """Expected snapshot names by worker id, None where there is none.

    For the user, ranks behind one URL are one engine with one name, if any: their ranks differ.
    """
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

    Defaults on either side prove nothing: no ``rank``, the group ``default``, or the plug-in's name
    of group and rank. ``named`` is the user's name of a worker with a URL of its own.
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
