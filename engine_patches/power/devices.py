"""The GPUs of a rank, as far as its scheduler's process can know them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAMES_GPU = re.compile(r"[0-9]+$|GPU-|MIG-")


class UnknownGpusError(Exception):
    """The rank's GPUs are unknown here; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class RankGpus:
    """Facts of vLLM on one data-parallel rank's GPUs."""

    count: int  # on all its machines
    local_rank: int  # number of the rank among those of this machine
    machines: int = 1
    # Component that chose its GPUs unknown to this process; None: vLLM itself, in the order of the
    # visible ones.
    placed_by: str | None = None
    # GPUs of all ranks of the machine, from the option ``--device-ids``.
    assigned: Sequence[int] | None = None


def rank_devices(rank: RankGpus, visible: str | None) -> tuple[str, ...]:
    """Index or UUID of each GPU of a rank: all or none, as a part would pass as the whole.

    ``visible`` is the value of ``CUDA_VISIBLE_DEVICES``. UnknownGpusError: they are elsewhere, too
    few are visible, or CUDA rejects the list.
    """
    if rank.placed_by is not None:
        raise UnknownGpusError(
            f"{rank.placed_by} has chosen the rank's GPUs, and {VISIBLE} of this process does not "
            "say which: run evenstep agent on the machine that has them"
        )
    if rank.machines > 1:
        raise UnknownGpusError(
            f"the rank's {rank.count} GPUs are on {rank.machines} machines, and NVML shows those "
            "of one: meter them outside of evenstep, or keep a rank on one machine"
        )
    first, ends_early = rank.local_rank * rank.count, False
    if rank.assigned is not None:
        devices = [str(index) for index in rank.assigned]
    elif visible is None:
        return tuple(str(index) for index in range(first, first + rank.count))
    else:
        names = [name.strip() for name in visible.split(",")]
        # CUDA stops at the first entry that is no GPU, such as -1.
        devices = [*takewhile(_NAMES_GPU.match, names)]
        ends_early = any(names[len(devices) :])
        if len(set(devices)) < len(devices):
            raise UnknownGpusError(f"{VISIBLE} names a GPU twice, and CUDA shows none: {visible}")
    found = devices[first : first + rank.count]
    if not found and not ends_early:
        found = devices  # in some versions of vLLM each rank sees only its own GPUs
    if len(found) != rank.count:
        named = ", ".join(devices) or "nothing"
        raise UnknownGpusError(
            f"rank {rank.local_rank} of this machine has {rank.count} of the GPUs, and "
            f"{VISIBLE} or --device-ids names {named}"
            f"{' before an entry at which CUDA stops' if ends_early else ''}: leave it out, or "
            "name the GPUs of all ranks"
        )
    return tuple(found)
