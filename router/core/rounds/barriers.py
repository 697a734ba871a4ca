"""Which group a waiting request goes to, where several serve its model.

Each group has a barrier of its own. On a group a request costs the time that it and the requests
there lose together, in seconds:

    max(P, Q) + n max(0, P - Q) + (1 + n dT / T) / mu

P is the time to compute the request's prompt after those that are pending on the worker with the
fewest, Q the time to compute those of the worker with the most. Workers compute prompts in the same
steps, so the n requests that wait at the barrier wait only for what P exceeds Q by. A step takes T,
and dT more with the request, and a request lasts 1 / mu. Until all groups have learned their cost,
a request goes to the one with the fewest requests for its slots and its rate. No request waits for
a group that is full while another has a slot. The rule is our own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import heapreplace

from router.core.step_time import StepTime
from router.core.types import Hits, Request, WorkerView


@dataclass(slots=True)
class Barrier:
    """A group, as requests are placed on it.

    Attributes:
        views: its live workers, as they were at first.
        capacity: engine requests that it can take.
        slots: of all its workers.
        requests: that wait at the barrier: the group's, or without one the mean of a worker.
        rate_per_s: mu, requests that end in a second, for each that runs.
        peak_tokens: KV tokens of the fullest worker.
        least_tokens: those of the emptiest one.
        pending_tokens: prompt tokens that each worker has to compute, a heap.
        peak_pending: the most of them.
        together: whether its workers wait for each other.
        cost: of a step; None: not learned yet.
        hits: cached part of each prompt by worker; None: unknown.
        reserved: ids of the requests for which one of its workers is reserved.
    """

    views: Sequence[WorkerView]
    capacity: int
    slots: int
    requests: float
    rate_per_s: float
    peak_tokens: float
    least_tokens: float
    pending_tokens: list[int]
    peak_pending: int
    together: bool
    cost: StepTime | None = None
    hits: Hits | None = None
    reserved: Set[str] = frozenset()

    @classmethod
    def of(cls, views: Sequence[WorkerView], *, together: bool) -> "Barrier":
        loads = [view.load_tokens for view in views]
        pending = sorted([view.pending_prompt_tokens for view in views]) or [0]
        requests = sum([view.requests for view in views])
        return cls(
            views=views,
            capacity=sum([max(0, view.capacity) for view in views]),
            slots=sum([view.slots for view in views]),
            requests=requests if together else requests / max(1, len(views)),
            rate_per_s=sum([view.service_rate for view in views]) / max(1, len(views)),
            peak_tokens=max(loads, default=0),
            least_tokens=min(loads, default=0),
            pending_tokens=pending,
            peak_pending=pending[-1],
            together=together,
        )

    def now(
        self, cost: StepTime | None, hits: Hits | None, reserved: Set[str] = frozenset()
    ) -> "Barrier":
        """A copy on which requests can be placed."""
        pending = self.pending_tokens[:]
        return replace(self, cost=cost, hits=hits, reserved=reserved, pending_tokens=pending)

    def fits(self, request: Request, closed: Set[str]) -> bool:
        """Whether a worker beside the closed ones had a slot and memory for it."""
        return any(
            view.capacity > 0 and view.id not in closed and view.takes(request)
            for view in self.views
        )

    def fullness(self) -> float:
        return (self.requests + 1) / (self.slots * self.rate_per_s)

    def cost_s(self, request: Request) -> float:
        """Time lost with a request, by its own and by those there; the cost is learned."""
        assert self.cost is not None
        cached = 0 if self.hits is None or request.computed else max(self.hits(request), default=0)
        lacking = 0 if request.computed else max(1, request.prompt_tokens - cached)
        awaited = self.peak_pending if self.together else self.pending_tokens[0]
        further = max(0, self.pending_tokens[0] + lacking * request.slots - awaited)
        prompt_s = self.cost.per_prompt_token_s * (awaited + (1 + self.requests) * further)
        over = max(0.0, self.least_tokens + request.load_tokens - self.peak_tokens)
        step_s = self.cost.seconds(self.peak_tokens, self.requests / max(1, len(self.views)))
        more_s = self.cost.work_s(over, request.slots / max(1, len(self.views)))
        slower = more_s / step_s if step_s else 0.0  # a step of an idle group may cost nothing
        return prompt_s + (1 + self.requests * slower) / self.rate_per_s

    def place(self, request: Request) -> None:
        """Count the request, on the emptiest worker, for those that are placed after it."""
        workers = max(1, len(self.views))
        self.capacity -= request.slots
        self.requests += request.slots
        if not request.computed:
            prompts = self.pending_tokens[0] + request.load_tokens
            heapreplace(self.pending_tokens, prompts)
            self.peak_pending = max(self.peak_pending, prompts)
        self.peak_tokens = max(self.peak_tokens, self.least_tokens + request.load_tokens)
        self.least_tokens += request.load_tokens / workers


Allot = Callable[[Iterable[Request], Mapping[str, Barrier]], Mapping[str, Set[str]]]


def allot(waiting: Iterable[Request], barriers: Mapping[str, Barrier]) -> dict[str, set[str]]:
    """Ids of the requests for each group, first come first; those that find no slot go nowhere.

    No group gets a request whose model all its workers lack. A group whose workers failed it, or
    are short of memory for it, gets it only if no other has a slot.
    """
    learned = all(barrier.cost is not None for barrier in barriers.values())
    allotted: dict[str, set[str]] = {name: set() for name in barriers}
    for request in waiting:
        open_ = {name: one for name, one in barriers.items() if one.capacity > 0}
        costs = {
            name: one.cost_s(request) if learned else one.fullness()
            for name, one in _willing(request, open_).items()
        }
        if costs:
            name = min(costs, key=costs.__getitem__)
            barriers[name].place(request)
            allotted[name].add(request.id)
    return allotted


def _willing(request: Request, barriers: Mapping[str, Barrier]) -> Mapping[str, Barrier]:
    """The groups that may serve it best, if any may at all."""
    for closed in (request.lacks | request.avoid, request.lacks):
        if fitting := {name: one for name, one in barriers.items() if one.fits(request, closed)}:
            return fitting
    # It fits nowhere. A worker that is reserved for it is emptied for it: elsewhere it would begin
    # to wait anew.
    if kept := {name: one for name, one in barriers.items() if request.id in one.reserved}:
        return kept
    ids = {name: {view.id for view in one.views} for name, one in barriers.items()}
    return {name: one for name, one in barriers.items() if not ids[name] <= request.lacks}
