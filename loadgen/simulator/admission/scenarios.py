"""Scenarios of one engine under KV pressure: memory, step time, requests.

They are the engines and lengths of arXiv 2502.07115 (chat70b) and of arXiv 2504.11320 (vidur8b,
example2), and long reasoning on a larger engine (reason32b).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from router.config.worker_notation import unknown
from router.core.errors import ConfigError
from router.core.forecast.forecast import Floats, Ints
from router.core.step_time import StepTime

_REDRAWS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """N requests in order of arrival; every shape is (N,)."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    kinds: Ints


class Source(Protocol):
    """Source of requests."""

    @property
    def cap_tokens(self) -> int:
        """Upper bound on the output tokens of a request."""

    def draw(self, rate: float, count: int, seed: int) -> Requests:
        """Equal for equal arguments; lengths do not depend on the rate."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Truncated lognormal lengths, by mean and median."""

    mean: float  # mean of the drawn lengths
    median: float  # median of the law before truncation and scaling
    limit: int  # upper bound, tokens

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Lengths above the limit are drawn again, then all are scaled to the mean."""
        sigma = math.sqrt(2 * math.log(self.mean / self.median))
        drawn = rng.lognormal(math.log(self.median), sigma, count)
        for _ in range(_REDRAWS):
            over = drawn > self.limit
            if not over.any():
                break
            drawn[over] = rng.lognormal(math.log(self.median), sigma, int(over.sum()))
        scaled = np.rint(drawn * (self.mean / drawn.mean()))
        lengths: Ints = np.clip(scaled, 1, self.limit).astype(np.int64)
        return lengths


@dataclass(frozen=True, slots=True)
class LognormalSource:
    """Prompts and outputs of lognormal lengths; Poisson arrivals."""

    prompts: Lognormal
    outputs: Lognormal

    @property
    def cap_tokens(self) -> int:
        return self.outputs.limit

    def draw(self, rate: float, count: int, seed: int) -> Requests:
        rng = np.random.default_rng([seed, 0])
        prompts, outputs = self.prompts.draw(rng, count), self.outputs.draw(rng, count)
        return Requests(_poisson(rate, count, seed), prompts, outputs, np.zeros_like(prompts))


@dataclass(frozen=True, slots=True)
class Kind:
    """A type (l, l') of arXiv 2504.11320: l' + 1 steps, which hold l, l + 1, … l + l' tokens."""

    share: float  # weight of the type among the arrivals
    prompt_tokens: int  # l
    decode_steps: int  # l'; on an engine it returns l' + 1 tokens, the first with its prompt


@dataclass(frozen=True, slots=True)
class TypedSource:
    """Requests of a few types; Poisson arrivals."""

    types: tuple[Kind, ...]

    @property
    def cap_tokens(self) -> int:
        return max(kind.decode_steps for kind in self.types) + 1

    def draw(self, rate: float, count: int, seed: int) -> Requests:
        shares = np.array([kind.share for kind in self.types])
        rng = np.random.default_rng([seed, 0])
        kinds = rng.choice(len(self.types), count, p=shares / shares.sum())
        prompts = np.array([kind.prompt_tokens for kind in self.types])[kinds]
        outputs = np.array([kind.decode_steps + 1 for kind in self.types])[kinds]
        return Requests(_poisson(rate, count, seed), prompts, outputs, kinds)


class EvenSource:
    """Example 2 of arXiv 2504.11320: equal requests at a constant rate, after an uneven start.

    Three arrive at 0 and six at 1 s. Then three decode while six wait, which is the example's
    start.
    """

    cap_tokens = 2

    def draw(self, rate: float, count: int, seed: int) -> Requests:
        """Nothing is random; a prompt has one token."""
        first = np.repeat([0, 1], [3, 6])[:count]
        later = np.arange(count - len(first)) // rate + 2
        arrival_s = np.concatenate([first, np.floor(later)]).astype(np.float64)
        prompts = np.ones(count, dtype=np.int64)
        return Requests(arrival_s, prompts, prompts * self.cap_tokens, prompts * 0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One engine and its requests."""

    name: str
    summary: str
    kv_tokens: int  # C, its KV memory
    cost: StepTime
    source: Source
    rate: float
    requests: int
    slots: int = 256  # requests that run at once
    chunk: int = 2048  # upper bound on the tokens of a step


def _vidur(name: str, what: str, rate: float, types: Sequence[Kind]) -> Scenario:
    cost = StepTime(6.97e-3, 0.093e-6, 75.7e-6)
    summary = f"Llama-3-8B on an A100, arXiv 2504.11320, section 6: {what}"
    source = TypedSource(tuple(types))
    return Scenario(f"vidur8b_{name}", summary, 427_000, cost, source, rate, requests=10_000)


_LMSYS_SHARES = (23, 11, 8, 7, 6, 4, 3, 2, 1, 1)

_SCENARIOS = (
    Scenario(
        "chat70b",
        "chat on a 70B model with little memory, arXiv 2502.07115, section 8",
        kv_tokens=16_492,
        cost=StepTime(0.075, 0.65e-6, 0.0, 0.37e-3),
        source=LognormalSource(Lognormal(40.6, 11, 2000), Lognormal(85.3, 45, 1000)),
        rate=11,
        requests=8000,
    ),
    Scenario(
        "reason32b",
        "long reasoning on a 32B model",
        kv_tokens=120_000,
        cost=StepTime(0.022, 0.13e-6, 0.03e-3, 0.11e-3),
        source=LognormalSource(Lognormal(320, 200, 3000), Lognormal(1300, 650, 8000)),
        rate=1.5,
        requests=3000,
    ),
    _vidur("low", "low demand", 2000, [Kind(1, 10, 10), Kind(1, 10, 20)]),
    _vidur("high", "high demand", 12_000, [Kind(6, 20, 100), Kind(4, 20, 200), Kind(2, 20, 300)]),
    _vidur("nested4", "four lengths", 300, [Kind(k, 10, k) for k in (20, 40, 80, 160)]),
    _vidur(
        "lmsys10",
        "ten lengths as in LMSYS-Chat-1M",
        55,
        [Kind(share, 60, 50 * place) for place, share in enumerate(_LMSYS_SHARES, start=1)],
    ),
    Scenario(
        "example2",
        "arXiv 2504.11320, Example 2; a step takes a second",
        kv_tokens=12,
        cost=StepTime(1.0),
        source=EvenSource(),
        rate=4,
        requests=100_000,
    ),
)

SCENARIOS: Mapping[str, Scenario] = {each.name: each for each in _SCENARIOS}


def scenario_of(name: str) -> Scenario:
    """Look up a scenario."""
    if name not in SCENARIOS:
        raise ConfigError(f"--scenario: {unknown('scenario', name, SCENARIOS)}")
    return SCENARIOS[name]


def _poisson(rate: float, count: int, seed: int) -> Floats:
    gaps = np.random.default_rng([seed, 1]).exponential(1.0, count)
    arrival_s: Floats = gaps.cumsum() / rate
    return arrival_s
