"""Decisions for one group: the rounds of the live router and of the simulator."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from router.core.clock import Clock
from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import Outlook, Running, WorkProfile
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.policy_protocol import Decision, Known, Policy
from router.core.queue.fair_share import ANONYMOUS, FairShare, Offer
from router.core.queue.pool import Pool
from router.core.queue.tier import Tier
from router.core.rounds import assignment
from router.core.rounds.affinity import Affinity
from router.core.rounds.backfill import Backfill
from router.core.rounds.barriers import Barrier
from router.core.rounds.overcommit import Overcommit
from router.core.rounds.prompt_waves import PromptWaves, delay_s
from router.core.rounds.reservations import Reservations
from router.core.rounds.sharing import Kept, Sharing
from router.core.state.barrier import StepTotals
from router.core.state.group import Group
from router.core.state.wanted import Wanted
from router.core.stats import GroupStats
from router.core.step_time import StepTime
from router.core.types import Assignment, Dispatch, Hits, PoolState, WorkerView


class Workers(Protocol):
    """Workers of a group: a live ``Group``, or a simulated one.

    Attributes:
        departures: requests that stopped running; the reader clears it.
        wanted: targets of its requests.
    """

    departures: list[Departure]
    wanted: Wanted

    @property
    def name(self) -> str: ...

    @property
    def held(self) -> Mapping[str, int]: ...

    @property
    def askable(self) -> Set[str]:
        """Ids of workers that accept requests, if not at this moment."""

    @property
    def slots(self) -> int: ...

    @property
    def steps_under_way(self) -> int:
        """Steps that begin before what a round sends arrives, as learned so far."""

    @property
    def totals(self) -> Mapping[PoolState, StepTotals]: ...

    @property
    def step_time(self) -> StepTime | None:
        """Cost of its steps, as learned so far."""

    @property
    def hits(self) -> Hits | None: ...

    @property
    def barrier(self) -> bool | None:
        """True if its workers wait for each other; None: unknown."""

    @property
    def stepping(self) -> bool:
        """True if a worker has work, and its steps count in ``totals``."""

    @property
    def steps_told(self) -> bool:
        """True if all live workers tell of their steps, so that it is known which are busy."""

    def profile(self, before: WorkProfile) -> WorkProfile:
        """The work of requests, as the group's steps show it by now."""

    def own_steps(self, step_tokens: float) -> int:
        """Steps since the last call that no ``learn`` reports."""

    def review(self, now_s: float) -> bool:
        """Bring to the present what depends on time alone."""

    @property
    def version(self) -> int | None:
        """Another one after each change that the views show; None: they change without notice."""

    def views(self, dispatch: Dispatch, overcommit: int) -> Sequence[WorkerView]: ...

    def outlook(self, look_ahead: LookAhead, views: Sequence[WorkerView]) -> Outlook: ...

    def running(self, places: Iterable[int]) -> Running:
        """Requests on the workers at these places of the views, or on the way there."""


W = TypeVar("W", bound=Workers)

# Oldest requests that a policy chooses from: as many, or as many for each worker or free slot.
_CANDIDATES, _CANDIDATES_EACH = 128, 8


@dataclass(frozen=True, slots=True)
class RoundInput:
    """What a round is decided on, collected once.

    Attributes:
        crowded: whether more requests wait than there are free slots.
        slots_first: as in ``Known``.
        gap_tokens: load of the fullest worker less the least load with a free slot.
        aged: whether the policy weighs how long requests have waited.
        askable: workers that failed requests, or adapters, wait for; empty without such requests.
        hits: the group's.
    """

    now: float
    views: Sequence[WorkerView]
    capacity: int
    crowded: bool
    slots_first: bool
    gap_tokens: int
    tiers: Sequence[Tier]
    aged: bool
    askable: Set[str]
    hits: Hits | None


