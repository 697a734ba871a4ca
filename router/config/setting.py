"""The declaration of a setting: everything that flags, files, checks and documents need of it."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, cast

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from router.core.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The event loop's resolution is the shortest time; a faster repetition would leave time for nothing
# else. A time over a week is a typing error.
MOMENT_S, HOUR_S, DAY_S, WEEK_S = 0.001, 3_600, 86_400, 604_800

# The group exists only if one of its settings was given at the start.
IF_GIVEN: Literal["if given"] = "if given"

_METAVARS = {bool: "true|false", int: "N"}

T = TypeVar("T")
U = TypeVar("U")
Struct = TypeVar("Struct", bound="DataclassInstance")


class SettingGroup(BaseSettings):
    """Settings of one topic: a title and a sentence in its docstring, a declaration for each."""

    def of(self, part: type[Struct]) -> Struct:
        """The settings that a part of the router uses; it declares a field for each, by name."""
        return part(**{field.name: getattr(self, field.name) for field in fields(part)})


class Marks(TypedDict):
    """What a declaration says besides type, default, range and help."""

    metavar: str  # placeholder of the value in ``--help``
    unit: str  # unit of the value; empty: none
    # Whether a running router applies a new value. ``IF_GIVEN``: only if the setting was given at
    # the start.
    live: bool | Literal["if given"]
    advanced: bool  # whether only few clusters need another value


def setting(
    default: Any,
    help_text: str,
    *,
    metavar: str = "",
    unit: str = "",
    between: tuple[float, float] | None = None,
    live: bool | Literal["if given"] = False,
    advanced: bool = False,
    **limits: Any,
) -> Any:
    """Declare a setting; arguments as in ``Marks``.

    Without a metavar it is the unit in capitals, else what the default's type takes. ``between``:
    the least and the largest value. ``limits``: others as ``pydantic.Field`` takes them.
    """
    metavar = metavar or unit.upper() or _METAVARS.get(type(default), "")
    marks = Marks(metavar=metavar, unit=unit, live=live, advanced=advanced)
    extra = cast("dict[str, Any]", marks)
    if between is not None:
        limits["ge"], limits["le"] = between
    return Field(default=default, description=help_text, json_schema_extra=extra, **limits)


# Several values; a variable gives them as one text with spaces between.
Words = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: tuple(given.split()) if isinstance(given, str) else given),
]


def marks_of(field: FieldInfo) -> Marks:
    """The marks of a setting's declaration."""
    return cast("Marks", field.json_schema_extra)


def range_of(field: FieldInfo) -> tuple[float, float] | None:
    """The least and the largest value of a setting; None: its declaration has no such limits."""
    limits = {type(limit).__name__: limit for limit in field.metadata}
    return (limits["Ge"].ge, limits["Le"].le) if {"Ge", "Le"} <= limits.keys() else None


def checked(read: Callable[[T], U], value: T) -> U:
    """Call ``read``; convert its ConfigError to the ValueError that pydantic expects."""
    try:
        return read(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
