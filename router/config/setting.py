"""The declaration of a setting: everything that flags, files, checks and documents need of it."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from router.core.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The event loop's resolution is the shortest time; a faster repetition would leave time for nothing
# else. A time over a week is a typing error.
MOMENT_S, HOUR_S, DAY_S, WEEK_S = 0.001, 3_600, 86_400, 604_800

# The group exists only if one of its settings was given at the start.
IF_GIVEN: Literal["if given"] = "if given"

_METAVARS = {bool: "true|false", int: "N"}
_UNITS = {"_per_s": "per s", "_s": "s", "_ms": "ms", "_bytes": "bytes", "_levels": "W"}

T = TypeVar("T")
U = TypeVar("U")
Struct = TypeVar("Struct", bound="DataclassInstance")


class SettingGroup(BaseModel):
    """Settings of one topic: a title and a sentence in its docstring, a declaration for each."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),  # ``model_alias`` is a setting
    )

    def of(self, part: type[Struct]) -> Struct:
        """The settings that a part of the router uses; it declares a field for each, by name."""
        return part(**{field.name: getattr(self, field.name) for field in fields(part)})


class Marks(TypedDict):
    """What a declaration says besides type, default, range and help."""

    metavar: str  # placeholder of the value in ``--help``; empty: see ``metavar_of``
    # Whether a running router applies a new value. ``IF_GIVEN``: only if the setting was given at
    # the start.
    live: bool | Literal["if given"]
    advanced: bool  # whether only few clusters need another value


def setting(
    default: Any,
    help_text: str,
    *,
    metavar: str = "",
    between: tuple[float, float] | None = None,
    live: bool | Literal["if given"] = False,
    advanced: bool = False,
    **limits: Any,
) -> Any:
    """Declare a setting; arguments as in ``Marks``.

    ``between``: the least and the largest value. ``limits``: others as ``pydantic.Field`` takes
    them.
    """
    extra = cast("dict[str, Any]", Marks(metavar=metavar, live=live, advanced=advanced))
    if between is not None:
        limits["ge"], limits["le"] = between
    return Field(default=default, description=help_text, json_schema_extra=extra, **limits)


# A setting that a running router applies, and one that few clusters need at another value.
live, advanced = partial(setting, live=True), partial(setting, advanced=True)


# Several values; a variable gives them as one text with spaces between.
Words = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: tuple(given.split()) if isinstance(given, str) else given),
]


def marks_of(field: FieldInfo) -> Marks:
    """The marks of a setting's declaration."""
    return cast("Marks", field.json_schema_extra)


def unit_of(name: str) -> str:
    """The unit of a setting, by the end of its name; empty: none."""
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")


def metavar_of(name: str, field: FieldInfo) -> str:
    """The placeholder of a setting's value: as declared, a time's unit, or the default's type."""
    time = unit_of(name).upper() if unit_of(name) in ("s", "ms") else ""
    return marks_of(field)["metavar"] or time or _METAVARS.get(type(field.default), "")


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


def read_by(read: Callable[[Any], object]) -> AfterValidator:
    """Refuse each text that ``read`` refuses with a ConfigError."""

    def check(value: T) -> T:
        for text in value if isinstance(value, tuple) else (value,):
            if text is not None:
                checked(read, text)
        return value

    return AfterValidator(check)
