"""How an emulated fleet computes prompts, and how their KV goes from one worker to another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from loadgen.emulator.handoff import TransferTime
from loadgen.step_model import StepTime, numbers
from router.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """What prompts cost.

    Attributes:
        base_s: of a prefill worker's step, seconds.
        per_token_s: of each prompt token computed in a step, at any worker, seconds; 5e-5 is
            20,000 tokens a second, an assumption for 8 billion parameters on one large GPU.
    """

    base_s: float = 4.95e-3
    per_token_s: float = 5e-5

    @property
    def step_time(self) -> StepTime:
        """Of a prefill worker, prompts aside."""
        return StepTime(self.base_s, 0.0)


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """A fleet in which prompts cost time and KV can move.

    Attributes:
        workers: that do nothing but prefill; 0 for a fleet whose workers compute their own prompts.
        chunk: the most tokens that a worker computes in one step.
        kv_tokens: KV memory of a prefill worker; as the other workers' when None.
        kv_expiry_s: how long KV stays that nobody fetches, engine seconds.
        recompute: whether a prompt whose KV cannot be fetched is computed again; else it fails.

    Raises:
        ConfigError: settings that make no sense; names the option.
    """

    workers: int = 0
    time: PrefillTime = field(default_factory=PrefillTime)
    chunk: int = 2048
    kv_tokens: int | None = None
    transfer: TransferTime = field(default_factory=TransferTime)
    kv_expiry_s: float = 30.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"--prefill-workers must be at least 0, got {self.workers}")
        if self.kv_tokens is not None and not self.workers:
            raise ConfigError("--prefill-kv-tokens is of prefill workers: give --prefill-workers")
        if not 0 < self.kv_expiry_s < math.inf:
            raise ConfigError(f"--kv-expiry must be above 0 seconds, got {self.kv_expiry_s:g}")

    def check(self, slots: int, context_tokens: int) -> None:
        """See whether this fits workers with so many slots that serve such lengths.

        Raises:
            ConfigError: it does not; names the option.
        """
        if self.chunk <= slots:
            raise ConfigError(
                f"--prefill-chunk {self.chunk} must be above --slots {slots}: "
                "a step computes one token of each request that decodes, and prompts besides"
            )
        if self.kv_tokens is not None and self.kv_tokens < context_tokens:
            raise ConfigError(
                f"--prefill-kv-tokens {self.kv_tokens} cannot be below --max-model-len "
                f"{context_tokens}: some prompts would never fit"
            )


def parse_prefill_time(text: str) -> PrefillTime:
    """Read ``C,t_p`` in seconds.

    Raises:
        ConfigError: not two numbers, or a step that takes no time.
    """
    values = numbers("--prefill-step-time", text)
    if len(values) != 2 or min(values) < 0 or values[0] == 0:
        raise ConfigError(
            f"--prefill-step-time takes C,t_p in seconds with C above 0, got {text!r}"
        )
    return PrefillTime(*values)


def parse_transfer_time(text: str) -> TransferTime:
    """Read ``L,t`` in seconds.

    Raises:
        ConfigError: not two numbers from 0 up.
    """
    values = numbers("--kv-transfer-time", text)
    if len(values) != 2 or min(values) < 0:
        raise ConfigError(f"--kv-transfer-time takes L,t in seconds from 0 up, got {text!r}")
    return TransferTime(*values)
