"""Bodies in JSON of which a field is set anew; whatever else they say is passed on as it stands."""

from __future__ import annotations

from typing import Any

import msgspec

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a body that is known to be a JSON object, their values unread."""
    return {**_fields.decode(body)}


def body_of(fields: dict[str, Any]) -> bytes:
    """The body of fields read or set."""
    return _encoder.encode(fields)


def with_field(body: bytes, name: str, value: str) -> bytes:
    """The same body, one field set; of a field that is there twice engines take the last one."""
    return body_of(fields_of(body) | {name: value})
