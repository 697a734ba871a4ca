"""What a key waits beside another one that asks twenty times as often, in virtual time.

The router's own pool, decider and policy; workers that serve each request for a time of its own.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from router.core.events import Arrived, Dispatched, Ended, WorkerUp
from router.core.policies.bfio.policy import BfIo
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.cluster import Cluster
from router.core.types import Dispatch, Outcome, Request, WorkerSpec
from tests.support.core import request

WORKERS, SLOTS = "abcd", 4
SERVICE_S = 1.0
# The slower key sends a batch of 24 every 10 s, 15 % of what 16 slots can do; the other one 48 a
# second, three times what they can do.
BATCH, EVERY_S, TIMES = 24, 10.0, 20
LENGTH_S = 150.0


@dataclass
class Day:
    """Requests of both keys, and how long each of them waited."""

    pool: Pool = field(default_factory=lambda: Pool(128, starvation=5.0))
    waited_s: dict[str, list[float]] = field(default_factory=lambda: {"slow": [], "fast": []})
    refused: dict[str, int] = field(default_factory=lambda: {"slow": 0, "fast": 0})
    idle: int = 0

    def __post_init__(self) -> None:
        self.cluster = Cluster(WorkerSpec(name, name, slots=SLOTS) for name in WORKERS)
        for name in WORKERS:
            self.cluster.apply(WorkerUp(name))
        group = self.cluster.groups["default"]
        policy = BfIo(0.1)
        self.decider = Decider(group, self.pool, policy, policy, Dispatch.POOL)
        self.fair = self.decider.fair
        self.random = random.Random(0)
        self.ends: list[tuple[float, str]] = []

    def arrive(self, one: Request) -> None:
        """As the dispatcher lets requests in."""
        if self.pool.full:
            displaced = self.pool.displaced_by(one.tenant, self.fair.weight)
            self.refused[(displaced or one).tenant] += 1
            if displaced is None:
                return
            self.pool.remove(displaced.id)
            self.cluster.apply(Ended(displaced.id, Outcome.DISPLACED))
        self.cluster.apply(Arrived(one))
        self.pool.add(one)

    def send(self, now_s: float) -> None:
        for assignment in self.decider.decide(now_s, lambda: now_s):
            one = self.pool.remove(assignment.request_id)
            assert one is not None
            self.cluster.apply(Dispatched(*assignment))
            self.waited_s[one.tenant].append(now_s - one.arrival_s)
            served_s = self.random.uniform(0.5, 1.5) * SERVICE_S
            heapq.heappush(self.ends, (now_s + served_s, one.id))
        free = len(WORKERS) * SLOTS - len(self.ends)
        self.idle += min(free, len(self.pool))

    def p99_s(self, tenant: str) -> float:
        waited_s = sorted(self.waited_s[tenant])
        return waited_s[int(0.99 * len(waited_s))]

    def live(self, arrivals: Iterable[Request]) -> Day:
        """Until the last request has come."""
        for one in arrivals:
            while self.ends and self.ends[0][0] <= one.arrival_s:
                now_s, request_id = heapq.heappop(self.ends)
                self.cluster.apply(Ended(request_id, Outcome.COMPLETED))
                self.send(now_s)
            self.arrive(one)
            self.send(one.arrival_s)
        return self


def traffic(*, fast: bool) -> list[Request]:
    """Both keys' requests, or the slower one's alone, which are the same each time."""
    chance = random.Random(1)
    times = [
        (start + each * 1e-3, "slow")
        for start in range(int(EVERY_S / 2), int(LENGTH_S), int(EVERY_S))
        for each in range(BATCH)
    ]
    now_s = 0.0
    while fast and (now_s := now_s + chance.expovariate(TIMES * BATCH / EVERY_S)) < LENGTH_S:
        times.append((now_s, "fast"))
    return [
        replace(request(number, 100, arrival=now_s), tenant=tenant)
        for number, (now_s, tenant) in enumerate(sorted(times))
    ]


def test_a_key_waits_at_most_twice_as_long_beside_one_that_asks_twenty_times_as_often() -> None:
    alone = Day().live(traffic(fast=False))
    both = Day().live(traffic(fast=True))

    assert alone.p99_s("slow") > 0.5 * SERVICE_S, "alone it does not wait: nothing is shown"
    assert both.p99_s("slow") <= 2 * alone.p99_s("slow")
    assert both.refused["slow"] == 0 < both.refused["fast"]
    assert both.idle == 0, "no slot is free while anybody waits"
    served = len(both.waited_s["slow"]) + len(both.waited_s["fast"])
    assert served > 0.95 * LENGTH_S * len(WORKERS) * SLOTS / SERVICE_S


def test_without_keys_it_waits_as_long_as_everybody() -> None:
    day = Day()
    day.waited_s[""], day.refused[""] = [], 0
    day.live(replace(one, tenant="") for one in traffic(fast=True))

    assert day.refused[""] > 0
    assert day.p99_s("") > 5 * SERVICE_S
