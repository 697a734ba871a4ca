"""The fewest job servers for a total rate, proven optimal by HiGHS; a baseline for GCA.

Program (7) of "Serving Chain-structured Jobs with Large Memory Footprints" for a placement and the
chains that GCA finds in it ("Optimal ILP" in section 4.1.2). It minimizes the total number of slots
that complete a rate within the memory that blocks leave.
"""

from collections.abc import Sequence
from dataclasses import replace

import highspy
import numpy as np

from router.core.errors import InputError
from router.core.placement.model import Chain, Placement
from router.core.policies.bfio.exact_model import Rows, run_highs


def fewest_slots(
    chains: Sequence[Chain], placement: Placement, total_rate: float
) -> tuple[Chain, ...]:
    """The same chains with optimal numbers of slots; InputError: none complete so many.

    Columns: slots of each chain. Rows: the total rate, then each server's memory.
    """
    lp, rows, size = highspy.HighsLp(), Rows(), len(chains)
    lp.num_col_ = size
    lp.col_cost_ = np.ones(size)
    lp.col_lower_, lp.col_upper_ = np.zeros(size), np.full(size, highspy.kHighsInf)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * size
    rates = np.array([chain.service_rate for chain in chains])
    rows.add((range(size), rates), lower=total_rate)
    blocks = np.zeros((len(placement.servers), size))
    for column, chain in enumerate(chains):
        blocks[list(chain.servers), column] = chain.blocks
    for server in np.flatnonzero(blocks.any(axis=1)).tolist():
        rows.add((range(size), blocks[server]), upper=placement.block_slots(server))
    rows.into(lp)
    highs = run_highs(lp, {})
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise InputError(
            f"the chains cannot complete {total_rate:g} requests per second within their "
            "servers' memory; lower --rate, raise --target-load, or reserve other slots"
        )
    slots = np.rint(highs.getSolution().col_value).astype(int).tolist()
    return tuple(
        replace(chain, slots=count) for chain, count in zip(chains, slots, strict=True) if count
    )
