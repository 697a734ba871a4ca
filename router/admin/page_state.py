"""State shown on the status page, a sample; the page computes differences between samples."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any

from router.admin.facts import Footing, facts, shortcoming
from router.core.clock import Clock
from router.core.forecast.look_ahead import Parameters
from router.core.policies.policy_table import POLICIES
from router.core.rounds.decider import Decider
from router.core.state import lockstep
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.state.worker import Worker
from router.core.types import Outcome

_VERSION = version("evenstep")

Shown = dict[str, Any]


@dataclass(slots=True)
class Status:
    """Reads the state that the page shows; what is unknown is None.

    Attributes:
        deciders: deciders by group; empty if nothing is routed (``evenstep observe``).
        problem: returns why a worker's snapshots are unusable.
        emulated: whether a worker's engine reports itself as emulated.
    """

    cluster: Cluster
    clock: Clock
    deciders: Mapping[str, Decider] = field(default_factory=dict)
    problem: Callable[[str], str | None] = lambda _: None
    emulated: Callable[[str], bool] = lambda _: False

    def read(self, footing: Footing) -> Shown:
        now_s = self.clock()
        groups = [self._group(group, footing, now_s) for group in self.cluster.groups.values()]
        return {
            "version": _VERSION,
            "time_s": time.time(),
            "clock_s": now_s,
            "replica": footing.replica,
            "groups": groups,
        }

    def _group(self, group: Group, footing: Footing, now_s: float) -> Shown:
        decider = self.deciders.get(group.name)
        powered = sum(worker.power_w(now_s) is not None for worker in group.live_workers())
        prefills = self.cluster.prefill_group(group.name)
        return {
            "name": group.name,
            "serves": group.serves.name if group.serves else None,
            "lockstep": group.lockstep,
            "lockstep_by": lockstep.source(group),
            "barrier": group.barrier,
            "emulated": any(map(self.emulated, group.workers)),
            "pool_requests": decider.waiting if decider else None,
            "sums": _sums(group, decider),
            "rule": _rule(group, decider, footing.policy),
            "facts": facts(group, prefills, decider, powered, footing),
            "workers": [self._worker(each, now_s) for each in group.workers.values()],
        }

    def _worker(self, worker: Worker, now_s: float) -> Shown:
        spec, feed = worker.spec, worker.feed
        # Without snapshots all slots count as in use.
        running = worker.slots if feed is None else feed.running
        memory = worker.foreign.gauges if feed is None else feed
        unread = feed is not None and "memory" in worker.unreported
        return {
            "id": spec.id,
            "rank": spec.rank,
            "up": worker.live,
            "draining": worker.draining,
            "breaker": worker.breaker.state.value,
            "reason": worker.down_reason,
            "load_tokens": worker.load_tokens,
            "requests": worker.requests,
            "queued": max(0, worker.requests - running),
            "slots": worker.slots,
            "service_rate": worker.service.known_per_s,
            "kv_usage": None if memory is None or unread else memory.kv_usage,
            "power_w": worker.power_w(now_s),
            "source": worker.source.value,
            "age_s": None if feed is None else round(now_s - feed.received_s, 2),
            "problem": self.problem(spec.id) or shortcoming(worker) if spec.snapshots else None,
        }


def _sums(group: Group, decider: Decider | None) -> Shown:
    steps, joules = group.every_step, group.energy.joules
    outcomes = decider.stats.outcomes if decider else {}
    ttft = decider.stats.ttft_s if decider else None
    of_steps = (
        *("steps", "imbalance_tokens", "max_load_tokens", "worker_steps", "output_tokens"),
        *("step_s", "waiting_s", "timed_s", "measured_s"),
    )
    return {
        **{name: getattr(steps, name) for name in of_steps},
        "useful_j": joules.useful_j,
        "waiting_j": joules.waiting_j,
        "idle_j": joules.idle_j,
        "undivided_j": joules.unknown_j,
        "completed": outcomes.get(Outcome.COMPLETED, 0),
        "failed": outcomes.get(Outcome.FAILED, 0) + outcomes.get(Outcome.EXPIRED, 0),
        "targets": decider.stats.verdicts.total() if decider else 0,
        "targets_met": decider.stats.verdicts["met"] if decider else 0,
        "first_tokens": sum(ttft.counts) if ttft else 0,
        "first_token_s": ttft.total if ttft else 0.0,
        "prefix_prompt_tokens": group.hit_totals.prompt_tokens,
        "prefix_found_tokens": group.hit_totals.found_tokens,
    }


def _rule(group: Group, decider: Decider | None, policy: str | None) -> Shown | None:
    if decider is None or policy is None:
        return None
    stats, ahead = decider.stats, decider.look_ahead
    name = policy if group.serves is None else "least_prefill"
    unknown = {each.name: None for each in fields(Parameters)}
    return {
        "policy": name,
        "summary": POLICIES[name].summary,
        "dispatch": decider.dispatch.value,
        "overcommit": decider.overcommit.requests,
        **(asdict(ahead.parameters) if ahead else unknown),
        "skill": ahead.skill if ahead else None,
        "decisions": sum(stats.decision_s.counts),
        "decision_s": stats.decision_s.total,
        "policy_errors": stats.policy_errors,
    }
