"""Event-driven simulation of requests on chains, with the router's policies."""

from collections import deque
from collections.abc import Sequence
from functools import cache, lru_cache
from heapq import heappop, heappush

import numpy as np

from loadgen.chains.work import Served, Work
from loadgen.run.options import check_policy
from router.core.errors import ConfigError
from router.core.placement.model import Chain
from router.core.policies.policy_protocol import Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.state.worker import UNBOUNDED
from router.core.types import Dispatch, Request, WorkerView

# These choose by the views alone, so a choice can be remembered per state.
BY_VIEWS_ALONE = frozenset({"fcfs", "jffc", "jsq", "least_tokens", "sa_jsq", "sed"})
_MOST_REMEMBERED = 500_000
_COUNT_BITS = 24  # bits of a chain's number of requests in the key of a state
_ANY = Request("any", "default", prompt_tokens=1)


def simulate_chains(
    chains: Sequence[Chain],
    policy: str,
    work: Work,
    dispatch: Dispatch = Dispatch.POOL,
    seed: int = 0,
) -> Served:
    """Serve all requests, first come, first served; ConfigError as in ``check_of_chains``.

    From the pool, requests wait in one queue until a chain has a free slot. With dispatch at once,
    a request goes to a chain on arrival and waits there.
    """
    check_of_chains(policy, dispatch)
    made = POLICIES[policy].make(PolicySettings(seed=seed))
    state = _State(chains, made, dispatch, remembers=policy in BY_VIEWS_ALONE)
    return (_from_pool if dispatch is Dispatch.POOL else _at_once)(state, chains, work)


def check_of_chains(policy: str, dispatch: Dispatch) -> None:
    """ConfigError where a policy cannot serve chains, or not in this form of dispatch."""
    known = [name for name, row in POLICIES.items() if not row.looks_ahead]
    if policy in POLICIES and policy not in known:
        raise ConfigError(
            f"--policy: {policy!r} is none for chains, which have no common steps to look ahead "
            f"at; there are {', '.join(known)}"
        )
    check_policy(policy, dispatch, known)


class _State:
    """Number of requests on each chain, and the policy's choice in that state."""

    def __init__(
        self, chains: Sequence[Chain], policy: Policy, dispatch: Dispatch, *, remembers: bool
    ) -> None:
        self._chains = chains
        self._policy = policy
        self._dispatch = dispatch
        self._view = cache(self._seen)
        # Increments of a state's key, one per chain, for one more request.
        self.units = [1 << _COUNT_BITS * at for at in range(len(chains))]
        # The policy's chain for the next request, by key.
        self.choose = lru_cache(_MOST_REMEMBERED)(self._chosen) if remembers else self._chosen

    def _chosen(self, key: int) -> int:
        mask = (1 << _COUNT_BITS) - 1
        counts = [(key >> _COUNT_BITS * at) & mask for at in range(len(self._chains))]
        views = [self._view(at, count) for at, count in enumerate(counts)]
        (assignment,) = self._policy.assign([_ANY], views)
        return int(assignment.worker_id)

    def _seen(self, at: int, count: int) -> WorkerView:
        chain = self._chains[at]
        instant = self._dispatch is Dispatch.INSTANT
        return WorkerView(
            id=str(at),
            load_tokens=count,
            requests=count,
            capacity=UNBOUNDED if instant else chain.slots - count,
            waiting=max(0, count - chain.slots),
            service_rate=chain.service_rate,
            slots=chain.slots,
        )


def _from_pool(state: _State, chains: Sequence[Chain], work: Work) -> Served:
    """One FIFO queue; its first request goes to the policy's chain as soon as a slot is free."""
    mean_s = [chain.service_s for chain in chains]
    arrival_s, size = work.arrival_s.tolist(), work.size.tolist()
    waiting_s, service_s = [0.0] * len(size), [0.0] * len(size)
    ends: list[tuple[float, int]] = []
    queue: deque[int] = deque()
    units, choose = state.units, state.choose
    key, free = 0, sum(chain.slots for chain in chains)
    arrivals = iter(enumerate(arrival_s))
    number, at_s = next(arrivals, (-1, 0.0))
    while number >= 0 or ends:
        if number >= 0 and (not ends or at_s < ends[0][0]):
            now_s = at_s
            queue.append(number)
            number, at_s = next(arrivals, (-1, 0.0))
        else:
            now_s, chain = heappop(ends)
            key -= units[chain]
            free += 1
        if queue and free:
            first = queue.popleft()
            chain = choose(key)
            key += units[chain]
            free -= 1
            waiting_s[first] = now_s - arrival_s[first]
            service_s[first] = taken_s = size[first] * mean_s[chain]
            heappush(ends, (now_s + taken_s, chain))
    return Served(np.array(waiting_s), np.array(service_s))


def _at_once(state: _State, chains: Sequence[Chain], work: Work) -> Served:
    """A FIFO queue per chain: a request takes the slot that becomes free first.

    The end times of earlier requests determine a chain's state, so a request's start is known on
    arrival.
    """
    mean_s = [chain.service_s for chain in chains]
    arrival_s, size = work.arrival_s.tolist(), work.size.tolist()
    waiting_s, service_s = [0.0] * len(size), [0.0] * len(size)
    ends: list[tuple[float, int]] = []
    slot_free_s: list[list[float]] = [[0.0] * chain.slots for chain in chains]
    units, choose = state.units, state.choose
    key = 0
    for number, now_s in enumerate(arrival_s):
        while ends and ends[0][0] <= now_s:
            key -= units[heappop(ends)[1]]
        chain = choose(key)
        key += units[chain]
        begin_s = max(now_s, heappop(slot_free_s[chain]))
        taken_s = size[number] * mean_s[chain]
        waiting_s[number] = begin_s - now_s
        service_s[number] = taken_s
        heappush(slot_free_s[chain], begin_s + taken_s)
        heappush(ends, (begin_s + taken_s, chain))
    return Served(np.array(waiting_s), np.array(service_s))
