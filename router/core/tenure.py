"""Which of several replicas decides, as one of them sees it.

Each replica measures by its own clock, which must also count while its process or machine stands
still. Clocks may show any times; their speeds may differ by a tenth.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

# Share of a lease for which its holder relies on it. The rest covers clocks of unequal speed, and
# the way of what it has sent to the engines.
_RELIED = 0.8


@dataclass(slots=True)
class Tenure:
    """For how long a replica may decide: from its requests that have renewed its lock."""

    lease_s: float
    until_s: float = -math.inf

    def holds(self, now_s: float) -> bool:
        return now_s < self.until_s

    def renew(self, asked_s: float, now_s: float) -> bool:
        """Count a success that was asked for then; false if others may have decided before it."""
        unbroken = self.holds(now_s)
        self.until_s = asked_s + _RELIED * self.lease_s
        return unbroken

    def end(self) -> None:
        self.until_s = -math.inf


class Record(NamedTuple):
    """A lease as it is stored; each write changes its ``version``."""

    version: str
    holder: str | None  # empty: nobody; None: nobody has held it
    lease_s: float


class Candidate:
    """Whether a replica may write its name over what it has read of a lease.

    The times in the record are other machines'; so a lease runs from the moment at which this
    replica has first read it. One that is new may follow another that was deleted while it ran.
    """

    def __init__(self) -> None:
        self._version: str | None = None
        self.over_s = 0.0  # when the lease that was read is over

    def may_write(self, record: Record, name: str, now_s: float) -> bool:
        """``now_s``: after it was read. Only while the version is still the same."""
        if record.version != self._version:
            self._version, self.over_s = record.version, now_s + record.lease_s
        return record.holder in ("", name) or now_s >= self.over_s
