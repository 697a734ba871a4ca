"""State shown on the status page, a sample; the page computes differences between samples."""

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import MappingProxyType

import msgspec

from router.admin.facts import Fact, Footing, facts
from router.core.clock import Clock
from router.core.policies.policy_table import POLICIES
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.state.worker_status import WorkerStatus, status_of
from router.core.types import Outcome


class WorkerState(msgspec.Struct, frozen=True, gc=False):
    """One worker; None where unknown. ``queued`` is the part of ``requests`` not running yet."""

    id: str
    rank: int | None
    up: bool
    draining: bool
    breaker: str
    reason: str | None
    load_tokens: int
    requests: int
    queued: int
    slots: int
    service_rate: float | None
    kv_usage: float | None
    power_w: float | None
    source: str
    age_s: float | None
    problem: str | None


class Sums(msgspec.Struct, frozen=True, gc=False):
    """Sums since the start, over steps and over requests."""

    steps: int
    imbalance_tokens: int
    max_load_tokens: int
    worker_steps: int
    step_s: float
    waiting_s: float
    timed_s: float
    measured_s: float
    output_tokens: int
    useful_j: float
    waiting_j: float
    idle_j: float
    undivided_j: float
    completed: int
    failed: int
    first_tokens: int
    first_token_s: float
    prefix_prompt_tokens: int
    prefix_found_tokens: int


class Rule(msgspec.Struct, frozen=True, gc=False):
    """The policy in force, its description and its current parameters."""

    policy: str
    summary: str
    dispatch: str
    overcommit: int
    horizon: int | None
    discount: float | None
    tie_weight: float | None
    lead_tokens: float | None
    skill: float | None
    decisions: int
    decision_s: float
    policy_errors: int


class GroupState(msgspec.Struct, frozen=True, gc=False):
    """One group.

    ``pool_requests`` is None if nothing is routed, ``barrier`` if it is not known.
    """

    name: str
    serves: str | None
    lockstep: bool
    barrier: bool | None
    emulated: bool
    pool_requests: int | None
    sums: Sums
    rule: Rule | None
    facts: list[Fact]
    workers: list[WorkerState]


class PageState(msgspec.Struct, frozen=True, gc=False):
    """All groups at one time; ``clock_s`` is monotonic."""

    version: str
    time_s: float
    clock_s: float
    groups: list[GroupState]


_VERSION = version("evenstep")


class Status:
    """Reads the state that the page shows.

    Args:
        deciders: deciders by group; empty if nothing is routed (``evenstep observe``).
        problem: returns why a worker's snapshots are unusable.
        emulated: whether a worker's engine reports itself as emulated.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        deciders: Mapping[str, Decider] = MappingProxyType({}),
        problem: Callable[[str], str | None] = lambda _: None,
        emulated: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._deciders = deciders
        self._problem = problem
        self._emulated = emulated

    def read(self, footing: Footing) -> PageState:
        """Return the current state."""
        now_s = self._clock()
        groups = [self._group(group, footing, now_s) for group in self._cluster.groups.values()]
        return PageState(_VERSION, time.time(), now_s, groups)

    def _group(self, group: Group, footing: Footing, now_s: float) -> GroupState:
        decider = self._deciders.get(group.name)
        workers = [status_of(worker, now_s) for worker in group.workers.values()]
        powered = sum(worker.up and worker.power_w is not None for worker in workers)
        prefills = self._cluster.prefill_group(group.name)
        return GroupState(
            name=group.name,
            serves=group.serves.name if group.serves else None,
            lockstep=group.lockstep,
            barrier=group.barrier,
            emulated=any(map(self._emulated, group.workers)),
            pool_requests=len(decider.pool) if decider else None,
            sums=_sums(group, decider),
            rule=_rule(group, decider, footing.policy),
            facts=facts(group, prefills, decider, powered, footing),
            workers=[_worker(status, self._problem) for status in workers],
        )


def _worker(status: WorkerStatus, problem: Callable[[str], str | None]) -> WorkerState:
    spec = status.spec
    return WorkerState(
        id=spec.id,
        rank=spec.rank,
        up=status.up,
        draining=status.draining,
        breaker=status.breaker.value,
        reason=status.down_reason,
        load_tokens=status.load_tokens,
        requests=status.requests,
        queued=status.queued,
        slots=status.slots,
        service_rate=status.service_rate,
        kv_usage=status.kv_usage,
        power_w=status.power_w,
        source=status.source.value,
        age_s=None if status.age_s is None else round(status.age_s, 2),
        problem=problem(spec.id) if spec.snapshots else None,
    )


def _sums(group: Group, decider: Decider | None) -> Sums:
    steps, joules = group.every_step, group.joules
    outcomes = decider.stats.outcomes if decider else {}
    ttft = decider.stats.ttft_s if decider else None
    return Sums(
        steps=steps.steps,
        imbalance_tokens=steps.imbalance_tokens,
        max_load_tokens=steps.max_load_tokens,
        worker_steps=steps.worker_steps,
        step_s=steps.step_s,
        waiting_s=steps.waiting_s,
        timed_s=steps.timed_s,
        measured_s=steps.measured_s,
        output_tokens=steps.output_tokens,
        useful_j=joules.useful_j,
        waiting_j=joules.waiting_j,
        idle_j=joules.idle_j,
        undivided_j=joules.unknown_j,
        completed=outcomes.get(Outcome.COMPLETED, 0),
        failed=outcomes.get(Outcome.FAILED, 0) + outcomes.get(Outcome.EXPIRED, 0),
        first_tokens=sum(ttft.counts) if ttft else 0,
        first_token_s=ttft.total if ttft else 0.0,
        prefix_prompt_tokens=group.hit_totals.prompt_tokens,
        prefix_found_tokens=group.hit_totals.found_tokens,
    )


def _rule(group: Group, decider: Decider | None, policy: str | None) -> Rule | None:
    if decider is None or policy is None:
        return None
    stats, ahead = decider.stats, decider.look_ahead
    chosen = ahead.parameters if ahead else None
    name = policy if group.serves is None else "least_prefill"
    return Rule(
        policy=name,
        summary=POLICIES[name].summary,
        dispatch=decider.dispatch.value,
        overcommit=decider.overcommit.requests,
        horizon=chosen.horizon if chosen else None,
        discount=chosen.discount if chosen else None,
        tie_weight=chosen.tie_weight if chosen else None,
        lead_tokens=chosen.lead_tokens if chosen else None,
        skill=ahead.skill if ahead else None,
        decisions=sum(stats.decision_s.counts),
        decision_s=stats.decision_s.total,
        policy_errors=stats.policy_errors,
    )
