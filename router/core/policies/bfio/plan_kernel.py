"""The plan for prompts, one request at a time.

In numpy's terms, which numba compiles and plain Python runs quickly too.
"""

import numpy as np

from router.core.forecast.forecast import Bools, Floats, Ints
from router.core.policies.bfio.compiled import compiled_arrays

# Of two workers of equal cost the one with the smaller load, at a price that decides nothing else.
_TIE = 1e-6

# In place of a request's best worker, where that is to be found anew.
_STALE = -1


@compiled_arrays
def plan(
    work: Floats,
    sizes: Floats,
    slots: Ints,
    waited: Floats,
    pending: Floats,
    loads: Floats,
    capacity: Ints,
    fits: Bools,
    open_below: float,
    price: float,
    anew: float,
    sent: Ints,
) -> int:
    """Fill ``sent``, shape (2, R), with requests to send now and their workers; say how many.

    Arrays are as in ``PromptPlan``; ``pending``, ``loads`` and ``capacity`` change.
    """
    barred = np.where(fits, 0.0, np.inf)
    base = loads.max()
    open_ = (pending < open_below) & (capacity > 0)
    best = np.full(len(sizes), _STALE)
    # Least cost, less the time waited, of requests that are not planned. A worker that takes a
    # request costs more from then on, so that of a stale request is a lower bound, and few have
    # to be found anew.
    rank = np.full(len(sizes), -np.inf)
    count = 0
    while open_.any():
        at = rank.argmin()
        if rank[at] == np.inf:
            break
        g = best[at]
        if g == _STALE:
            above = np.maximum(0.0, loads + (sizes[at] - base))
            costs = anew * work[at] + pending + price * above + _TIE * loads + barred[at]
            best[at] = costs.argmin()
            rank[at] = costs[best[at]] - waited[at]
            continue
        rank[at] = np.inf
        if open_[g]:
            sent[0, count], sent[1, count] = at, g
            count += 1
            capacity[g] -= slots[at]
            if capacity[g] <= 0:
                barred[:, g] = np.inf
        pending[g] += work[at, g]
        loads[g] += sizes[at]
        open_[g] = pending[g] < open_below and capacity[g] > 0
        if loads[g] > base:
            rank -= price * (loads[g] - base)
            base = loads[g]
            best[:] = _STALE
        else:
            best[best == g] = _STALE
    return count
