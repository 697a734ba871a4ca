"""Commands whose options are the fields of a dataclass with typer's annotations; shared options."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, TypeVar

from loadgen.traces.trace import BUNDLED
from router.commands.json_output import json_option
from router.commands.options import flag
from router.config.worker_notation import unknown
from router.core.errors import ConfigError
from router.core.policies.policy_table import POLICIES
from router.core.types import Dispatch

Command = Callable[..., None]
Options = TypeVar("Options")


def step_time_option(default: str = "") -> Any:
    """``--step-time``, with the default that its command has in place of a value."""
    what = "Seconds: fixed, per KV token, per request, per computed prompt token"
    return flag(f"{what}{default and f' [{default}]'}.", "C,t_l[,t_r[,t_p]]|FILE")


def trace_flag(default: str) -> Any:
    """``--trace``, with the trace that its command takes without it."""
    return flag(f"Trace file, or a bundled one: {', '.join(BUNDLED)} [{default}].", "FILE")


StepTimeFlag = Annotated[str, step_time_option()]
WorkersFlag = Annotated[int, flag("Workers that step together.", "G")]
SlotsFlag = Annotated[int, flag("Requests that a worker runs at once.", "B")]
DispatchFlag = Annotated[
    Dispatch, flag("From the pool when a slot is free, or at once on arrival.")
]
JsonFlag = Annotated[str | None, json_option("Write the result; - is stdout.")]


def chosen(option: str, what: str, text: str, known: Collection[str]) -> list[str]:
    """Names of a list with commas, each once; ConfigError: one is not known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: {unknown(what, name, known)}")
    return list(dict.fromkeys(names))


def check_policy(policy: str, dispatch: Dispatch, known: Collection[str] = POLICIES) -> None:
    """ConfigError: there is no such policy, or it cannot dispatch so."""
    if policy not in known:
        raise ConfigError(f"--policy: {unknown('policy', policy, known)}")
    forms = POLICIES[policy].dispatch
    if dispatch not in forms:
        able = " or ".join(sorted(form.value for form in forms))
        raise ConfigError(
            f"--dispatch {dispatch.value}: policy {policy} can dispatch by {able} only"
        )


def same_named(options: Any, configuration: type[Any]) -> dict[str, Any]:
    """Options by the names of a configuration's fields, as far as they are called alike."""
    names = (each.name for each in fields(configuration))
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def command_of(options: type[Options]) -> Callable[[Callable[[Options], None]], Command]:
    """Make a function of options a command; typer reads the options from the fields."""

    def made(function: Callable[[Options], None]) -> Command:
        @wraps(function)
        def command(**given: Any) -> None:
            function(options(**given))

        command.__signature__ = inspect.signature(  # type: ignore[attr-defined]
            options
        )
        return command

    return made
