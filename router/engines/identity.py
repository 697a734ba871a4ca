"""Whether a state stream is that of the worker which it is configured for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from router.settings.worker_specs import unnamed
from router.types import Snapshot, WorkerSpec

_DEFAULT_GROUP = "default"


def given_names(specs: Iterable[WorkerSpec]) -> Mapping[str, str | None]:
    """By id the name that an engine's snapshots may be expected to have, None where there is none.

    Ranks behind one URL are one engine to its user, under one name if any: their ranks differ.
    """
    specs = list(specs)
    workers_at = Counter(spec.url for spec in specs)
    return {
        spec.id: None
        if workers_at[spec.url] > 1 or spec.id == unnamed(spec.url, spec.rank)
        else spec.id
        for spec in specs
    }


def foreign_stream(spec: WorkerSpec, named: str | None, snapshot: Snapshot) -> str | None:
    """Why a snapshot cannot be this worker's; None if it may be.

    What was left at its default on one side says nothing: a worker without ``rank``, the group
    ``default``, the name that the plug-in makes of group and rank.

    Args:
        spec: the worker.
        named: its name, if the user gave it one and it has its URL for itself.
        snapshot: what its stream said.
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
