"""Parse JSON only as far as needed.

Unread values become no objects, and lists only up to their limit: objects take many times the
memory of their text, and block the event loop as long.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

Raw = msgspec.Raw

ABSENT = Raw()
NOTHING = frozenset({b"", b"null"})
_FALSE = NOTHING | {b"false", b"0", b"0.0", b'""', b"[]", b"{}"}
_WHOLE = re.compile(rb"-?[0-9]+")
_LONGEST_NUMBER = 20
# The rest of a longer value is assumed to be alike.
_SAMPLE_BYTES = 1024 * 1024


class TooManyError(Exception):
    """A list exceeds its limit."""


def start(raw: Raw) -> bytes:
    """First character, which shows the value's type; empty if absent."""
    return bytes(memoryview(raw)[:1])


def short(raw: Raw, longest: int = 64) -> bytes:
    """The value's text, truncated."""
    return bytes(memoryview(raw)[:longest])


def given(raw: Raw) -> bool:
    """Whether the value is present and not null."""
    return short(raw) not in NOTHING


def true(raw: Raw) -> bool:
    """Whether Python would take the value for true."""
    return short(raw) not in _FALSE


def whole(raw: Raw) -> int | None:
    """A whole number, truncated to 20 digits; None for other values."""
    text = short(raw, _LONGEST_NUMBER + 1)
    if _WHOLE.fullmatch(text) is None:
        return None
    return int(text)


def items(raw: Raw, most: int, kind: Any = Raw) -> list[Any]:
    """Elements of a list, decoded as ``kind``; a long list loses its nulls.

    Raises:
        TooManyError: more than ``most``; parsing stops soon after.
        msgspec.ValidationError: an element of another kind.
    """
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
    """Number of commas; a list of numbers has one element more."""
    view = memoryview(raw)
    slices = range(0, view.nbytes, _SAMPLE_BYTES)
    return sum(bytes(view[at : at + _SAMPLE_BYTES]).count(b",") for at in slices)


def text_bytes(raw: Raw) -> int:
    """UTF-8 length of a string; extrapolated if long, approximate for rare escapes."""
    return _scaled(raw, _unescaped) - 2


def json_bytes(raw: Raw) -> int:
    """Length of a value without the blanks that Python inserts."""
    return _scaled(raw, _without_blanks)


def _scaled(raw: Raw, size_of: Callable[[bytes], int]) -> int:
    view = memoryview(raw)
    sample = bytes(view[:_SAMPLE_BYTES])
    return size_of(sample) * view.nbytes // len(sample)


def _unescaped(written: bytes) -> int:
    size = len(written)
    if b"\\" in written:
        size -= written.count(b"\\") - written.count(b"\\\\")
        # An escape is two bytes of UTF-8 below 0x800 and in each surrogate, else three.
        two = sum(map(written.count, (b"\\u0", b"\\ud", b"\\uD")))
        size -= 2 * written.count(b"\\u") + two
    return size


def _without_blanks(written: bytes) -> int:
    return len(written) - sum(map(written.count, (b'": ', b', "', b", {")))


@cache
def _list(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(list[kind])


@cache
def _bounded(most: int, kind: Any) -> msgspec.json.Decoder[Any]:
    fields = [(f"_{index}", kind, None) for index in range(most)]
    several = msgspec.defstruct("_List", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(several)
