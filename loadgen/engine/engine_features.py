"""What an engine does besides continuous batching, as settings."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from loadgen.engine.engine import Engine
from loadgen.engine.kv_layers import KvLayers
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.schedule import Drafts
from loadgen.model.ranges import check_ranges
from router.core.errors import ConfigError
from router.core.step_time import numbers

_MANY = 1_000_000_000
_RANGES = {
    "block_tokens": (1, 1_000_000),
    "prompt_budget": (1, _MANY),
    "long_prefill_token_threshold": (1, _MANY),
    "prefill_every": (1, _MANY),
}
_MOST_DRAFTS = 64
_WINDOW = re.compile(r"([0-9]{1,9})(?:,([0-9]{1,4}/[0-9]{1,4}|[01]|[01]?\.[0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Window:
    """Layers with a sliding window."""

    tokens: int
    share: Fraction  # of the layers, above 0 and at most 1


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """Features of an engine; the defaults are vLLM's."""

    prefix_caching: bool = True
    block_tokens: int = 16
    # Upper bound on the prompt tokens of a step; None: what the batch leaves.
    prompt_budget: int | None = None
    # Upper bound on those of one request; None: no further bound.
    long_prefill_token_threshold: int | None = None
    prefill_every: int = 1  # prompts are computed in every Nth step, the same one on all workers
    # Probability of each position of a draft; empty: no speculative decoding.
    acceptance: tuple[float, ...] = ()
    window: Window | None = None  # None: every layer keeps and reads every token

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if self.prefix_caching and self.window is not None and self.window.share == 1:
            raise ConfigError(
                "--window with a share of 1 leaves no layer that keeps whole prompts: "
                "give --no-prefix-caching"
            )

    @property
    def layers(self) -> KvLayers:
        window = self.window
        if window is None:
            return KvLayers(self.block_tokens, drafts=len(self.acceptance))
        sliding, groups = window.share.numerator, window.share.denominator
        full = groups - sliding
        return KvLayers(self.block_tokens, full, sliding, window.tokens, len(self.acceptance))

    def longest_tokens(self, kv_tokens: int) -> int:
        """Longest prompt plus output."""
        return kv_tokens // self.block_tokens * self.block_tokens - len(self.acceptance)

    def engine(
        self, slots: int, kv_tokens: int, *, seed: list[int], events: bool = False, **rest: Any
    ) -> Engine:
        """An engine; ``seed`` is of the drafts, ``events`` of the cache, ``rest`` of ``Engine``."""
        drafts = Drafts(self.acceptance, np.random.default_rng(seed)) if self.acceptance else None
        return Engine(
            slots,
            kv_tokens,
            block_tokens=self.block_tokens,
            prompt_budget=self.prompt_budget,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            prefix_cache=PrefixCache(events=events) if self.prefix_caching else None,
            drafts=drafts,
            layers=self.layers,
            **rest,
        )

    def __str__(self) -> str:
        """What is on, for a reader."""
        window, size = self.window, self.block_tokens
        caching = "prefix caching" if self.prefix_caching else "no prefix caching"
        parts = [f"{caching}, blocks of {size} tokens"]
        if self.prompt_budget:
            parts.append(f"at most {self.prompt_budget} prompt tokens a step")
        if self.long_prefill_token_threshold:
            parts.append(f"at most {self.long_prefill_token_threshold} of one request")
        if self.prefill_every > 1:
            parts.append(f"prompts in one of {self.prefill_every} steps")
        if self.acceptance:
            parts.append(f"{len(self.acceptance)} drafts a step")
        if window:
            parts.append(f"a window of {window.tokens} tokens in {window.share} of the layers")
        return ", ".join(parts)

    def described(self) -> dict[str, object]:
        """What is on, for descriptions of a fleet and headers of figures."""
        window = self.window
        return {
            "prefix_caching": self.prefix_caching,
            "block_tokens": self.block_tokens,
            "prompt_budget": self.prompt_budget,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "prefill_every": self.prefill_every,
            "draft_acceptance": list(self.acceptance),
            "window": None
            if window is None
            else {"tokens": window.tokens, "share_of_layers": str(window.share)},
        }


def parse_drafts(text: str) -> tuple[float, ...]:
    """Parse ``K,ACCEPT``, or ``K`` and a probability for each position of a draft."""
    count, *given = numbers("--speculate", text)
    alike = len(given) == 1 and 1 <= count <= _MOST_DRAFTS
    acceptance = tuple(given * int(count) if alike else given)
    fits = 1 <= count <= _MOST_DRAFTS and len(acceptance) == count
    if not fits or not all(0 <= each <= 1 for each in acceptance):
        raise ConfigError(
            f"--speculate takes the drafts of a step, at most {_MOST_DRAFTS}, and the probability "
            "from 0 to 1 that one is accepted, or one for each, such as 3,.7 or 3,.8,.6,.4; "
            f"got {text!r}"
        )
    return acceptance


def parse_window(text: str) -> Window:
    """Parse ``TOKENS``, or ``TOKENS,SHARE`` with a share of the layers such as 5/6."""
    match = _WINDOW.fullmatch(text)
    try:
        tokens, share = match.groups() if match else ("0", None)
        window = Window(int(tokens), Fraction(share or "1").limit_denominator(64))
    except ZeroDivisionError:
        window = Window(0, Fraction(0))
    if window.tokens < 1 or not 0 < window.share <= 1:
        raise ConfigError(
            "--window takes tokens and the share of layers that keep no more than these, "
            f"such as 1024,5/6; got {text!r}"
        )
    return window
