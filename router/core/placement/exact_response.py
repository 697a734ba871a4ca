"""Exact mean response time of JFFC, for countable states.

The requests on each chain form a Markov chain (section 3.2.2 of "Serving Chain-structured Jobs with
Large Memory Footprints"): an arrival enters the fastest chain with a free slot, a departure leaves
any. A queue exists only when all slots are busy, and its length is geometric; so the states without
a queue suffice. Ordered by the number of requests they form a finite birth-and-death process, whose
levels are eliminated from the top (Gaver, Jacobs and Latouche, "Finite birth-and-death models in
randomly changing environments", 1984).
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from router.core.forecast.forecast import Floats

# Most states without a queue for an exact answer.
MAX_STATES = 20_000
# Most multiplications, about two seconds' worth; a level takes the cube of its states.
MAX_WORK = 2_000_000_000

State = tuple[int, ...]


def exact_response_s(
    rates: Sequence[float], slots: Sequence[int], arrival_rate: float
) -> float | None:
    """Mean seconds under Poisson arrivals and exponential work.

    Arguments are those of ``bounds.response_bounds``. Infinite if arrivals reach the chains' total
    rate; None beyond MAX_STATES or MAX_WORK.
    """
    of_rate: Counter[float] = Counter()  # JFFC does not distinguish chains of equal speed
    for rate, count in zip(rates, slots, strict=True):
        of_rate[rate] += count
    # Rates and slots, fastest first.
    chains = sorted(((rate, count) for rate, count in of_rate.items() if count > 0), reverse=True)
    total = sum(mu * count for mu, count in chains)
    if arrival_rate >= total:
        return math.inf
    if arrival_rate == 0:
        return 1 / chains[0][0]
    if not _small([count for _, count in chains]):
        return None
    return _occupancy(chains, arrival_rate) / arrival_rate


def _small(slots: Sequence[int]) -> bool:
    if math.prod(count + 1 for count in slots) > MAX_STATES:
        return False
    sizes = np.ones(1)
    for count in slots:
        sizes = np.convolve(sizes, np.ones(count + 1))
    return bool((sizes**3).sum() <= MAX_WORK)


def _occupancy(chains: Sequence[tuple[float, int]], arrival_rate: float) -> float:
    """E[Z], mean requests in the system."""
    slots = [count for _, count in chains]
    levels: list[list[State]] = [[] for _ in range(sum(slots) + 1)]
    for state in itertools.product(*(range(count + 1) for count in slots)):
        levels[sum(state)].append(state)
    full = len(levels) - 1
    total = sum(rate * count for rate, count in chains)
    load = arrival_rate / total
    steps = _steps(chains, levels, arrival_rate)
    share = np.ones(1)
    weight, requests = 1.0, 0.0
    for count, step in enumerate(steps, 1):
        share = share @ step
        # The largest weight so far is scaled to at most 1, at any load.
        mass = float(share.sum())
        weight, requests = weight + mass, requests + count * mass
        if weight > 1:
            share, requests, weight = share / weight, requests / weight, 1.0
    queue = float(share.sum()) * load / (1 - load)
    requests += queue * (full + 1 / (1 - load))
    return requests / (weight + queue)


def _steps(
    chains: Sequence[tuple[float, int]], levels: list[list[State]], arrival_rate: float
) -> list[Floats]:
    """R_n: state probabilities with n + 1 requests are those with n times R_n."""
    slots = [count for _, count in chains]
    rates = np.array([rate for rate, _ in chains])
    index = [{state: at for at, state in enumerate(level)} for level in levels]
    steps = []
    back: Floats = np.zeros((1, 1))
    for count in range(len(levels) - 1, 0, -1):
        # Total rate out of a state. At the full state arrivals join the queue, and return.
        out = np.array(levels[count]) @ rates + (arrival_rate if count < len(levels) - 1 else 0)
        kernel = np.diag(out) - back
        fewer, more = index[count - 1], index[count]
        up, down = np.zeros((len(fewer), len(more))), np.zeros((len(more), len(fewer)))
        for state, at in fewer.items():
            free = next(chain for chain, busy in enumerate(state) if busy < slots[chain])
            up[at, more[_changed(state, free, 1)]] = arrival_rate
        for state, at in more.items():
            for chain, busy in enumerate(state):
                if busy:
                    down[at, fewer[_changed(state, chain, -1)]] = busy * rates[chain]
        step = np.linalg.solve(kernel.T, up.T).T.astype(np.float64)
        steps.append(step)
        back = step @ down
    return steps[::-1]


def _changed(state: State, chain: int, by: int) -> State:
    return (*state[:chain], state[chain] + by, *state[chain + 1 :])
