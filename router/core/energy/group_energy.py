"""Energy of a group's workers, step by step.

Meters are read less often than steps end: a reading is divided over all work since the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.core.energy.joules import (
    METER_SILENT_S,
    EnergyCounter,
    Joules,
    PowerLevels,
    RequestShares,
    Span,
    divided,
)
from router.core.energy.levels import LevelFit
from router.core.events import PowerTold
from router.core.step_time import StepTime, Work
from router.core.types import Snapshot

# A shorter gap is the time between two steps of a busy engine. A gap above METER_SILENT_S means
# that the clock was set, since idle engines report each second.
_LEAST_GAP_S = 1e-3


@dataclass(slots=True)
class _Account:
    """Energy account of one worker."""

    shares: RequestShares
    counter: EnergyCounter = field(default_factory=EnergyCounter)
    epoch: str | None = None  # its engine's start; None while no snapshot has told it
    time_s: float | None = None
    pending_j: float = 0.0  # joules not divided yet
    span: Span = field(default_factory=Span)  # work done since the last division
    covered: bool = False  # true if its meter counts that time
    open: bool = False  # true if it has reported a step that others have not finished
    idle: bool = False
    step: int = -1
    # In the last step, its measured wait, and the work of metered requests.
    waited_s: float | None = None
    asked: Mapping[str, Work] = field(default_factory=dict)


class GroupEnergy:
    """Sums over a group's steps; joules of steps are divided by calibrated ``levels`` only."""

    def __init__(self, levels: PowerLevels | None = None) -> None:
        self.joules = Joules()
        self.level_fit = LevelFit()
        self._levels = levels
        self._accounts: dict[str, _Account] = {}
        self._shares: dict[str, RequestShares] = {}
        self._left: dict[str, _Account] = {}  # of workers that may return

    @property
    def metered(self) -> bool:
        return bool(self._accounts)

    def report(
        self,
        worker_id: str,
        snapshot: Snapshot,
        asked: Mapping[str, Work],
        *,
        idle: bool,
        stepped: bool,
    ) -> None:
        """``asked``: work of metered requests; ``idle``: nothing ran since the last message."""
        account = self._account(worker_id)
        self._returned(worker_id, account, snapshot)
        step_s = snapshot.step_s if stepped else 0.0
        gap_s = 0.0
        if idle and account.time_s is not None:
            gap_s = max(0.0, snapshot.time_s - account.time_s - step_s)
        account.time_s = snapshot.time_s
        if stepped:
            account.open, account.asked, account.waited_s = True, asked, snapshot.waited_s
        if not _LEAST_GAP_S < gap_s < METER_SILENT_S:
            gap_s = 0.0
        account.span.idle_s += gap_s
        counting = account.counter.counting
        used_j = account.counter.since(snapshot.energy_j, snapshot.power_w, step_s + gap_s)
        account.covered = counting or used_j is not None
        if used_j is not None:
            account.pending_j += used_j
        elif not counting:
            account.span = Span()
        if idle and not account.open:
            self._divide(account)

    def alone(self, worker_id: str, snapshot: Snapshot, *, idle: bool) -> None:
        """Record a message of a worker without barrier; ``idle``: it runs nothing now."""
        if not self.metered and snapshot.power_w is None and snapshot.energy_j is None:
            return
        account = self._account(worker_id)
        rested, account.idle = account.idle, idle
        stepped, account.step = account.step != snapshot.step, snapshot.step
        self.report(worker_id, snapshot, {}, idle=rested, stepped=stepped)
        if account.open:
            if account.covered:
                account.span.step(snapshot.step_s, 0.0)
            account.open = False
            self._divide(account)

    def told(self, worker_id: str, power: PowerTold, *, idle: bool) -> None:
        """Record an agent's message on a worker without step reports; ``idle``: it runs nothing."""
        account = self._account(worker_id)
        if (left := self._left.pop(worker_id, None)) is not None:
            account.counter = left.counter
        since_s = 0.0 if account.time_s is None else power.received_s - account.time_s
        seconds = since_s if since_s < METER_SILENT_S else 0.0
        used_j = account.counter.since(power.energy_j, power.power_w, seconds) or 0.0
        rested, account.idle, account.time_s = account.idle and idle, idle, power.received_s
        self.joules += Joules(idle_j=used_j) if rested else Joules(unknown_j=used_j)

    def close(
        self,
        work: Mapping[str, Work],
        waits: Mapping[str, float],
        step_s: float,
        cost: StepTime | None,
    ) -> None:
        """``work``: of workers that reported it; ``waits``: modelled, empty if unknown."""
        for worker_id, account in self._accounts.items():
            if account.open and worker_id in work:
                waited_s = waits.get(worker_id) if account.waited_s is None else account.waited_s
                share = None
                if waited_s is not None and step_s > 0:
                    share = min(1.0, waited_s / step_s)
                if account.covered:
                    account.span.step(step_s, share)
                    account.shares.step(step_s, work[worker_id], account.asked, cost)
                account.open = False
                self._divide(account)

    def of_request(self, worker_id: str, request_id: str) -> float | None:
        shares = self._shares.get(worker_id)
        return None if shares is None else shares.of(request_id)

    def forget(self, worker_id: str, request_id: str) -> None:
        if worker_id in self._shares:
            self._shares[worker_id].forget(request_id)
        account = self._accounts.get(worker_id)
        if account is not None:
            account.asked = {i: work for i, work in account.asked.items() if i != request_id}

    def leave(self, worker_id: str) -> None:
        """Undivided joules become unknown; requests keep theirs: the worker may return."""
        account = self._accounts.pop(worker_id, None)
        if account is None:
            return
        if account.counter.counting:
            self._left[worker_id] = account
        if account.pending_j:
            account.shares.pay(account.pending_j, account.span.step_s)
            self.joules += Joules(unknown_j=account.pending_j)

    def forget_worker(self, worker_id: str) -> None:
        self.leave(worker_id)
        self._left.pop(worker_id, None)
        self._shares.pop(worker_id, None)

    def _returned(self, worker_id: str, account: _Account, snapshot: Snapshot) -> None:
        """What the same engine's meter has counted while nobody listened is unknown."""
        left, account.epoch = self._left.get(worker_id), snapshot.epoch
        same = left is not None and left.epoch == snapshot.epoch
        if left is None or (same and snapshot.energy_j is None):  # a later message may tell
            return
        del self._left[worker_id]
        if same:
            used_j = left.counter.since(snapshot.energy_j, None, 0.0)
            self.joules += Joules(unknown_j=used_j or 0.0)

    def _account(self, worker_id: str) -> _Account:
        account = self._accounts.get(worker_id)
        if account is None:
            shares = self._shares.setdefault(worker_id, RequestShares())
            account = self._accounts[worker_id] = _Account(shares)
        return account

    def _divide(self, account: _Account) -> None:
        if account.pending_j:
            found = divided(account.pending_j, account.span, self._levels)
            account.shares.pay(found.total_j - found.idle_j, account.span.step_s)
            self.joules += found
            self.level_fit.observe(account.pending_j, account.span)
            account.pending_j, account.span = 0.0, Span()
