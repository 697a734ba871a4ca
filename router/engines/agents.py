"""Power of workers from agents (``evenstep agent``), where engines do not tell it themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping

import zmq

from router.energy.joules import METER_SILENT_S
from router.engines.curve import KeyPair
from router.engines.socket_reader import Socket
from router.engines.streams import OPTIONS
from router.errors import SnapshotError
from router.types import PowerTold, WorkerSpec
from router.wire import PowerMessage, decode_power

log = logging.getLogger(__name__)

_PAUSE_S = 0.25
_BATCH = 256
_REASONS = 16
_LARGEST_BYTES = 65_536
_OPTIONS: Mapping[int, int | bytes] = {
    **OPTIONS,
    zmq.MAXMSGSIZE: _LARGEST_BYTES,
    zmq.SUBSCRIBE: b"",
}


# An endpoint, and the key of whom is expected there.
_Place = tuple[str, str | None]


class _Agent:
    """One endpoint, and the workers whose power comes from there."""

    def __init__(self, endpoint: str, socket: Socket, now_s: float) -> None:
        self.endpoint = endpoint
        self.socket = socket
        self.specs: list[WorkerSpec] = []
        self.heard_s = now_s
        self.silent = False
        self.reasons: set[str] = set()

    def close(self) -> None:
        """Nobody's power comes from there any more."""
        self.socket.close(linger=0)

    def whose(self, message: PowerMessage) -> list[WorkerSpec]:
        """The workers that a message may mean: by name, else by rank."""
        if message.worker:
            return [spec for spec in self.specs if spec.id == message.worker]
        return [spec for spec in self.specs if (spec.rank or 0) == message.rank]

    def complain(self, reason: str) -> None:
        """Say why something does not count, once."""
        if reason not in self.reasons and len(self.reasons) < _REASONS:
            self.reasons.add(reason)
            log.warning("power agent %s: %s", self.endpoint, reason)


class PowerAgents:
    """Follows all agents; one that cannot be reached or understood costs nothing but the power.

    Args:
        specs: workers; those without a power endpoint are passed over.
        apply: takes what each agent tells.
        clock: seconds, monotonic.
        keys: the router's CURVE keys, for workers that have a server key.

    Attributes:
        received: messages of agents that were understood.
        broken: messages that were not understood, or may be of several workers.
        failures: messages that ``apply`` raised at.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[PowerTold], None],
        clock: Callable[[], float],
        keys: KeyPair | None = None,
    ) -> None:
        self.received = 0
        self.broken = 0
        self.failures = 0
        self._apply = apply
        self._clock = clock
        self._keys = keys
        self._specs = {spec.id: spec for spec in specs}
        self._agents: dict[_Place, _Agent] = {}
        self._context: zmq.Context[Socket] | None = None

    def join(self, spec: WorkerSpec) -> None:
        """One more worker."""
        self._specs[spec.id] = spec
        if self._context is not None:
            self._follow(spec, self._context)

    def leave(self, worker_id: str) -> None:
        """A worker is gone; an agent that speaks for nobody else is heard no more."""
        del self._specs[worker_id]
        for place, agent in list(self._agents.items()):
            agent.specs = [spec for spec in agent.specs if spec.id != worker_id]
            if not agent.specs:
                self._agents.pop(place).close()

    async def run(self) -> None:
        """Read what comes until cancelled."""
        with zmq.Context() as self._context:
            try:
                for spec in self._specs.values():
                    self._follow(spec, self._context)
                while True:
                    for agent in self._agents.values():
                        self._read(agent)
                        self._look(agent)
                    await asyncio.sleep(_PAUSE_S)
            finally:
                self._context.destroy(linger=0)

    def _follow(self, spec: WorkerSpec, context: zmq.Context[Socket]) -> None:
        if spec.power is None:
            return
        place = spec.power, spec.server_key
        agent = self._agents.get(place)
        if agent is None:
            agent = _Agent(spec.power, self._socket(context, spec.server_key), self._clock())
            self._agents[place] = agent
            self._dial(agent)
        agent.specs.append(spec)

    def _socket(self, context: zmq.Context[Socket], key: str | None) -> Socket:
        socket = context.socket(zmq.SUB)
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        if key is not None and self._keys is not None:
            self._keys.secure(socket, key)
        return socket

    def _dial(self, agent: _Agent) -> None:
        try:
            agent.socket.connect(agent.endpoint)
        except zmq.ZMQError as error:
            agent.complain(f"no connection ({error.strerror})")

    def _read(self, agent: _Agent) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_BATCH):
                self._take(agent, agent.socket.recv(zmq.NOBLOCK))

    def _take(self, agent: _Agent, message: bytes) -> None:
        try:
            told = decode_power(message)
        except SnapshotError as error:
            self.broken += 1
            agent.complain(str(error))
            return
        agent.heard_s, agent.silent = self._clock(), False
        specs = agent.whose(told)
        if len(specs) <= 1:
            self.received += 1
            for spec in specs:
                self._tell(PowerTold(spec.id, told.power_w, told.energy_j, agent.heard_s))
        else:
            self.broken += 1
            agent.complain(
                f"several workers may be rank {told.rank} there: start the agent with their names, "
                f"as in --ranks-of {specs[0].id}=GPU"
            )

    def _tell(self, power: PowerTold) -> None:
        try:
            self._apply(power)
        except Exception:
            self.failures += 1
            if not self.failures & (self.failures - 1):  # not at every message
                log.exception("%s: an agent's message could not be applied", power.worker_id)

    def _look(self, agent: _Agent) -> None:
        """Connect anew while nothing comes: ZMQ dials no more where keys have differed."""
        now_s = self._clock()
        if now_s - agent.heard_s < METER_SILENT_S:
            return
        agent.heard_s = now_s
        if not agent.silent:
            agent.silent = True
            log.warning(
                "power agent %s: nothing heard for %g s, so that power is unknown: does "
                "evenstep agent run there, with keys that match?",
                agent.endpoint,
                METER_SILENT_S,
            )
        with contextlib.suppress(zmq.ZMQError):  # it has dropped the connection itself
            agent.socket.disconnect(agent.endpoint)
        self._dial(agent)
