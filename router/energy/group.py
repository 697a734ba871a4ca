"""Energy of a group's workers, step by step.

Meters are read less often than steps are made: what a worker has used since the last reading is
divided by all that it has done since then.

How long a worker waits in a step follows from the loads: t_l (max L - L_g), where t_l is fitted to
the group's own steps. Only where all ranks with something to run have made a step together does
anybody wait for another: of other steps nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.energy.joules import (
    METER_SILENT_S,
    EnergyCounter,
    Joules,
    KvShares,
    PowerLevels,
    Span,
    divided,
    waiting_share,
)
from router.energy.levels import LevelFit
from router.energy.step_fit import FittedStep, StepFit
from router.types import PowerTold, Snapshot

_REFIT_STEPS = 64
# A gap that is shorter is the time between two steps of a busy engine; one that is longer than
# METER_SILENT_S its clock that was set, since idle engines speak each second.
_LEAST_GAP_S = 1e-3


@dataclass(slots=True)
class _Account:
    """Of one worker.

    Attributes:
        shares: what requests have come to of it, by the tokens that they held.
        time_s: of the last message.
        pending_j: used, and not divided yet; ``span`` is what it has done meanwhile.
        covered: its meter has counted that time, or will have.
        open: it has reported a step that is not over for all.
        idle: nothing ran at the last reading.
        step: that it reported last, of a worker that steps alone.
        waited_s: for how long it waited in that step, as its engine has timed it.
        asked: tokens that requests held in that step.
    """

    shares: KvShares
    counter: EnergyCounter = field(default_factory=EnergyCounter)
    time_s: float | None = None
    pending_j: float = 0.0
    span: Span = field(default_factory=Span)
    covered: bool = False
    open: bool = False
    idle: bool = False
    step: int = -1
    waited_s: float | None = None
    asked: Mapping[str, int] = field(default_factory=dict)


class GroupEnergy:
    """Sums over the steps of one group; workers that leave take nothing with them.

    Args:
        levels: calibrated power of a worker's GPUs; None: steps' joules cannot be divided.

    Attributes:
        joules: by what they were spent on.
        fitted: what a step costs; None while the steps do not tell.
        level_fit: what the meters say of the levels themselves.
    """

    def __init__(self, levels: PowerLevels | None = None) -> None:
        self.joules = Joules()
        self.fitted: FittedStep | None = None
        self.level_fit = LevelFit()
        self._levels = levels
        self._accounts: dict[str, _Account] = {}
        self._shares: dict[str, KvShares] = {}
        self._fit = StepFit()
        self._steps = 0

    @property
    def metered(self) -> bool:
        """Some worker says what it uses."""
        return bool(self._accounts)

    def report(
        self,
        worker_id: str,
        snapshot: Snapshot,
        asked: Mapping[str, int],
        *,
        idle: bool,
        stepped: bool,
    ) -> None:
        """A worker has said what it uses.

        Args:
            worker_id: who.
            snapshot: its message; its power or its counter count, if it has them.
            asked: KV tokens that requests held in the step, of those that are asked about.
            idle: nothing ran on it since its message before.
            stepped: the message is of a step that was not reported before.
        """
        account = self._account(worker_id)
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
        """A worker that waits for no other has spoken, and runs nothing now if ``idle``."""
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
        """The agent of a worker that tells no steps has spoken; ``idle``: nothing runs there."""
        account = self._account(worker_id)
        since_s = 0.0 if account.time_s is None else power.received_s - account.time_s
        seconds = since_s if since_s < METER_SILENT_S else 0.0
        used_j = account.counter.since(power.energy_j, power.power_w, seconds) or 0.0
        rested, account.idle, account.time_s = account.idle and idle, idle, power.received_s
        self.joules += Joules(idle_j=used_j) if rested else Joules(unknown_j=used_j)

    def close(
        self, loads: Mapping[str, int], peak: int, step_s: float, *, together: bool
    ) -> float | None:
        """A step is over; seconds per token of load by which ranks waited, None: not known.

        Args:
            loads: L_g of the workers that have reported it; may be left out if none is metered.
            peak: max L.
            step_s: how long it took.
            together: all workers with something to run have made it.
        """
        if together:
            self._learn(peak, step_s)
        per_token_s = self.fitted.per_token_s if self.fitted and together else None
        for worker_id, account in self._accounts.items():
            if account.open and worker_id in loads:
                share = (
                    waiting_share(loads[worker_id], peak, step_s, per_token_s)
                    if account.waited_s is None or step_s <= 0
                    else min(1.0, account.waited_s / step_s)
                )
                if account.covered:
                    account.span.step(step_s, share)
                    account.shares.step(step_s, loads[worker_id], account.asked)
                account.open = False
                self._divide(account)
        return per_token_s

    def of_request(self, worker_id: str, request_id: str) -> float | None:
        """Joules so far of a request that is asked about; None: not known."""
        shares = self._shares.get(worker_id)
        return None if shares is None else shares.of(request_id)

    def forget(self, worker_id: str, request_id: str) -> None:
        """A request is no longer asked about."""
        if worker_id in self._shares:
            self._shares[worker_id].forget(request_id)
        account = self._accounts.get(worker_id)
        if account is not None:
            account.asked = {i: held for i, held in account.asked.items() if i != request_id}

    def leave(self, worker_id: str) -> None:
        """A worker is gone; what it had used and no step has shown is unknown.

        Its requests keep what they have come to: it may only have been silent for a while.
        """
        account = self._accounts.pop(worker_id, None)
        if account is not None and account.pending_j:
            account.shares.pay(account.pending_j, account.span.step_s)
            self.joules += Joules(unknown_j=account.pending_j)

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone for good, and no request is on it that asks what it has used."""
        self.leave(worker_id)
        self._shares.pop(worker_id, None)

    def _account(self, worker_id: str) -> _Account:
        account = self._accounts.get(worker_id)
        if account is None:
            shares = self._shares.setdefault(worker_id, KvShares())
            account = self._accounts[worker_id] = _Account(shares)
        return account

    def _divide(self, account: _Account) -> None:
        """What a meter has counted of late, by what the worker did meanwhile."""
        if account.pending_j:
            found = divided(account.pending_j, account.span, self._levels)
            account.shares.pay(found.total_j - found.idle_j, account.span.step_s)
            self.joules += found
            self.level_fit.observe(account.pending_j, account.span)
            account.pending_j, account.span = 0.0, Span()

    def _learn(self, peak: int, step_s: float) -> None:
        self._fit.observe(peak, step_s)
        self._steps += 1
        if self._steps % _REFIT_STEPS == 0:
            self.fitted = self._fit.fitted()
