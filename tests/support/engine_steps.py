"""The step time that a group learns, beside the steps of a real engine that were recorded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from router.core.step_fit import FittedStepTime, StepFit
from tests.support.rank_steps import RankStep

RECORDED = Path(__file__).resolve().parents[1] / "data" / "engine_steps" / "steps.json.gz"
KINDS = ("decode", "prompts")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one engine; fields as in ``RankStep``."""

    step_s: float
    load_tokens: int
    running: int
    prompt_tokens: int
    prompt_context: float

    @classmethod
    def of(cls, step: RankStep) -> Step:
        return cls(
            round(step.step_s, 6),
            step.load_tokens,
            step.running,
            step.prompt_tokens,
            step.prompt_context,
        )

    @property
    def kind(self) -> str:
        return KINDS[self.prompt_tokens > 0]


@dataclass(frozen=True, slots=True)
class Report:
    """How well a fit knows an engine's steps.

    Attributes:
        fitted: what it has learned from all.
        explained: share of the variance of all steps that the four numbers explain.
        by_tokens: the same of C and t_l alone.
        errors: by kind of step, the median error of its prediction, made before it was learned, as
            a share of it.
        steps: by kind of step, how many there were.
    """

    fitted: FittedStepTime
    explained: float
    by_tokens: float
    errors: dict[str, float]
    steps: dict[str, int]


def judged(steps: Sequence[Step]) -> Report:
    """Let a fit learn the steps one after the other, and predict each before it does."""
    fit = StepFit()
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in steps:
        if fit.fitted is not None:
            error = abs(predicted_s(fit.fitted, step) / step.step_s - 1)
            errors[step.kind].append(error)
        fit.observe(
            [step.load_tokens],
            [step.running],
            [step.prompt_tokens],
            [step.prompt_context],
            step.step_s,
        )
    fitted = fit.finish()
    assert fitted is not None, "the steps follow no law"
    seconds = np.array([step.step_s for step in steps])
    expected = np.array([predicted_s(fitted, step) for step in steps])
    loads = np.array([step.load_tokens for step in steps])
    return Report(
        fitted,
        explained=1 - float(((seconds - expected) ** 2).sum() / (seconds.var() * len(seconds))),
        by_tokens=float(np.corrcoef(loads, seconds)[0, 1] ** 2),
        errors={kind: median(found) for kind, found in errors.items() if found},
        steps={kind: sum(step.kind == kind for step in steps) for kind in KINDS},
    )


def predicted_s(fitted: FittedStepTime, step: Step) -> float:
    """By the four numbers."""
    return fitted.seconds(step.load_tokens, step.running, step.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps of one engine, and how they came about."""

    origin: dict[str, Any]
    conditions: dict[str, Any]
    steps: list[Step]

    def write(self, file: Path) -> None:
        """Compressed, the same bytes each time."""
        about = {"origin": self.origin, "conditions": self.conditions}
        columns = [each.name for each in fields(Step)]
        text = json.dumps({**about, "columns": columns, "steps": list(map(astuple, self.steps))})
        with gzip.GzipFile(file, "wb", mtime=0) as kept:
            kept.write(text.encode())


def recorded(file: Path = RECORDED) -> Recording:
    """Read a recording."""
    kept = json.loads(gzip.decompress(file.read_bytes()))
    return Recording(kept["origin"], kept["conditions"], [Step(*row) for row in kept["steps"]])
