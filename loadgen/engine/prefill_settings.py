"""Settings of prefill and of KV transfers in an emulated fleet."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from loadgen.engine.kv_handoff import TransferTime
from router.core.errors import ConfigError
from router.core.step_time import StepTime, numbers

DEFAULT_PREFILL = "4.95e-3,5e-5"
DEFAULT_TRANSFER = "1e-3,2.6e-6"
DEFAULT_CHUNK = 2048
DEFAULT_KV_EXPIRY_S = 30.0
MOST_KV_TOKENS = 10**12
_MOST_WORKERS = 4096
_MOST_BATCH_TOKENS = 1_000_000_000


class KvLoadFailure(StrEnum):
    """Handling of a prompt whose fetch fails: vLLM's ``kv_load_failure_policy``."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Time that prompts cost where a worker does nothing else."""

    base_s: float = 4.95e-3  # fixed time of a prefill worker's step, seconds
    # Time per prompt token computed in a step, seconds; 5e-5 is 20,000 tokens a second, an
    # assumption for 8 billion parameters on one large GPU.
    per_token_s: float = 5e-5

    @property
    def step_time(self) -> StepTime:
        """Of a prefill worker."""
        return StepTime(self.base_s, per_prompt_token_s=self.per_token_s)


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """A fleet in which prompts cost time and KV can move."""

    workers: int = 0  # prefill-only workers; 0: all workers compute their own prompts
    time: PrefillTime = field(default_factory=PrefillTime)
    chunk: int = DEFAULT_CHUNK  # upper bound on the tokens that a worker computes in one step
    kv_tokens: int | None = None  # KV memory of a prefill worker; None: as the other workers
    transfer: TransferTime = field(default_factory=TransferTime)
    kv_expiry_s: float = DEFAULT_KV_EXPIRY_S  # time for which unfetched KV stays, engine seconds
    # Whether a prompt is recomputed when its fetch fails; else the request fails.
    recompute: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.workers <= _MOST_WORKERS:
            raise ConfigError(
                f"--prefill-workers must be from 0 to {_MOST_WORKERS}, got {self.workers}"
            )
        if self.chunk > _MOST_BATCH_TOKENS:
            raise ConfigError(
                f"--batch-tokens must be at most {_MOST_BATCH_TOKENS}, got {self.chunk}"
            )
        if self.kv_tokens is not None and self.kv_tokens > MOST_KV_TOKENS:
            raise ConfigError(
                f"--prefill-kv-tokens must be at most {MOST_KV_TOKENS}, got {self.kv_tokens}"
            )
        if self.kv_tokens is not None and not self.workers:
            raise ConfigError("--prefill-kv-tokens is of prefill workers: give --prefill-workers")
        if not 0 < self.kv_expiry_s < math.inf:
            raise ConfigError(f"--kv-expiry must be above 0 seconds, got {self.kv_expiry_s:g}")

    def check(self, slots: int, context_tokens: int, drafts: int = 0) -> None:
        """Check that these settings fit the workers' slots, context length and drafts."""
        if self.chunk <= slots * (1 + drafts):
            least = f"{slots * (1 + drafts)}, for " if drafts else ""
            drafted = f", its {drafts} drafts (--speculate)" if drafts else ""
            raise ConfigError(
                f"--batch-tokens {self.chunk} must be above {least}--slots {slots}: "
                f"a step computes one token of each request that decodes{drafted}, and prompts "
                "besides"
            )
        if self.kv_tokens is not None and self.kv_tokens < context_tokens:
            raise ConfigError(
                f"--prefill-kv-tokens {self.kv_tokens} cannot be below --max-model-len "
                f"{context_tokens}: some prompts would never fit"
            )


def parse_prefill(
    workers: int,
    step_time: str | None,
    *,
    prompts_cost: bool = False,
    chunk: int | None = None,
    kv_tokens: int | None = None,
    transfer_time: str | None = None,
    kv_expiry_s: float | None = None,
    load_failure: KvLoadFailure | None = None,
) -> PrefillSettings | None:
    """Parse the prefill options; None: prompts cost nothing.

    ``prompts_cost``: whether ``--step-time`` has a t_p.
    """
    given = {
        "--batch-tokens": chunk,
        "--prefill-kv-tokens": kv_tokens,
        "--kv-transfer-time": transfer_time,
        "--kv-expiry": kv_expiry_s,
        "--kv-load-failure": load_failure,
    }
    if workers == 0 and step_time is None and not prompts_cost:
        refuse(
            given,
            "does nothing where prompts cost nothing: "
            "give --step-time a t_p, --prefill-workers or --prefill-step-time",
        )
        return None
    return PrefillSettings(
        workers=workers,
        time=parse_prefill_time(step_time),
        chunk=DEFAULT_CHUNK if chunk is None else chunk,
        kv_tokens=kv_tokens,
        transfer=parse_transfer_time(transfer_time),
        kv_expiry_s=DEFAULT_KV_EXPIRY_S if kv_expiry_s is None else kv_expiry_s,
        recompute=load_failure is KvLoadFailure.RECOMPUTE,
    )


def refuse(options: Mapping[str, object], problem: str) -> None:
    """Reject options that were given but have no effect."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{option} {problem}")


def parse_prefill_time(text: str | None) -> PrefillTime:
    """Parse ``C,t_p`` in seconds; None: the default."""
    values = numbers("--prefill-step-time", DEFAULT_PREFILL if text is None else text)
    if len(values) != 2 or min(values) < 0 or values[0] == 0:
        raise ConfigError(
            f"--prefill-step-time takes C,t_p in seconds with C above 0, got {text!r}"
        )
    return PrefillTime(*values)


def parse_transfer_time(text: str | None) -> TransferTime:
    """Parse ``L,t`` in seconds; None: the default."""
    values = numbers("--kv-transfer-time", DEFAULT_TRANSFER if text is None else text)
    if len(values) != 2 or min(values) < 0:
        raise ConfigError(f"--kv-transfer-time takes L,t in seconds from 0 up, got {text!r}")
    return TransferTime(*values)
