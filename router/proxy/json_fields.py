"""Read single fields of a JSON body, and set one; other bytes stay as they are.

Unread values become no objects, which take many times the memory and block the event loop.
"""

import re
from functools import cache
from typing import Any

import msgspec

Raw = msgspec.Raw

# An absent field is this very object.
ABSENT = Raw()
NOTHING = frozenset({b"", b"null"})
_FALSE = NOTHING | {b"false", b"0", b"0.0", b'""', b"[]", b"{}"}
_WHOLE = re.compile(rb"-?[0-9]+")
_LONGEST_NUMBER = 20
# The rest of a longer value is assumed to be alike.
_SAMPLE_BYTES = 1024 * 1024
# A longer body counts as non-empty.
_SHORT = 65_536

_encoder = msgspec.json.Encoder()


class TooManyError(Exception):
    """A list is too long."""


def start(raw: Raw) -> bytes:
    """First character, which shows the type; empty if absent."""
    return bytes(memoryview(raw)[:1])


def given(*raws: Raw) -> bool:
    """Whether one of them is present and not null."""
    for raw in raws:
        if raw is ABSENT:
            continue
        if bytes(memoryview(raw)[:5]) not in NOTHING:
            return True
    return False


def true(*raws: Raw) -> bool:
    """Whether one of them is true to Python."""
    for raw in raws:
        if raw is ABSENT:
            continue
        if bytes(memoryview(raw)[:6]) not in _FALSE:
            return True
    return False


def whole(raw: Raw) -> int | None:
    """A whole number, cut to 20 digits; None for other values."""
    text = bytes(memoryview(raw)[: _LONGEST_NUMBER + 1])
    return None if _WHOLE.fullmatch(text) is None else int(text)


def items(raw: Raw, most: int, kind: Any = Raw) -> list[Any]:
    """Elements decoded as ``kind``, TooManyError beyond ``most``; a long list loses its nulls."""
    view = memoryview(raw)
    if view.nbytes // 2 < most or (view.nbytes <= _SAMPLE_BYTES and commas(raw) < most):
        return list(_list(kind).decode(raw))
    try:
        found = msgspec.structs.astuple(
            _bounded(1 << max(0, most - 1).bit_length(), kind).decode(raw)
        )
    except msgspec.ValidationError:
        if kind is Raw:
            raise TooManyError from None
        raise
    elements = [each for each in found if each is not None]
    if len(elements) > most:
        raise TooManyError
    return elements


def commas(raw: Raw) -> int:
    """Their number; a list of numbers has one element more."""
    view = memoryview(raw)
    slices = range(0, view.nbytes, _SAMPLE_BYTES)
    return sum(bytes(view[at : at + _SAMPLE_BYTES]).count(b",") for at in slices)


def text_bytes(raw: Raw) -> int:
    """UTF-8 length; extrapolated if long, approximate for rare escapes."""
    view = memoryview(raw)
    sample = bytes(view[:_SAMPLE_BYTES])
    size = len(sample)
    if b"\\" in sample:
        size -= sample.count(b"\\") - sample.count(b"\\\\")
        # An escape is two bytes of UTF-8 below 0x800 and in each surrogate, else three.
        two = sum(map(sample.count, (b"\\u0", b"\\ud", b"\\uD")))
        size -= 2 * sample.count(b"\\u") + two
    return size * view.nbytes // len(sample) - 2


def json_bytes(raw: Raw) -> int:
    """Length without the blanks that Python inserts."""
    view = memoryview(raw)
    sample = bytes(view[:_SAMPLE_BYTES])
    size = len(sample) - sum(map(sample.count, (b'": ', b', "', b", {")))
    return size * view.nbytes // len(sample)


@cache
def _list(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(list[kind])


@cache
def _bounded(most: int, kind: Any) -> msgspec.json.Decoder[Any]:
    fields = [(f"_{index}", kind, None) for index in range(most)]
    several = msgspec.defstruct("_List", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(several)


def with_field(body: bytes, name: str, value: str) -> bytes:
    """Append a field: engines use the last of two equal keys."""
    end = body.rfind(b"}")
    bare = body[:end].rstrip().endswith(b"{") if end < _SHORT else False
    field = _encoder.encode({name: value})[1:]
    return b"".join((memoryview(body)[:end], b"" if bare else b",", field, body[end + 1 :]))
