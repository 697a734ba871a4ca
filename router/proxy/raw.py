"""JSON that is read no further than it has to be.

A value that nobody reads becomes no object, and of a list no more elements do than are allowed:
objects take many times the bytes that they are written in, and the event loop as long.
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
# Of what is longer the rest is taken to be alike.
_SAMPLE_BYTES = 1024 * 1024


class TooManyError(Exception):
    """A list has more elements than are allowed."""


def start(raw: Raw) -> bytes:
    """The first character, which says what kind of value it is; empty if there is none."""
    return bytes(memoryview(raw)[:1])


def short(raw: Raw, longest: int = 64) -> bytes:
    """The value as it is written; what is longer is cut."""
    return bytes(memoryview(raw)[:longest])


def given(raw: Raw) -> bool:
    """Whether it is there, and not null."""
    return short(raw) not in NOTHING


def true(raw: Raw) -> bool:
    """Whether Python would take it for true."""
    return short(raw) not in _FALSE


def whole(raw: Raw) -> int | None:
    """A whole number, cut to 20 digits; None: it is something else."""
    text = short(raw, _LONGEST_NUMBER + 1)
    if _WHOLE.fullmatch(text) is None:
        return None
    return int(text)


def items(raw: Raw, most: int, kind: Any = Raw) -> list[Any]:
    """The elements of a list, each of a kind; of a long one those that are null are left out.

    Raises:
        TooManyError: it has more than ``most``; few more than these are looked at.
        msgspec.ValidationError: one is of another kind.
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
    """Commas in it: a list of numbers has one element more."""
    view = memoryview(raw)
    slices = range(0, view.nbytes, _SAMPLE_BYTES)
    return sum(bytes(view[at : at + _SAMPLE_BYTES]).count(b",") for at in slices)


def text_bytes(raw: Raw) -> int:
    """What a string comes to in UTF-8: of a long one by its beginning, of rare escapes about."""
    return _scaled(raw, _unescaped) - 2


def json_bytes(raw: Raw) -> int:
    """What a value comes to without the blanks that Python writes between its parts."""
    return _scaled(raw, _without_blanks)


def _scaled(raw: Raw, size_of: Callable[[bytes], int]) -> int:
    view = memoryview(raw)
    sample = bytes(view[:_SAMPLE_BYTES])
    return size_of(sample) * view.nbytes // len(sample)


def _unescaped(written: bytes) -> int:
    size = len(written)
    if b"\\" in written:
        size -= written.count(b"\\") - written.count(b"\\\\")
        # Four digits are two bytes of UTF-8 below 0x800 and in each half of a pair, else three.
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
    """Reads up to so many elements, and stops at the next one."""
    fields = [(f"_{index}", kind, None) for index in range(most)]
    several = msgspec.defstruct("_List", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(several)
