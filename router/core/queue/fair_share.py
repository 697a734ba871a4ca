"""Fair shares of a group's slots between tenants.

Shares are max-min fair, by weight: a level rises for all tenants until the slots are used up. A
tenant that wants less than its weight times the level gets all it wants. A tenant below its recent
share may have more for a while: a short burst need not wait behind an endless stream.
"""

import math
from collections.abc import Callable, Mapping, Sequence

Weight = Callable[[str], float]

# Slots that a tenant may compete for in a round; see ``FairShare.turns``.
Offer = Mapping[str, float]

_OF_LATE_S = 60.0
# Weight of recent use relative to present use.
_OF_LATE = 2.0
# Parts of a share that bound the turns.
_STEPS = (0.25, 0.5, 0.75, 1.1)
# Offer beyond a share, as a part of it, so that a policy has a choice.
_CHOICE = 0.25
_FORGOTTEN_SLOTS = 1e-3


# Tenants where there are no keys.
ANONYMOUS = frozenset({""})


def equal(_: str) -> float:
    """Default weight."""
    return 1.0


def level(wanted: Mapping[str, float], weight: Weight, slots: float) -> float:
    """Slots per unit of weight at which all wants, capped there, sum to these slots.

    ``wanted`` is in slots. Infinite if there are enough slots for all.
    """
    weights = sum(map(weight, wanted))
    for tenant in sorted(wanted, key=lambda each: wanted[each] / weight(each)):
        if wanted[tenant] * weights >= slots * weight(tenant):
            return slots / weights
        slots -= wanted[tenant]
        weights -= weight(tenant)
    return math.inf


class FairShare:
    """Turns of a group's tenants; ``tenants``: true once one with a key has held a slot.

    ``weight`` is above 0 and read each time, so it may change. ``of_late_s``: time constant of the
    average of held slots.
    """

    def __init__(self, weight: Weight = equal, of_late_s: float = _OF_LATE_S) -> None:
        self.weight = weight
        self._of_late_s = of_late_s
        self._of_late: dict[str, float] = {}
        self._watched = 0.0  # weight of the time observed so far in the average
        self._seen_at: float | None = None
        self.tenants = False

    def of_late(self, tenant: str) -> float:
        return self._of_late.get(tenant, 0.0) / (self._watched or 1.0)

    def see(self, now: float, held: Mapping[str, int]) -> None:
        """Record the slots that each tenant holds; call it a few times a second."""
        self.tenants = self.tenants or bool(held.keys() - ANONYMOUS)
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
        """Turns of the tenants, in slots like the arguments; what is left over comes after them.

        Four turns range from tenants with least of their share, now and recently, to those with all
        of it or slightly more. A larger choice balances better, so tenants that are about equal
        share a turn.
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
