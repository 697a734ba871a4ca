"""Set one field of a JSON body; the other bytes stay as they are."""

from __future__ import annotations

from typing import Any

import msgspec

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
# A longer body counts as non-empty; the engine refuses it if it is all blanks.
_SHORT = 65_536


def fields_of(body: bytes) -> dict[str, Any]:
    """Fields of a JSON object, with raw values."""
    return {**_fields.decode(body)}


def body_of(fields: dict[str, Any]) -> bytes:
    """Encode fields as a body."""
    return _encoder.encode(fields)


def with_field(body: bytes, name: str, value: str) -> bytes:
    """Set a field by appending it: engines use the last of two equal keys.

    The cost does not depend on the number of fields.
    """
    end = body.rfind(b"}")
    bare = body[:end].rstrip().endswith(b"{") if end < _SHORT else False
    field = _encoder.encode({name: value})[1:]
    return b"".join((memoryview(body)[:end], b"" if bare else b",", field, body[end + 1 :]))
