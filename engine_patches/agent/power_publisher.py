"""Publishes the power of each worker's GPUs at intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import zmq

from engine_patches.agent.ranks import Rank
from engine_patches.plugin.settings import PlugInError
from engine_patches.power.source import PowerReading, PowerSource
from engine_patches.stream.curve import CurveGate
from router.core.wire import PowerMessage, encode, is_local

_UNREAD_MESSAGES = 100


@dataclass(frozen=True, slots=True)
class Door:
    """Endpoint of an agent, its CURVE key pair, and the public keys of the permitted readers."""

    endpoint: str
    secret_key_file: str | None = None
    allowed_keys: tuple[str, ...] = ()


class PowerPublisher:
    """A socket that publishes readings.

    PlugInError: it cannot be bound, or its keys are unusable or missing.
    """

    def __init__(self, door: Door) -> None:
        secured = door.secret_key_file is not None
        if secured != bool(door.allowed_keys):
            raise PlugInError("--secret-key-file and --allowed-key go together: give both")
        if not secured and not is_local(door.endpoint):
            raise PlugInError(
                f"--bind {door.endpoint} can be reached from other machines: give "
                "--secret-key-file and --allowed-key (CURVE), or bind it to 127.0.0.1"
            )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: CurveGate | None = None
        try:
            self._socket = self._open(door)
        except zmq.ZMQError as error:
            self.close()
            raise PlugInError(f"--bind: cannot bind {door.endpoint} ({error.strerror})") from error
        except PlugInError:
            self.close()
            raise

    def tell(self, ranks: Sequence[Rank], readings: Sequence[PowerReading], time_s: float) -> None:
        """Send a message for each rank; ``time_s`` in seconds since 1970."""
        for number, (rank, reading) in enumerate(zip(ranks, readings, strict=True)):
            message = PowerMessage(rank.worker, number, time_s, reading.power_w, reading.energy_j)
            self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=0)

    def _open(self, door: Door) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, _UNREAD_MESSAGES)
        if "[" in door.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if door.secret_key_file is not None:
            self._gate = CurveGate(
                self._context, door.secret_key_file, door.allowed_keys, "--secret-key-file"
            )
            self._gate.secure(socket)
        socket.bind(door.endpoint)
        return socket


def publish(
    publisher: PowerPublisher,
    sources: Mapping[Rank, PowerSource],
    clock: Callable[[], float],
    wall: Callable[[], float],
    ended: Callable[[], bool],
) -> None:
    """Read and publish until ``ended`` returns true."""
    while True:
        readings = [source.read(clock()) for source in sources.values()]
        publisher.tell(tuple(sources), readings, wall())
        if ended():
            return
