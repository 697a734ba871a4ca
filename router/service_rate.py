"""How many requests each slot of a worker completes per second: planned, then learned.

Of the time that slots are in use, and of the requests that are completed in it, the ratio is the
maximum-likelihood rate of exponential service, and counts requests that are still under way, or
were aborted, for the time that they took (they are censored). Old completions are forgotten. Times
are on the caller's clock and come in as arguments.
"""

from __future__ import annotations

import math

# Completions that count 1/e when as many more have come: a rate is known to 1 / sqrt(1000) = 3 %.
MEMORY = 1000.0
# What is expected of a worker weighs as much as so many of its completions.
EVIDENCE = 20.0


class GroupRates:
    """What the workers of a group have in common: by how much all are off their plans together.

    So a plan that is wrong by one factor for all of them still ranks those that have completed
    nothing yet; and without a plan a new worker is expected to be as fast as the group.
    """

    def __init__(self) -> None:
        self._members: list[ServiceRate] = []
        self._expected = 0.0
        self._completions = 0.0
        self._worth = 1.0

    def join(self, planned: float | None) -> ServiceRate:
        """One more worker, with its planned rate in requests per second, if it has any."""
        member = ServiceRate(self, planned)
        self._members.append(member)
        self._settle()
        return member

    def leave(self, member: ServiceRate) -> None:
        """A worker is gone, and what was learned from it."""
        self._members.remove(member)
        self._settle()

    def amend(self, member: ServiceRate, planned: float | None) -> None:
        """A worker has another plan; what has been learned is measured by that now."""
        member.planned = planned
        self._settle()

    @property
    def factor(self) -> float:
        """Completions of all workers for each that was expected."""
        return (self._worth + self._completions) / (self._worth + self._expected)

    def add(self, expected: float, completions: float) -> None:
        """So many more completions were expected of a member, and so many more are remembered."""
        self._expected += expected
        self._completions += completions

    def _settle(self) -> None:
        """Workers without a plan are expected to be like the mean of those that have one."""
        plans = [each.planned for each in self._members if each.planned is not None]
        self._worth = EVIDENCE if plans else 1.0
        mean = sum(plans) / len(plans) if plans else 1.0
        for member in self._members:
            member.expected = mean if member.planned is None else member.planned
        self._completions = sum(each.completions for each in self._members)
        self._expected = sum(each.expected * each.busy_s for each in self._members)


class ServiceRate:
    """One worker's.

    Args:
        group: what it has in common with the others; makes it by ``join``.
        planned: requests per second and slot; None: not planned.

    Attributes:
        expected: requests per second and slot before anything is known of it alone.
        completions: engine requests completed, as far as they are remembered.
        busy_s: slot-seconds in use, remembered for as long.
    """

    def __init__(self, group: GroupRates, planned: float | None) -> None:
        self.planned = planned
        self.expected = 1.0
        self.completions = self.busy_s = 0.0
        self._group = group
        self._requests = self._slots = 0
        self._since_s: float | None = None

    @property
    def per_s(self) -> float:
        """mu, requests that a slot completes per second; positive."""
        prior = self.expected * self._group.factor
        return prior * (EVIDENCE + self.completions) / (EVIDENCE + prior * self.busy_s)

    @property
    def error(self) -> float:
        """Relative standard error of what was learned; 0 while that is nothing."""
        return math.sqrt(self.completions) / (EVIDENCE + self.completions)

    @property
    def known_per_s(self) -> float | None:
        """The same; None while nothing is planned, and nothing has been completed."""
        return None if self.planned is None and not self.completions else self.per_s

    def sent(self, requests: int, slots: int, now_s: float | None) -> None:
        """The worker, of so many slots, is given engine requests; None: nobody tells the time."""
        self._look(now_s)
        self._requests += requests
        self._slots = slots

    def gone(self, requests: int, now_s: float | None, *, complete: bool) -> None:
        """Engine requests are no longer there."""
        self._look(now_s)
        self._requests -= requests
        if complete and now_s is not None:
            self._learn(requests)

    def _look(self, now_s: float | None) -> None:
        """Time has passed; who queues in the engine is in no slot yet."""
        if now_s is not None and self._since_s is not None:
            busy_s = min(self._requests, self._slots) * max(0.0, now_s - self._since_s)
            self.busy_s += busy_s
            self._group.add(self.expected * busy_s, 0.0)
        self._since_s = now_s

    def _learn(self, completions: int) -> None:
        kept = math.exp(-completions / MEMORY)
        before_s, before = self.busy_s, self.completions
        self.busy_s *= kept
        self.completions = kept * before + completions
        self._group.add(self.expected * (self.busy_s - before_s), self.completions - before)
