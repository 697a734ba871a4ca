"""Encoding of snapshots: msgpack maps whose keys are the fields of ``types.Snapshot``.

An agent's messages, and a router's to engines, have the same form, with another ``kind``.
"""

import re
from ipaddress import ip_address
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from router.core.errors import SnapshotError
from router.core.prefix.ids import ID_BYTES
from router.core.types import SCHEMA_VERSION, Amount, Count, Name, Snapshot

# Z85, ZMQ's alphabet: no comma, no space, no quotation mark.
_CURVE_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")

_TOKEN = re.compile(r"es-[0-9a-f]{20}(?:r[0-9]+)?")

T = TypeVar("T")

MOST_BYTES = 4 << 20
"""Most bytes of a message that is decoded; ZMQ disconnects a peer that sends four times as many."""

BUDGET_LEASE_S = 5.0
"""How long an engine keeps a router's prompt budget without a newer one."""

MOST_EVERY = 256
"""A window of a prompt budget, of whose steps one has prompts, has fewer steps than this."""

_LONGEST_REASON = 200


def request_token(engine_id: str) -> str | None:
    """A router's token inside an engine's request id; None for a request from elsewhere."""
    found = _TOKEN.search(engine_id)
    return found.group() if found else None


class PowerMessage(msgspec.Struct, frozen=True, tag_field="kind", tag="power"):
    """An agent's report on the GPUs of one worker.

    Attributes:
        worker: id of the worker in the router; "" if the rank alone identifies it.
        time_s: wall clock, seconds since 1970.
        power_w: watts now; None: unknown.
        energy_j: joules since the agent's start; None: unknown.
    """

    worker: Name
    rank: Count
    time_s: Amount
    power_w: Amount | None = None
    energy_j: Amount | None = None
    version: int = SCHEMA_VERSION


class BudgetMessage(msgspec.Struct, frozen=True, tag_field="kind", tag="prompt_budget"):
    """A router's bound on the prompt tokens of each step of one engine.

    Attributes:
        router: id of the router's run.
        epoch: of the engine.
        seen_s: ``time_s`` of the engine's newest snapshot there; the lease begins then.
        every: prompts are computed in the first of so many steps; the others compute none.
    """

    router: Name
    epoch: Name
    seen_s: Amount
    tokens: Annotated[int, Meta(ge=1, le=1 << 32)]
    every: Annotated[int, Meta(ge=1, lt=MOST_EVERY)] = 1
    version: int = SCHEMA_VERSION


class _Header(msgspec.Struct):
    version: int
    epoch: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)
_power = msgspec.msgpack.Decoder(PowerMessage)
_budget = msgspec.msgpack.Decoder(BudgetMessage)
_header = msgspec.msgpack.Decoder(_Header)


def encode(message: Snapshot | PowerMessage | BudgetMessage) -> bytes:
    """Encode a message of the state stream, of an agent, or of a router."""
    return _encoder.encode(message)


def decode(message: bytes) -> Snapshot:
    """Decode a snapshot; unknown fields are ignored.

    Raises:
        SnapshotError: not a snapshot, another schema version, or a field out of bounds.
    """
    told = _decoded(message, _decoder, "snapshot")
    for one in told.running:
        if one.prefill_left > one.prompt_tokens + one.generated_tokens:
            raise SnapshotError(
                f"not a snapshot: prefill_left {one.prefill_left} exceeds a request"
            )
    blocks = (told.blocks_stored, told.blocks_removed, *(chain.blocks for chain in told.chains))
    if any(len(ids) % ID_BYTES for ids in blocks):
        raise SnapshotError(f"not a snapshot: an id of a block has {ID_BYTES} bytes")
    return told


def decode_power(message: bytes) -> PowerMessage:
    """Decode an agent's message; unknown fields are ignored.

    Raises:
        SnapshotError: not an agent's message, another schema version, or a field out of bounds.
    """
    return _decoded(message, _power, "message of an agent")


def decode_budget(message: bytes) -> BudgetMessage:
    """Decode a router's message; errors as from ``decode``."""
    return _decoded(message, _budget, "prompt budget")


def epoch_of(message: bytes) -> str:
    """The epoch of a message of any kind; empty if it has none."""
    try:
        return _header.decode(message).epoch
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _decoded(message: bytes, decoder: msgspec.msgpack.Decoder[T], what: str) -> T:
    if len(message) > MOST_BYTES:
        raise SnapshotError(f"not a {what}: {len(message)} bytes, at most {MOST_BYTES} are read")
    try:
        version = _header.decode(message).version
        if version == SCHEMA_VERSION:
            return decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The text may quote the message, which can be long.
        reason = str(error)[:_LONGEST_REASON]
        raise SnapshotError(f"not a {what}: {reason}") from error
    raise SnapshotError(
        f"the worker speaks snapshot schema {version}, this router schema {SCHEMA_VERSION}: "
        "install the same version of evenstep in both"
    )


def full_endpoint(endpoint: str) -> str:
    """Endpoint for full snapshots: the stream's next port over TCP, else its path with ``.full``.

    Raises:
        SnapshotError: a TCP endpoint without a port number.
    """
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.full"
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise SnapshotError(f"snapshot endpoint {endpoint!r} needs a port from 1 to 65534")
    return f"{host}:{int(port) + 1}"


def is_curve_key(text: str) -> bool:
    """True for 40 characters of ZMQ's Z85 alphabet."""
    return _CURVE_KEY.fullmatch(text) is not None


def is_local(endpoint: str) -> bool:
    """True if only this machine can reach the endpoint."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
