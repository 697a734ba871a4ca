"""KV events of one worker, as vLLM (0.26 to 0.33) publishes them: msgpack batches over ZMQ PUB.

A message has three frames: an empty topic, the batch's number (8 bytes, big-endian, from 0 at every
start) and the batch, ``[time, events, rank]``. Token ids of a text are made up.
"""

import time
from collections.abc import Callable, Hashable, Sequence

import msgspec
import zmq

from loadgen.emulator.binding import bound
from loadgen.emulator.prompt_content import Content
from loadgen.engine.prefix_cache import Cleared, Removed, Stored

_MEDIUM = "GPU"


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    """This and what follows are as in vLLM's ``distributed/kv_events.py``."""

    block_hashes: list[Hashable]
    parent_block_hash: Hashable | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    """As in vLLM's ``distributed/kv_events.py``."""

    block_hashes: list[Hashable]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """As in vLLM's ``distributed/kv_events.py``."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As in vLLM's ``distributed/kv_events.py``."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KvEvents:
    """Publisher of one worker's KV events, if it has an endpoint; each start begins at number 0.

    ``content`` returns the tokens of a request's prompt; None: no longer known.
    """

    def __init__(
        self,
        endpoint: str | None,
        rank: int,
        block_tokens: int,
        content: Callable[[str], Content | None],
    ) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._block_tokens = block_tokens
        self._content = content
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._socket: zmq.Socket[bytes] | None = None

    async def start(self) -> None:
        if (endpoint := self._endpoint) is not None:
            problem = f"cannot publish KV events at {endpoint}"
            self._socket = await bound(lambda: _bound(endpoint), problem)
            self._sequence = 0

    def stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def publish(self, events: Sequence[Stored | Removed | Cleared]) -> None:
        """Publish what happened in the prefix cache; no-op if nothing did, or when stopped."""
        if not events or self._socket is None:
            return
        batch = EventBatch(time.time(), [self._told(event) for event in events], self._rank)
        number = self._sequence.to_bytes(8, "big")
        self._socket.send_multipart((b"", number, self._encoder.encode(batch)))
        self._sequence += 1

    def _told(
        self, event: Stored | Removed | Cleared
    ) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(event, Cleared):
            return AllBlocksCleared()
        if isinstance(event, Removed):
            return BlockRemoved([event.id], _MEDIUM, group_idx=0)
        content, size = self._content(event.request), self._block_tokens
        end = event.first + len(event.ids)
        return BlockStored(
            block_hashes=list(event.ids),
            parent_block_hash=event.parent,
            token_ids=[] if content is None else content.ids(event.first * size, end * size),
            block_size=size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=None,
            extra_keys=[None] * len(event.ids),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )


def _bound(endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
