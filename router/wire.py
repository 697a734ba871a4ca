"""Snapshots as bytes: msgpack maps whose keys are the fields of ``types.Snapshot``.

An agent's messages have the same form, and a ``kind`` of their own.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TypeVar

import msgspec

from router.errors import SnapshotError
from router.types import SCHEMA_VERSION, Amount, Count, Name, Snapshot

# Z85, ZMQ's alphabet: no comma, no space, no quotation mark.
_CURVE_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")

_TOKEN = re.compile(r"es-[0-9a-f]{20}(?:r[0-9]+)?")

T = TypeVar("T")

MOST_BYTES = 4 << 20
"""Of a message that is read; ZMQ holds none that is four times as long, and hangs up."""

_LONGEST_REASON = 200


def request_token(engine_id: str) -> str | None:
    """A router's own token inside an engine's request id, None for somebody else's request."""
    found = _TOKEN.search(engine_id)
    return found.group() if found else None


class PowerMessage(msgspec.Struct, frozen=True, tag_field="kind", tag="power"):
    """What an agent tells of the GPUs of one worker.

    Attributes:
        worker: its id in the router; "" where the rank alone says whose it is.
        rank: number among the agent's workers.
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


class _Header(msgspec.Struct):
    version: int
    epoch: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)
_power = msgspec.msgpack.Decoder(PowerMessage)
_header = msgspec.msgpack.Decoder(_Header)


def encode(message: Snapshot | PowerMessage) -> bytes:
    """One message of the state stream, or an agent's."""
    return _encoder.encode(message)


def decode(message: bytes) -> Snapshot:
    """Read one message; unknown fields are ignored.

    Raises:
        SnapshotError: not a snapshot, of another major version, or with a field beyond its bounds.
    """
    told = _decoded(message, _decoder, "snapshot")
    for one in told.running:
        if one.prefill_left > one.prompt_tokens + one.generated_tokens:
            raise SnapshotError(
                f"not a snapshot: prefill_left {one.prefill_left} exceeds a request"
            )
    return told


def decode_power(message: bytes) -> PowerMessage:
    """Read one message of an agent; unknown fields are ignored.

    Raises:
        SnapshotError: none of an agent, of another major version, or what no GPU uses.
    """
    return _decoded(message, _power, "message of an agent")


def epoch_of(message: bytes) -> str:
    """The epoch of a message that may be no snapshot; empty where it tells none."""
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
        # It may quote the message, whatever that is.
        reason = str(error)[:_LONGEST_REASON]
        raise SnapshotError(f"not a {what}: {reason}") from error
    raise SnapshotError(
        f"the worker speaks snapshot schema {version}, this router schema {SCHEMA_VERSION}: "
        "install the same version of evenstep in both"
    )


def full_endpoint(endpoint: str) -> str:
    """Where full snapshots are asked for, given the endpoint of the stream.

    The next port over TCP, the same path with ``.full`` behind it otherwise.

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
    """Whether a text has the form of a CURVE key: 40 characters of ZMQ's alphabet."""
    return _CURVE_KEY.fullmatch(text) is not None


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach an endpoint."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
