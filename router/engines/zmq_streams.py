from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zmq

from router.core.errors import ConfigError
from router.core.step_time import StepBudget
from router.core.types import DEFAULT_SLOTS, Snapshot, WorkerSpec
from router.core.wire import BUDGET_LEASE_S, BudgetMessage, full_endpoint
from router.engines.worker_identity import foreign_stream
from router.engines.zmq_reader import LARGEST_BYTES, Socket

FULL_INTERVAL_S = 0.2
SILENCE_S = 5.0
# A prompt budget is told anew when a quarter of its lease is over, and sooner if it has changed by
# more than this share; small steps change it often.
_RENEWED_S = BUDGET_LEASE_S / 4
_CHANGED_S, _CHANGED_SHARE = 0.05, 1 / 16
PATIENCE = 1.5  # allows for an engine's start


@dataclass(slots=True, eq=False)
class Channel:
    """The SUB socket for workers of one key, or for those without."""

    socket: Socket
    streams: list[Stream] = field(default_factory=list)
    by_epoch: dict[str, Stream] = field(default_factory=dict)
    # Epochs of workers that left; their messages may still arrive.
    gone: set[str] = field(default_factory=set)
    introduced_s: float = -math.inf  # when silent workers were last asked to identify
    emptied_s: float = -math.inf  # when the socket was last found empty

    @property
    def name(self) -> str:
        first = self.streams[0].name
        return f"{first} or another" if len(self.streams) > 1 else first

    def sender(self, epoch: str) -> Stream | None:
        if len(self.streams) == 1 and epoch not in self.gone:
            return self.streams[0]
        return self.by_epoch.get(epoch)


@dataclass(slots=True, eq=False)
class Stream:
    """One worker's snapshots."""

    spec: WorkerSpec
    named: str | None  # the user's name of the worker; None: the stream need not carry it
    endpoint: str
    channel: Channel
    dealer: Socket  # socket for requests of full snapshots
    name: str = field(init=False)
    monitor: Socket | None = None
    asked: asyncio.TimerHandle | None = None  # timer until the next request for a full snapshot
    interval_s: float = FULL_INTERVAL_S  # its length; doubles without an answer
    heard_s: float = -math.inf
    expected_s: float = math.inf  # since when messages are due
    silence: str | None = None  # description of a silence that is too long
    looked: asyncio.TimerHandle | None = None  # timer until the next check for silence
    epoch: str | None = None  # of the engine seen last
    foreign: bool = False  # whether that engine is another worker's
    problem: str | None = None  # why the stream is ignored
    fault: str | None = None  # why the last message was ignored; cleared by a full snapshot
    unreported: tuple[str, ...] = ()  # what the engine's plug-in cannot read
    slots: int = 0  # as the engine reported, 0 before
    told: BudgetMessage | None = None  # prompt budget that was sent last

    def __post_init__(self) -> None:
        self.name = self.spec.id

    def silent(self, now_s: float) -> bool:
        """Unread messages count as arrived."""
        until_s = self.heard_s + SILENCE_S
        channel = self.channel
        read = channel.emptied_s > until_s or not channel.socket.poll(0)
        return now_s > until_s and read and not self.dealer.poll(0)

    def hear(self, now_s: float) -> None:
        self.heard_s = now_s
        self.silence = None

    def miss(self, now_s: float) -> bool:
        """Note a silence; True if it is new and should be logged."""
        before, silent_s = self.silence, now_s - max(self.heard_s, self.expected_s)
        self.silence = None
        if silent_s > PATIENCE * SILENCE_S:
            self.silence = (
                f"nothing received from {self.endpoint} for {silent_s:.0f} s: is the plug-in "
                "loaded, the port right, does the engine use keys, are its messages below "
                f"{LARGEST_BYTES >> 20} MiB?"
            )
            if self.spec.slots is None and not self.slots:
                self.silence += f" Until it tells, {DEFAULT_SLOTS} slots are assumed: give slots=N"
        return before is None and self.silence is not None

    def dial(self) -> None:
        for socket, endpoint in self._connections():
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"snapshots {endpoint!r}: {error}") from error

    def redial(self) -> None:
        """ZMQ stops dialling after a key mismatch, for example."""
        self._hang_up()
        self.dial()

    def _hang_up(self) -> None:
        for socket, endpoint in self._connections():
            with contextlib.suppress(zmq.ZMQError):  # it has dropped the connection itself
                socket.disconnect(endpoint)

    def close(self) -> None:
        self._hang_up()
        self.channel.streams.remove(self)
        epochs = [epoch for epoch, owner in self.channel.by_epoch.items() if owner is self]
        for epoch in epochs:
            del self.channel.by_epoch[epoch]
        self.channel.gone.update(epochs)
        self.cancel_timers()
        if self.monitor is not None:
            self.dealer.disable_monitor()
            self.monitor.close(linger=0)
        self.dealer.close(linger=0)

    def cancel_timers(self) -> None:
        for timer in (self.asked, self.looked):
            if timer is not None:
                timer.cancel()

    def notes(self, snapshot: Snapshot) -> Iterator[str]:
        """What is worth a line in the log, once: other slots, and what the plug-in cannot read."""
        slots, configured = snapshot.slots, self.spec.slots
        if slots != self.slots and "slots" not in snapshot.unreported:
            self.slots = slots
            if configured is not None and configured != slots:
                rest = (
                    "the rest of its slots stay empty"
                    if configured < slots
                    else "the rest queue there"
                )
                yield (
                    f"configured with slots={configured}, but its engine runs {slots} requests at "
                    f"once, so that {rest}: leave slots out, or set it to {slots}, unless this is "
                    "intended"
                )
        news = snapshot.unreported != self.unreported
        if news or snapshot.kind == "stateless":
            self.unreported = snapshot.unreported
            named = ", ".join(self.unreported) or "nothing"
            said = (
                f"its engine's plug-in cannot read {named} of this vLLM; the engine's log says why"
            )
            if snapshot.kind == "stateless":
                self.fault = said
            if news:
                yield said

    def owes_budget(self, budget: StepBudget, snapshot: Snapshot) -> bool:
        told = self.told
        if told is None or told.epoch != snapshot.epoch:
            return True
        age_s = snapshot.time_s - told.seen_s
        if not -BUDGET_LEASE_S < age_s < _RENEWED_S:  # or its clock was set back
            return True
        changed = abs(budget.tokens - told.tokens) > _CHANGED_SHARE * told.tokens
        return (changed or budget.every != told.every) and age_s >= _CHANGED_S

    def _connections(self) -> Iterable[tuple[Socket, str]]:
        return (self.channel.socket, self.endpoint), (self.dealer, full_endpoint(self.endpoint))

    def meet(self, snapshot: Snapshot) -> str | None:
        """Record a new epoch; return why its engine is not the worker's."""
        problem = foreign_stream(self.spec, self.named, snapshot)
        self.foreign = problem is not None
        owners = self.channel.by_epoch
        if self.epoch is not None and owners.get(self.epoch) is self:
            del owners[self.epoch]
        self.epoch = snapshot.epoch
        self.channel.gone.discard(self.epoch)
        owner = owners.get(self.epoch)
        if owner is None or owner.foreign:
            owners[self.epoch] = self
        return problem