@dataclass(slots=True)
class RoundDecider(Generic[W]):
    """Assigns a group's waiting requests, round by round.

    Attributes:
        sharing: with all groups that serve the same requests.
        fallback: assigns where the policy raises an exception.
        solved: the policy's last program; None if it solved nothing.
        on_policy_error: callback for that exception.
    """

    group: W
    pool: Pool
    policy: Policy
    fallback: Policy
    dispatch: Dispatch
    look_ahead: LookAhead | None = None
    overcommit: Overcommit = field(default_factory=Overcommit)
    reservations: Reservations = field(default_factory=Reservations)
    backfill: Backfill = field(init=False)
    waves: PromptWaves = field(default_factory=PromptWaves)
    affinity: Affinity = field(default_factory=Affinity)
    fair: FairShare = field(default_factory=FairShare)
    stats: GroupStats = field(default_factory=GroupStats)
    solved: Decision | None = None
    on_policy_error: Callable[[Exception], None] = lambda _: None
    sharing: Sharing = field(init=False)
    _capacity: Kept[int] = field(default_factory=Kept)
    _barrier: Kept[Barrier] = field(default_factory=Kept)

    def __post_init__(self) -> None:
        self.sharing = Sharing([self])
        self.backfill = Backfill(self.group.running)

    def follow(self) -> None:
        """Forecast by the group's step time as it is now, whatever it was before."""
        if self.look_ahead is not None:
            self.look_ahead.follow(self.group.profile(WorkProfile()))

    def refresh(self) -> None:
        """Forecast by the group's work as its steps show it by now."""
        if (ahead := self.look_ahead) is not None:
            ahead.follow(self.group.profile(ahead.profile))

    def learn(self, *, step_complete: bool = False) -> None:
        """Feed departures and steps to the look-ahead; call it at each step's end, and between.

        Without live snapshots, steps are derived from the tokens that requests receive.
        """
        departures = self.group.departures
        if departures:
            # Another list first: a departure that raises must not be met again.
            departures = departures[:]
            self.group.departures.clear()
        if (ahead := self.look_ahead) is not None:
            for departure in departures:
                ahead.ended(departure)
            steps = 1 if step_complete else self.group.own_steps(ahead.step_tokens)
            reviewed = bool(steps) and ahead.advance(steps)
            # What is known of caches counts at once, not from the first review on.
            caches_alone = self.group.step_time is None and self.group.hits is not None
            if reviewed or caches_alone:
                self.refresh()
        if step_complete and self._shared_cost is None:
            self.overcommit.review(self.group.totals[PoolState.WAITING], self.group.slots)

    def decide(self, now: float, clock: Clock) -> Sequence[Assignment]:
        self.learn()
        held = self.group.held
        if self.fair.tenants or held.keys() - ANONYMOUS:
            self.fair.see(now, held)
        self.group.review(now)
        waiting = len(self.pool)
        given = self._collect(now) if waiting else None
        if given is None:
            self.waves.pass_by(self._waited_s)
            return ()
        spent = self.policy.spent
        assignments = self._assign(given)
        if self._wait_for_more(given, assignments):
            assignments, self.solved = (), None
            self.stats.held_rounds += 1
        sent = [self.pool[each.request_id] for each in assignments]
        self.pool.entered(sent, now)
        self.affinity.see(sent, given.hits)
        self.stats.decision_s.observe(clock() - now)
        self.stats.decision_candidates.observe(waiting)
        self.stats.decision_admitted.observe(len(assignments))
        if self.solved is not None:
            self.stats.decision_objective.observe(self.solved.solution.objective)
            self.stats.decision_moves.observe(self.policy.spent - spent)
        return assignments

    def _collect(self, now: float) -> RoundInput | None:
        views = self._views
        capacity = sum([view.capacity for view in views])
        if not capacity:
            return None
        crowded = self.sharing.crowded(self.pool)
        allotted = self.sharing.take(self.group, self.pool, crowded=crowded)
        if allotted is not None and not allotted:
            return None
        gap_tokens = assignment.gap_tokens(views)
        turns: Sequence[Offer] = ()
        if len(self.pool.slots_of) > 1:
            turns = self.fair.turns(self.group.held, self.pool.slots_of, capacity)
        hits = self.group.hits
        alike = hits is None or self.affinity.little
        # What fills free slots with prompts makes first tokens late where steps are short.
        slots_first = crowded and alike and not self.group.wanted
        aged = not slots_first and self._plans_prompts
        choice = max(_CANDIDATES, _CANDIDATES_EACH * len(views), 2 * capacity)
        if allotted is not None:
            choice = len(self.pool)
        by_adapter = assignment.short_of_places(views, self.pool.adapters.keys())
        tiers = self.pool.tiers(
            now, capacity, gap_tokens, turns, aged=aged, choice=choice, by_adapter=by_adapter
        )
        if allotted is not None:
            tiers = [part for tier in tiers if (part := tier.of_those(allotted))]
        return RoundInput(
            now,
            views,
            capacity,
            crowded,
            slots_first,
            gap_tokens,
            tiers,
            aged,
            # Requests that a worker has failed come first.
            self.askable if by_adapter or tiers[0].avoid else frozenset(),
            hits,
        )

    @property
    def waiting(self) -> int:
        """Requests in its pool; a common pool counts at its first group that takes requests."""
        every = self.sharing.deciders
        first = next((each for each in every if each.group.askable), every[0])
        return len(self.pool) if first is self else 0

    @property
    def askable(self) -> Set[str]:
        """Ids of workers that accept the pool's requests, if not at this moment."""
        return set[str]().union(*(each.group.askable for each in self.sharing.deciders))

    @property
    def capacity(self) -> int:
        """Engine requests that its workers can take; summed anew only after a change."""
        return self._capacity.of(self._seen, lambda: sum([each.capacity for each in self._views]))

    @property
    def barrier(self) -> Barrier:
        """As it is now, for requests to be placed on it."""
        group = self.group
        together = group.barrier is not False
        kept = self._barrier.of(self._seen, lambda: Barrier.of(self._views, together=together))
        reserved = {made.request_id for made in self.backfill.made.values()}
        return kept.now(group.step_time, group.hits, reserved)

    @property
    def _seen(self) -> Hashable:
        """What the views follow from; None: they change without notice."""
        version = self.group.version
        return None if version is None else (version, self.dispatch, self.overcommit.requests)

    @property
    def _views(self) -> Sequence[WorkerView]:
        # What queues in an engine begins alone.
        overcommit = 0 if self._shared_cost else self.overcommit.requests
        return self.group.views(self.dispatch, overcommit)

    def _assign(self, given: RoundInput) -> Sequence[Assignment]:
        self.stats.rounds += 1
        self.solved = None
        settled = partial(
            assignment.assign,
            tiers=given.tiers,
            workers=given.views,
            askable=given.askable,
            late_since=given.now - self.pool.bound,
            aged=given.aged,
            backfill=self.backfill,
        )
        self._begin_backfill(given.now)
        try:
            outlook = None
            if self.look_ahead is not None:
                outlook = self.group.outlook(self.look_ahead, given.views)
                wanted = self.pool.room_wanted(given.now, given.gap_tokens, len(given.views))
                if wanted or self.reservations.lowered:
                    outlook = self.reservations.make_room(wanted, given.views, outlook)
            known = Known(
                outlook,
                self.group.step_time,
                given.hits,
                given.now,
                # Of an answer that does not stream no first token is seen: its prompt seems pending
                # to its end.
                may_wait=self.dispatch is Dispatch.POOL and self.group.steps_told,
                steps_under_way=self.group.steps_under_way,
                slots_first=given.slots_first,
            )
            assignments = settled(self.policy, known=known)
            if assignments:
                self.solved = self.policy.last
            return assignments
        except Exception as error:  # noqa: BLE001 - a policy's bug must not stop the service
            self.on_policy_error(error)
        self.stats.policy_errors += 1
        return settled(self.fallback)

    def _begin_backfill(self, now: float) -> None:
        seen = self.group.totals[PoolState.WAITING]
        step_s = seen.step_s / seen.steps if seen.steps else 0.0
        self.backfill.begin(self.look_ahead, now, step_s, self.pool.__contains__)

    @property
    def _plans_prompts(self) -> bool:
        """Whether the policy plans prompts, where nothing comes first: by cost and age."""
        ahead = self.look_ahead
        return self.policy.solves and ahead is not None and ahead.profile.prefill_beta > 0

    @property
    def _shared_cost(self) -> StepTime | None:
        """Cost of a step where a prompt makes all workers wait; None: requests enter one by one."""
        ahead = self.look_ahead
        if ahead is None or not ahead.profile.prefill_beta or self.overcommit.imposed:
            return None
        return self.group.step_time if self.policy.solves and self.group.barrier else None

    def _wait_for_more(self, given: RoundInput, assignments: Sequence[Assignment]) -> bool:
        """Nobody waits for others while there is room for all, or who has waited too long.

        Without steps nobody gains: the slots of an idle group cost nothing, and no step's end comes
        by which to decide again.
        """
        if not assignments:
            self.waves.pass_by(self._waited_s)
            return False
        cost, delay, empty = self._shared_cost, 0.0, 0.0
        if cost is not None and given.crowded and self.solved is not None and self.group.stepping:
            entering = {each.request_id: self.pool[each.request_id] for each in assignments}
            if not any(self.pool.late(request, given.now) for request in entering.values()):
                delay = delay_s(assignments, entering, given.views, cost, given.hits)
                empty = given.capacity / self.group.slots
        return self.waves.wait(delay, empty, self._waited_s)

    @property
    def _waited_s(self) -> float:
        return self.group.totals[PoolState.WAITING].step_s


Decider = RoundDecider[Group]
