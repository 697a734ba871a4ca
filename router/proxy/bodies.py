"""Bodies in JSON of which a field is set anew; whatever else they say is passed on as it stands."""

from __future__ import annotations

from typing import Any

import msgspec

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
# An object without a field; with more blanks inside it its engine is left to refuse it.
_SHORT = 65_536


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a body that is known to be a JSON object, their values unread."""
    return {**_fields.decode(body)}


def body_of(fields: dict[str, Any]) -> bytes:
    """The body of fields read or set."""
    return _encoder.encode(fields)


def with_field(body: bytes, name: str, value: str) -> bytes:
    """The same body, one field set; of a field that is there twice engines take the last one.

    It is put behind the others, however many these are.
    """
    end = body.rfind(b"}")
    bare = body[:end].rstrip().endswith(b"{") if end < _SHORT else False
    field = _encoder.encode({name: value})[1:]
    return b"".join((memoryview(body)[:end], b"" if bare else b",", field, body[end + 1 :]))
