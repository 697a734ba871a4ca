"""Fair shares of a group's slots between those who wait for them, told apart by their keys.

Max-min fair, by weight: a level rises for all alike until the slots are used up; who wants less
than the level gets all that it wants, the others as many slots each as the level says. Who has had
less than its share of late may have more for a while, so that a burst of somebody who asks seldom
is not held up by somebody who asks without end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Weight = Callable[[str], float]

# What one may wait for in a round, in slots; see ``FairShare.turns``.
Offer = Mapping[str, float]

_OF_LATE_S = 60.0
# How much more what one has had of late counts than what it has now.
_OF_LATE = 2.0
# Parts of a share up to which one has so little that others come later.
_STEPS = (0.25, 0.5, 0.75, 1.1)
# A policy is offered so much more of a tenant's than its share, to have a choice: of the share.
_CHOICE = 0.25
_FORGOTTEN_SLOTS = 1e-3


def equal(_: str) -> float:
    """The weight of all where nobody has said another."""
    return 1.0


def level(wanted: Mapping[str, float], weight: Weight, slots: float) -> float:
    """The slots per weight at which the wants of all, cut off there, come to these slots.

    Args:
        wanted: slots that each tenant could use, by tenant.
        weight: of a tenant, above 0.
        slots: to be divided.

    Returns:
        Infinity where there are enough for all.
    """
    weights = sum(map(weight, wanted))
    for tenant in sorted(wanted, key=lambda each: wanted[each] / weight(each)):
        if wanted[tenant] * weights >= slots * weight(tenant):
            return slots / weights
        slots -= wanted[tenant]
        weights -= weight(tenant)
    return math.inf


class FairShare:
    """Whose turn it is in a group.

    Args:
        weight: of a tenant, above 0; asked each time, so that it may change.
        of_late_s: time over which the slots that a tenant has held are averaged, the newer ones
            counting more.
    """

    def __init__(self, weight: Weight = equal, of_late_s: float = _OF_LATE_S) -> None:
        self.weight = weight
        self._of_late_s = of_late_s
        self._of_late: dict[str, float] = {}
        self._watched = 0.0  # share of the time that is averaged over
        self._seen_at: float | None = None

    def of_late(self, tenant: str) -> float:
        """Slots that a tenant has held of late, on average."""
        return self._of_late.get(tenant, 0.0) / (self._watched or 1.0)

    def see(self, now: float, held: Mapping[str, int]) -> None:
        """Take note of the slots that each tenant holds; to be called a few times a second."""
        past_s = 0.0 if self._seen_at is None else now - self._seen_at
        kept = math.exp(-past_s / self._of_late_s)
        self._seen_at = now
        self._watched = kept * self._watched + 1 - kept
        before, self._of_late = self._of_late, {}
        for tenant in before.keys() | held.keys():
            slots = kept * before.get(tenant, 0.0) + (1 - kept) * held.get(tenant, 0)
            if slots > _FORGOTTEN_SLOTS:
                self._of_late[tenant] = slots

    def turns(
        self, held: Mapping[str, int], waiting: Mapping[str, int], capacity: int
    ) -> Sequence[Offer]:
        """Who is served before whom, in slots by tenant; what is left over comes after them.

        In four steps, from those who have least of their share, now and of late, to those who have
        it or hardly more. In one step a policy may choose freely, for the more it may choose from
        the better it balances: so tenants that are about equal are left to it.

        Args:
            held: slots in use, by tenant.
            waiting: slots that are waited for, by tenant.
            capacity: slots that are free.
        """
        wanted = {each: float(held.get(each, 0)) for each in held.keys() | waiting.keys()}
        slots = sum(wanted.values()) + capacity
        for tenant, more in waiting.items():
            wanted[tenant] += more
        full = level(wanted, self.weight, slots)
        turns: list[dict[str, float]] = [{} for _ in _STEPS]
        for tenant in waiting:
            share = full * self.weight(tenant)
            used = (held.get(tenant, 0) + _OF_LATE * self.of_late(tenant)) / (1 + _OF_LATE)
            step = next((i for i, part in enumerate(_STEPS) if used < part * share), None)
            if step is not None:
                room = (_STEPS[-1] * share - used) * (1 + _OF_LATE)
                turns[step][tenant] = math.inf if room >= capacity else room + _CHOICE * share
        return [turn for turn in turns if turn]
