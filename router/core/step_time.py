"""Time of a step: linear in what the slowest worker holds, runs and computes.

A step of workers that wait for each other takes ``C + max_g (t_l L_g + t_r n_g + t_p P_g)``. With
C and t_l alone it is the barrier model of arXiv 2601.17855, section 2; (1) of arXiv 2504.11320 is
the same for one engine.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from router.core.errors import ConfigError

_UNITS = (
    (1e3, "ms"),
    (1e9, "ns per KV token"),
    (1e6, "us per request"),
    (1e6, "us per prompt token"),
)
# More is a mistake, and with many tokens no finite time.
MOST_S = 1e6


class Work(NamedTuple):
    """What a worker, or one of its requests, has in a step: KV tokens, requests, prompt tokens."""

    load_tokens: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0


class StepBudget(NamedTuple):
    """Most prompt tokens of a worker in one step of ``every``; none in the others."""

    tokens: int
    every: int = 1

    def at(self, step: int) -> int:
        """Most prompt tokens of a step, by the steps before it."""
        return 0 if step % self.every else self.tokens


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a worker's step.

    Attributes:
        base_s: C, fixed time of any step, seconds.
        per_token_s: t_l, seconds per resident KV token.
        per_request_s: t_r, seconds per running request.
        per_prompt_token_s: t_p, seconds per prompt token that the step computes.
    """

    base_s: float
    per_token_s: float = 0.0
    per_request_s: float = 0.0
    per_prompt_token_s: float = 0.0

    def work_s(self, load_tokens: float, requests: float, prompt_tokens: float = 0.0) -> float:
        """Seconds of the work, without the base."""
        return (
            self.per_token_s * load_tokens
            + self.per_request_s * requests
            + self.per_prompt_token_s * prompt_tokens
        )

    def seconds(
        self, load_tokens: float, requests: float, prompt_tokens: float = 0.0, speed: float = 1.0
    ) -> float:
        """Time that one worker needs; half the speed takes twice as long."""
        return (self.base_s + self.work_s(load_tokens, requests, prompt_tokens)) / speed

    def rest_s(self, load_tokens: float, requests: float, batch: int) -> float:
        """Time that a worker needs without prompts; ``batch``: requests of the largest one."""
        return self.seconds(load_tokens, requests)

    def prompts_s(self, before_tokens: float) -> tuple[float, float]:
        """What any prompts add to a step, and each of their tokens, with so many before it."""
        return 0.0, self.per_prompt_token_s

    @property
    def prompts_known(self) -> bool:
        """Whether it is known what a prompt token costs, or that it costs nothing."""
        return True

    @property
    def rest_known(self) -> bool:
        """Whether enough steps without prompts have shown what any prompts add."""
        return True

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """C, t_l, t_r and t_p."""
        return self.base_s, self.per_token_s, self.per_request_s, self.per_prompt_token_s

    @property
    def formula(self) -> str:
        """In words, without what costs nothing, or less than a thousandth of its unit."""
        costs = zip(self.numbers, _UNITS, strict=True)
        said = [
            f"{each * scale:.4g} {unit}" for each, (scale, unit) in costs if each * scale >= 1e-3
        ]
        return " + ".join(said) or "0 ms"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``C,t_l[,t_r[,t_p]]`` in seconds.

        Raises:
            ConfigError: not two to four numbers, one out of range, or a step that takes no time.
        """
        values = numbers("--step-time", text)
        if not 2 <= len(values) <= 4 or min(values) < 0 or values[0] == 0 or max(values) > MOST_S:
            raise ConfigError(
                "--step-time takes C,t_l[,t_r[,t_p]] in seconds with C above 0 and none above "
                f"{MOST_S:g}, got {text!r}"
            )
        return cls(*values)

    def __str__(self) -> str:
        """As ``parse`` takes it, without zeros at the end."""
        values = list(self.numbers)
        while len(values) > 2 and values[-1] == 0:
            values.pop()
        return ",".join(f"{value:g}" for value in values)


# Of arXiv 2601.17855: its Table 1 follows from these numbers.
PAPER_STEP_TIME = StepTime(4.95e-3, 9.5e-8)


def number_in(text: str) -> float:
    """The number, or NaN, which is in no range, where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def numbers(option: str, text: str) -> list[float]:
    """Parse finite numbers separated by commas.

    Raises:
        ConfigError: other text; names the option.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers separated by commas, got {text!r}") from error
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"{option} takes finite numbers, got {text!r}")
    return values
