"""Snapshots as bytes: msgpack maps whose keys are the fields of ``types.Snapshot``."""

from __future__ import annotations

import re
from ipaddress import ip_address

import msgspec

from router.errors import SnapshotError
from router.types import SCHEMA_VERSION, Snapshot

# Z85, ZMQ's alphabet: no comma, no space, no quotation mark.
_CURVE_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


class _Header(msgspec.Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)
_header = msgspec.msgpack.Decoder(_Header)


def encode(snapshot: Snapshot) -> bytes:
    """One message of the state stream."""
    return _encoder.encode(snapshot)


def decode(message: bytes) -> Snapshot:
    """Read one message; unknown fields are ignored.

    Raises:
        SnapshotError: not a snapshot, or of another major version.
    """
    try:
        version = _header.decode(message).version
        if version == SCHEMA_VERSION:
            return _decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"not a snapshot: {error}") from error
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
