"""Power of workers from agents (``evenstep agent``), where engines do not report it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping

import zmq

from router.core.energy.joules import METER_SILENT_S
from router.core.errors import SnapshotError
from router.core.events import PowerTold
from router.core.types import WorkerSpec
from router.core.wire import PowerMessage, decode_power
from router.engines.curve_keys import KeyPair
from router.engines.zmq_reader import Socket, new_socket

log = logging.getLogger(__name__)

_PAUSE_S = 0.25
_BATCH = 256
_REASONS = 16
_OPTIONS: Mapping[int, int | bytes] = {zmq.MAXMSGSIZE: 65_536, zmq.SUBSCRIBE: b""}

# Endpoint, and server key expected there.
_Place = tuple[str, str | None]


class _Agent:
    def __init__(self, endpoint: str, socket: Socket, now_s: float) -> None:
        self.endpoint = endpoint
        self.socket = socket
        self.specs: list[WorkerSpec] = []
        self.heard_s = now_s
        self.silent = False
        self.reasons: set[str] = set()

    def whose(self, message: PowerMessage) -> list[WorkerSpec]:
        if message.worker:
            return [spec for spec in self.specs if spec.id == message.worker]
        return [spec for spec in self.specs if (spec.rank or 0) == message.rank]

    def complain(self, reason: str) -> None:
        if reason not in self.reasons and len(self.reasons) < _REASONS:
            self.reasons.add(reason)
            log.warning("power agent %s: %s", self.endpoint, reason)


class PowerAgents:
    """Subscribes to all agents; a failing one costs only the power figures.

    Workers without a power endpoint are skipped. ``keys``: for workers with a server key.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[PowerTold], object],
        clock: Callable[[], float],
        keys: KeyPair | None = None,
    ) -> None:
        self.received = 0
        self.broken = 0  # messages that are invalid or match several workers
        self.failures = 0  # messages on which ``apply`` raised
        self._apply = apply
        self._clock = clock
        self._keys = keys
        self._specs = {spec.id: spec for spec in specs}
        self._agents: dict[_Place, _Agent] = {}
        self._context: zmq.Context[Socket] | None = None

    def join(self, spec: WorkerSpec) -> None:
        self._specs[spec.id] = spec
        if self._context is not None:
            self._follow(spec, self._context)

    def leave(self, worker_id: str) -> None:
        del self._specs[worker_id]
        for place, agent in list(self._agents.items()):
            agent.specs = [spec for spec in agent.specs if spec.id != worker_id]
            if not agent.specs:
                self._agents.pop(place).socket.close(linger=0)

    async def run(self) -> None:
        with zmq.Context() as self._context:
            try:
                for spec in self._specs.values():
                    self._follow(spec, self._context)
                while True:
                    for agent in self._agents.values():
                        with contextlib.suppress(zmq.Again):
                            for _ in range(_BATCH):
                                self._take(agent, agent.socket.recv(zmq.NOBLOCK))
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
            socket = new_socket(context, zmq.SUB, _OPTIONS, self._keys, spec.server_key)
            agent = self._agents[place] = _Agent(spec.power, socket, self._clock())
            self._dial(agent)
        agent.specs.append(spec)

    def _dial(self, agent: _Agent) -> None:
        try:
            agent.socket.connect(agent.endpoint)
        except zmq.ZMQError as error:
            agent.complain(f"no connection ({error.strerror})")

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
            if not self.failures & (self.failures - 1):  # after 1, 2, 4, 8 … failures
                log.exception("%s: an agent's message could not be applied", power.worker_id)

    def _look(self, agent: _Agent) -> None:
        """Reconnect to a silent agent: ZMQ stops dialling after a key mismatch."""
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
        with contextlib.suppress(zmq.ZMQError):  # ZMQ dropped the connection itself
            agent.socket.disconnect(agent.endpoint)
        self._dial(agent)
