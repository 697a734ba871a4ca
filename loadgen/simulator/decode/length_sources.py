"""Lengths of the simulator's requests: from a trace, or from the laws of the theorems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from loadgen.traces.trace import Trace
from loadgen.traces.trace_files import MAX_TOKENS
from router.core.errors import ConfigError
from router.core.forecast.forecast import Ints
from router.core.step_time import number_in

Lengths = tuple[Ints, Ints]


@dataclass(frozen=True, slots=True, eq=False)
class TraceLengths:
    """Rows of a trace, drawn with replacement."""

    trace: Trace
    prompts: Ints  # lengths of its rows, shape (rows,)
    outputs: Ints

    @classmethod
    def of(cls, trace: Trace) -> TraceLengths:
        prompts = np.array([row.prompt_tokens for row in trace.requests], dtype=np.int64)
        outputs = np.array([row.output_tokens for row in trace.requests], dtype=np.int64)
        return cls(trace, prompts, outputs)

    @property
    def name(self) -> str:
        return self.trace.name

    @property
    def max_output_tokens(self) -> int | None:
        """None where lengths are unbounded."""
        return self.trace.max_output_tokens

    def draw(self, rng: np.random.Generator, count: int) -> Lengths:
        """Prompt and output tokens of ``count`` requests, at least 1 each."""
        rows = rng.integers(len(self.prompts), size=count)
        return self.prompts[rows], self.outputs[rows]


def _constant(rng: np.random.Generator, tokens: float, count: int) -> Ints:
    return np.full(count, int(tokens), dtype=np.int64)


def _geometric(rng: np.random.Generator, mean_tokens: float, count: int) -> Ints:
    return rng.geometric(1 / mean_tokens, size=count).astype(np.int64)


def _uniform(rng: np.random.Generator, max_tokens: float, count: int) -> Ints:
    return rng.integers(1, int(max_tokens), size=count, endpoint=True)


_Law = Callable[[np.random.Generator, float, int], Ints]

# Prompt law, output law. In arXiv 2601.17855 prompts are bounded; outputs are equal in Theorem 1
# and geometric in Theorems 2 and 3.
LAWS: Mapping[str, tuple[_Law, _Law, str]] = {
    "geometric": (_geometric, _geometric, "MEAN_IN,MEAN_OUT"),
    "constant": (_constant, _constant, "IN,OUT"),
    "uniform": (_uniform, _geometric, "MAX_IN,MEAN_OUT"),
    "homogeneous": (_uniform, _constant, "MAX_IN,OUT"),
}
LAW_FORMS = ", ".join(f"{law}:{form}" for law, (_, _, form) in LAWS.items())


@dataclass(frozen=True, slots=True)
class LawLengths:
    """Prompts by one law, outputs by another, all independent; the shortest is 1 token.

    Each law's parameter is its mean, its maximum, or the length.
    """

    law: str  # name from ``LAWS``
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def parse(cls, text: str) -> LawLengths:
        """Parse ``LAW:IN,OUT``."""
        law, _, values = text.partition(":")
        numbers = values.split(",")
        if law not in LAWS or len(numbers) != 2:
            raise ConfigError(f"--lengths: {text!r} is unknown; write one of {LAW_FORMS}")
        of_prompts, of_outputs, _ = LAWS[law]
        return cls(law, _tokens(of_prompts, numbers[0]), _tokens(of_outputs, numbers[1]))

    @property
    def name(self) -> str:
        return f"{self.law}:{self.prompt_tokens:g},{self.output_tokens:g}"

    @property
    def max_output_tokens(self) -> int | None:
        return None if LAWS[self.law][1] is _geometric else int(self.output_tokens)

    def draw(self, rng: np.random.Generator, count: int) -> Lengths:
        of_prompts, of_outputs, _ = LAWS[self.law]
        return (
            of_prompts(rng, self.prompt_tokens, count),
            of_outputs(rng, self.output_tokens, count),
        )


LengthSource = TraceLengths | LawLengths


def _tokens(law: _Law, text: str) -> float:
    tokens = number_in(text)
    if not 1 <= tokens <= MAX_TOKENS:
        raise ConfigError(f"--lengths: {text!r} is not a number of tokens from 1 to {MAX_TOKENS:,}")
    if law is not _geometric and not tokens.is_integer():
        raise ConfigError(f"--lengths: {text!r} is not a whole number of tokens")
    return tokens
