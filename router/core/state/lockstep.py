"""Which groups are in lockstep, where no worker steps without all others: as set, else as told.

Steps alone do not decide it: they do not show whether a worker can go on without the others, and
replicas that begin together count alike for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.core.state.group import Group
    from router.core.state.worker import Worker

_PROOF = 500  # contested steps that say whether its workers step together


def told_ranks(workers: Iterable[Worker]) -> int:
    """The least number of ranks in lockstep that a worker's engine has told; 0: none has."""
    return min((worker.ranks for worker in workers if worker.ranks), default=0)


def source(group: Group) -> str:
    """Who says whether a group is in lockstep: ``setting``, ``engines`` or ``nobody``."""
    if group.imposed is not None:
        return "setting"
    return "engines" if told_ranks(group.workers.values()) else "nobody"


def doubt(group: Group) -> str:
    """What steps or engines say against it, as a line of the log; empty: nothing."""
    ranks, workers = told_ranks(group.workers.values()), len(group.workers)
    sure = group.every_step.contested_steps >= _PROOF
    together = group.barrier if sure else None
    if group.lockstep:
        if together is False:
            return "it is in lockstep, but its workers do not step together"
    elif group.imposed is not None:
        return ""
    elif 1 < ranks < workers:
        return f"{ranks} ranks are in lockstep, and it has {workers} workers: one group for each"
    elif together and not ranks:
        return f"its workers step together; if none can alone, set --lockstep {group.name}"
    elif workers > 1 and not any(w.feed or w.spec.snapshots for w in group.workers.values()):
        told = f"--lockstep {group.name}, or {group.name}=no"
        return f"without the plug-in nobody tells if it is in lockstep: {told}"
    return ""
