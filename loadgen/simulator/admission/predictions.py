"""Predictions of output lengths for the policy of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from router.core.errors import ConfigError
from router.core.forecast.forecast import Ints
from router.core.step_time import number_in

_MOST_SIGMA = 5.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Source of predicted lengths."""

    FORMS: ClassVar[str] = "exact|cap|quantile:Q|lognormal:SIGMA"

    # Exact: clients send the true length as their hint; lognormal: the length times exp(sigma z), z
    # standard normal; cap: only the scenario's longest output is known; quantile: a quantile of the
    # lengths of ended requests.
    kind: Literal["exact", "cap", "quantile", "lognormal"] = "exact"
    value: float = 0.0  # sigma, or the quantile

    @classmethod
    def parse(cls, text: str) -> Prediction:
        """Parse ``exact``, ``cap``, ``quantile:Q`` or ``lognormal:SIGMA``."""
        kind, _, number = text.partition(":")
        if text == "exact":
            return cls("exact")
        if text == "cap":
            return cls("cap")
        value = number_in(number)
        if kind == "quantile" and 0 < value < 1:
            return cls("quantile", value)
        if kind == "lognormal" and 0 <= value <= _MOST_SIGMA:
            return cls("lognormal", value)
        raise ConfigError(
            f"--predict {text!r} is unknown: write {cls.FORMS}, with Q between 0 and 1 and SIGMA "
            f"from 0 to {_MOST_SIGMA:g}"
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}" if self.kind in ("quantile", "lognormal") else self.kind

    @property
    def setting(self) -> str:
        """Value of a policy's setting ``predict``."""
        if self.kind == "quantile":
            return str(self)
        return "cap" if self.kind == "cap" else "hint"

    def hints(self, output_tokens: Ints, cap_tokens: int, seed: int) -> list[int | None]:
        """None: no hint."""
        if self.kind in ("cap", "quantile"):
            return [None] * len(output_tokens)
        errors = np.random.default_rng([seed, 2]).standard_normal(len(output_tokens))
        told = np.rint(output_tokens * np.exp(self.value * errors))
        hints: list[int | None] = np.clip(told, 1, cap_tokens).astype(int).tolist()
        return hints
