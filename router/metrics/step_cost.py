"""Metrics of what a group's steps have taught of their cost."""

from collections.abc import Callable
from typing import TypeVar

from router.core.state.group import Group
from router.core.step_fit import NUMBERS, FittedStepTime
from router.metrics.rows import Row, Table

T = TypeVar("T")

_TERMS = dict(zip(NUMBERS, ("step", "kv_token", "request", "prompt_token"), strict=True))


def _of_fit(read: Callable[[FittedStepTime], T]) -> Callable[[Group], T | None]:
    return lambda group: None if group.fitted is None else read(group.fitted)


def _costs(found: FittedStepTime) -> dict[str, float]:
    return {_TERMS[name]: getattr(found, name) for name in found.known} | found.extras


def _bounds(found: FittedStepTime, side: int) -> dict[str, float]:
    intervals = zip(NUMBERS, found.intervals, strict=True)
    return {_TERMS[name]: both[side] for name, both in intervals if name in found.known}


def _errors(found: FittedStepTime) -> dict[str, float]:
    errors = {"decode": found.decode_error, "prompts": found.prompt_error}
    return {kind: error for kind, error in errors.items() if error is not None}


STEP_COST_ROWS: Table[Group] = {
    "evenstep_step_cost_seconds": Row(
        "What a step takes, as the group's steps have taught: in any case (step), and for each KV "
        "token, request and computed prompt token of its slowest worker; further terms where they "
        "predict better. No value of what the steps do not tell.",
        _of_fit(_costs),
        "term",
    ),
    "evenstep_step_cost_low_seconds": Row(
        "Lower end of the 95 % interval of evenstep_step_cost_seconds.",
        _of_fit(lambda found: _bounds(found, 0)),
        "term",
    ),
    "evenstep_step_cost_high_seconds": Row(
        "Upper end of the 95 % interval of evenstep_step_cost_seconds.",
        _of_fit(lambda found: _bounds(found, 1)),
        "term",
    ),
    "evenstep_step_cost_explained_ratio": Row(
        "Share of the variance of step times that the costs of step, KV token, request and prompt "
        "token explain.",
        _of_fit(lambda found: found.explained),
    ),
    "evenstep_step_cost_error_ratio": Row(
        "Median error of predicting a step before it was learned from, as a share of the step: "
        "decode-only steps, and steps with prompts.",
        _of_fit(_errors),
        "steps",
    ),
}
