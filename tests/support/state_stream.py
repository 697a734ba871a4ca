"""An engine's side of the state stream, scripted: what it says, and what it is asked."""

import asyncio

import msgspec
import zmq
import zmq.asyncio

from router.core.types import RunningRequest, Snapshot
from router.core.wire import encode, full_endpoint

TIMEOUT_S = 60.0
NOTHING = Snapshot("delta", "theirs", "w", 3, "epoch", 0, 0, 0.0, 0.01)


def delta(sequence: int, epoch: str = "epoch") -> Snapshot:
    return msgspec.structs.replace(NOTHING, sequence=sequence, step=sequence, epoch=epoch)


def full(sequence: int, epoch: str = "epoch") -> Snapshot:
    running = (RunningRequest("cmpl-a", 10, 5),)
    return msgspec.structs.replace(delta(sequence, epoch), kind="full", running=running)


class Engine:
    """The engine's side of the wire: an XPUB, to see subscribers come, and a ROUTER."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.asyncio.Context()
        self.stream = self.context.socket(zmq.XPUB)
        self.stream.bind(endpoint)
        self.requests = self.context.socket(zmq.ROUTER)
        self.requests.bind(full_endpoint(endpoint))

    async def subscribed(self) -> None:
        await asyncio.wait_for(self.stream.recv(), TIMEOUT_S)

    async def send(self, *messages: bytes | Snapshot) -> None:
        for message in messages:
            await self.stream.send(encode(message) if isinstance(message, Snapshot) else message)

    async def asked(self) -> bytes:
        """Wait for a request for a full snapshot; who asked."""
        identity, _ = await asyncio.wait_for(self.requests.recv_multipart(), TIMEOUT_S)
        return bytes(identity)

    async def answer(self, snapshot: Snapshot) -> None:
        await self.requests.send_multipart([await self.asked(), encode(snapshot)])

    def close(self) -> None:
        self.context.destroy(linger=0)
