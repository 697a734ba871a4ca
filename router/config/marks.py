"""Marks of settings: which part of a running router takes a new value.

A setting carries its mark in its annotation, as in ``Annotated[int, TakenBy.POOL]``. One without a
mark keeps its value until the router starts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from pydantic.fields import FieldInfo


class TakenBy(Enum):
    """The part that takes a setting's new value; see ``router.config.live.Part``."""

    WORKERS = auto()
    POLICY = auto()
    POOL = auto()
    WATCHING = auto()
    RELAY = auto()
    ENDING = auto()
    LOG = auto()
    KEYS = auto()
    CERTIFICATE = auto()

    @property
    def only_if_set(self) -> bool:
        """Whether the part exists only where a setting of it had a value at the start."""
        return self in {TakenBy.KEYS, TakenBy.CERTIFICATE}


def mark_of(field: FieldInfo) -> TakenBy | None:
    """The part that takes the setting; None: it changes at the next start."""
    return next((each for each in field.metadata if isinstance(each, TakenBy)), None)


def marked(fields: Mapping[str, FieldInfo], part: TakenBy) -> frozenset[str]:
    """The settings that this part takes."""
    return frozenset(name for name, field in fields.items() if mark_of(field) is part)
