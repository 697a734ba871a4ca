"""Whose snapshots come through which sockets, and who is who there."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Mapping

import zmq

from router.engines.identity import foreign_stream
from router.engines.socket_reader import Socket
from router.errors import ConfigError
from router.types import Snapshot, WorkerSpec
from router.wire import MOST_BYTES, full_endpoint

FULL_INTERVAL_S = 0.2
SILENCE_S = 5.0
PATIENCE = 1.5  # of an engine that has just started

OPTIONS: Mapping[int, int] = {
    zmq.LINGER: 0,
    zmq.IPV6: 1,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 1000,
    zmq.MAXMSGSIZE: 4 * MOST_BYTES,
    # No heartbeats of ZMQ's: they end a process whose full queue is not read in time ("Assertion
    # failed: _input_stopped"). Engines and agents say something every second or so; else they are
    # dialled anew.
}
"""Of every socket on which the router listens."""


class Channel:
    """The socket for what the workers of one key publish, or those without a key.

    Attributes:
        by_epoch: whose engine has an epoch, as far as that is known.
        gone: epochs of engines whose workers have left; what they published may still come.
        introduced_s: when the silent ones were last asked who they are.
        emptied_s: when all that had come was last read.
    """

    __slots__ = ("by_epoch", "emptied_s", "gone", "introduced_s", "socket", "streams")

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.streams: list[Stream] = []
        self.by_epoch: dict[str, Stream] = {}
        self.gone: set[str] = set()
        self.introduced_s = -math.inf
        self.emptied_s = -math.inf

    @property
    def name(self) -> str:
        """Of whose messages cannot be told apart."""
        first = self.streams[0].name
        return f"{first} or another" if len(self.streams) > 1 else first

    def sender(self, epoch: str) -> Stream | None:
        """Who published a snapshot; None if nobody is known to have its epoch."""
        if len(self.streams) == 1 and epoch not in self.gone:
            return self.streams[0]
        return self.by_epoch.get(epoch)


class Stream:
    """What one worker says.

    Attributes:
        name: the worker's id.
        channel: through which it publishes.
        dealer: asks for full snapshots, and gets them.
        named: the name that the user gave the worker, None where the stream need not have it.
        asked: runs until a full snapshot may be asked for again.
        interval_s: how long that is; it doubles while no answer comes.
        heard_s: when something came last.
        expected_s: since when something should have come.
        silence: how long nothing has come, and why that may be; None while all is well.
        looked: runs until that is looked at.
        epoch: of the engine whose stream it was last seen to be.
        foreign: whether that engine is not the worker's.
        problem: why nothing of it counts now, None as far as all is well.
        fault: why its last message did not count, None since a full snapshot did.
        slots: those that its engine has reported, 0 before that.
    """

    __slots__ = (
        "asked",
        "channel",
        "dealer",
        "endpoint",
        "epoch",
        "expected_s",
        "fault",
        "foreign",
        "heard_s",
        "interval_s",
        "looked",
        "monitor",
        "name",
        "named",
        "problem",
        "silence",
        "slots",
        "spec",
    )

    def __init__(
        self,
        spec: WorkerSpec,
        named: str | None,
        endpoint: str,
        channel: Channel,
        dealer: Socket,
    ) -> None:
        self.spec = spec
        self.name = spec.id
        self.named = named
        self.endpoint = endpoint
        self.channel = channel
        self.dealer = dealer
        self.monitor: Socket | None = None
        self.asked: asyncio.TimerHandle | None = None
        self.interval_s = FULL_INTERVAL_S
        self.heard_s = -math.inf
        self.expected_s = math.inf
        self.silence: str | None = None
        self.looked: asyncio.TimerHandle | None = None
        self.epoch: str | None = None
        self.foreign = False
        self.problem: str | None = None
        self.fault: str | None = None
        self.slots = 0

    def silent(self, now_s: float) -> bool:
        """Whether nothing has come of it for a while; what waits to be read may be its own."""
        until_s = self.heard_s + SILENCE_S
        channel = self.channel
        read = channel.emptied_s > until_s or not channel.socket.poll(0)
        return now_s > until_s and read and not self.dealer.poll(0)

    def hear(self, now_s: float) -> None:
        """Something has come."""
        self.heard_s = now_s
        self.silence = None

    def miss(self, now_s: float) -> bool:
        """Nothing has come that should have; True if that is to be said, for the first time."""
        before, silent_s = self.silence, now_s - max(self.heard_s, self.expected_s)
        self.silence = None
        if silent_s > PATIENCE * SILENCE_S:
            self.silence = (
                f"nothing received from {self.endpoint} for {silent_s:.0f} s: is the plug-in "
                "loaded, the port right, does the engine use keys, are its messages below "
                f"{OPTIONS[zmq.MAXMSGSIZE] >> 20} MiB?"
            )
        return before is None and self.silence is not None

    def dial(self) -> None:
        """Connect.

        Raises:
            ConfigError: an endpoint that ZMQ does not accept.
        """
        for socket, endpoint in self._connections():
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"snapshots {endpoint!r}: {error}") from error

    def redial(self) -> None:
        """Connect anew: ZMQ dials no more where keys were asked for that it did not have, say."""
        for socket, endpoint in self._connections():
            with contextlib.suppress(zmq.ZMQError):  # it has dropped the connection itself
                socket.disconnect(endpoint)
        self.dial()

    def close(self) -> None:
        """Hear no more of it, though others are heard through the same channel."""
        for socket, endpoint in self._connections():
            with contextlib.suppress(zmq.ZMQError):  # it has dropped the connection itself
                socket.disconnect(endpoint)
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
        """Ask and look no more."""
        for timer in (self.asked, self.looked):
            if timer is not None:
                timer.cancel()

    def count_slots(self, slots: int) -> str | None:
        """Take the slots that its engine reports; a warning if others are configured."""
        if slots == self.slots:
            return None
        self.slots = slots
        configured = self.spec.slots
        if configured is None or configured == slots:
            return None
        costs = "the rest of its slots stay empty" if configured < slots else "the rest queue there"
        return (
            f"configured with slots={configured}, but its engine runs {slots} requests at once, so "
            f"that {costs}: leave slots out, or set it to {slots}, unless this is intended"
        )

    def _connections(self) -> Iterable[tuple[Socket, str]]:
        return (self.channel.socket, self.endpoint), (self.dealer, full_endpoint(self.endpoint))

    def meet(self, snapshot: Snapshot) -> str | None:
        """An engine has an epoch that is new here; why it is not the worker's, None if it is.

        Nobody can take another worker's stream away by leading to the same engine.
        """
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
