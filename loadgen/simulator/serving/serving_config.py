"""Configuration of one simulation of whole engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Literal, Self

from loadgen.model.ranges import check_ranges
from loadgen.run.options import DispatchFlag, SlotsFlag, WorkersFlag, check_policy
from loadgen.simulator.decode.decode_config import SERVE
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.request_classes import RequestClass
from loadgen.traces.trace import Trace, TraceRequest
from loadgen.traces.trace_files import BLOCK_TOKENS
from router.commands.options import flag
from router.core.errors import ConfigError, InputError
from router.core.policies.policy_table import POLICIES
from router.core.step_time import PAPER_STEP_TIME, StepTime, number_in
from router.core.targets import Targets

AUTO: Final = "auto"
_MANY = 1_000_000_000
_RANGES: dict[str, tuple[float, float]] = {
    "workers": (1, 4096),
    "slots": (1, 16_384),
    "kv_tokens": (1, 10**12),
    "block_tokens": (1, 1_000_000),
    "batch_tokens": (1, _MANY),
    "requests": (1, 10_000_000),
    "seed": (0, 2**64 - 1),
    "think": (0, 1e6),
    "pool": (1, 1_000_000),
    "dispatch_delay": (0, 1000),
}
_SPEEDS = (1e-3, 1e3)
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class PrefillWindow:
    """Prompts are computed in the first ``open`` of every so many steps, alike on all ranks."""

    open: int = 1
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``OPEN/OF``."""
        left, _, right = text.partition("/")
        if 1 <= (whole(left) or 0) <= (whole(right) or 0) <= _MANY:
            return cls(int(left), int(right))
        raise ConfigError(
            f"--prefill-window takes OPEN/OF, as 1/4: prompts in one of four steps, got {text!r}"
        )

    def __contains__(self, step: int) -> bool:
        return step % self.every < self.open

    def __str__(self) -> str:
        return f"{self.open}/{self.every}"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Workers of a group, and the speed of their steps: 0.5 takes twice ``step_time``."""

    FORM: ClassVar[str] = "G[:SPEED],..."

    workers: int
    speed: float = 1.0

    @classmethod
    def parse(cls, text: str) -> tuple[Self, ...]:
        """Parse ``8,4:.5``.

        Raises:
            ConfigError: another form, or a number out of range.
        """
        groups = []
        for each in text.split(","):
            left, colon, right = each.partition(":")
            workers, speed = whole(left) or 0, number_in(right) if colon else 1.0
            least, most = _SPEEDS
            if not 1 <= workers <= _RANGES["workers"][1] or not least <= speed <= most:
                raise ConfigError(
                    f"--beside takes {cls.FORM}, as 8,4:.5: workers, and a speed from {least:g} to "
                    f"{most:g} of their steps, got {text!r}"
                )
            groups.append(cls(workers, speed))
        return tuple(groups)

    def __str__(self) -> str:
        return f"{self.workers}:{self.speed:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """Settings that the command line and the simulation share; those of ``serve`` as there."""

    policy: Annotated[str, flag(f"One of {', '.join(POLICIES)}.", "P")] = SERVE["policy"]
    requests: Annotated[int, flag("The first requests of the trace.", "N")] = 2500
    think: Annotated[
        float | None,
        flag(
            "Closed sessions: a prompt that continues another comes this many seconds (mean, "
            "exponential) after its answer; --arrivals are those of the sessions. Needs hash_ids.",
            "S",
        ),
    ] = None
    workers: WorkersFlag = 8
    barrier: Annotated[bool, flag("Workers step together, or each alone.")] = True
    slots: SlotsFlag = 128
    kv_tokens: Annotated[int, flag("KV memory of a worker.", "N")] = 1_000_000
    block_tokens: Annotated[int, flag("Tokens of a block; prefixes match by blocks.", "N")] = (
        BLOCK_TOKENS
    )
    batch_tokens: Annotated[int, flag("Tokens that a worker computes in a step.", "N")] = 2048
    dispatch: DispatchFlag = SERVE["dispatch"]
    pool: Annotated[
        int, flag("Waiting requests that the policy sees, of an unbounded queue.", "N")
    ] = SERVE["pool_size"]
    dispatch_delay: Annotated[
        int, flag("Steps that a request sent at a step's end is on its way.", "N")
    ] = 0
    warmup: Annotated[float, flag("Share of the requests left out, the first.", "SHARE")] = 0.2
    seed: Annotated[int, flag("Of arrivals and random choices.", "S")] = SERVE["seed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig(ServingSettings):
    """One simulation of whole engines.

    Raises:
        ConfigError: an invalid number or combination; names the option.
        InputError: the trace lacks what the options need.
    """

    trace: Trace
    arrivals: Arrivals
    # Further groups that serve the same requests, each with steps of its own.
    beside: Sequence[RankGroup] = ()
    # Most prompt tokens of a step; None: no further bound; ``AUTO``: the router's own from step to
    # step, by ``targets``.
    prompt_budget: int | Literal["auto"] | None = None
    targets: Targets = field(default_factory=Targets)
    prefill_window: PrefillWindow = field(default_factory=PrefillWindow)
    step_time: StepTime = PAPER_STEP_TIME  # true cost of the steps; the router learns its own
    starvation_s: float = SERVE["starvation_s"]  # wait after which a request goes before all others
    classes: Sequence[RequestClass] = ()  # with targets; dealt to the requests by ``seed``

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if isinstance(self.prompt_budget, int) and not 1 <= self.prompt_budget <= _MANY:
            raise ConfigError(
                f"--prompt-budget must be from 1 to {_MANY:g}, got {self.prompt_budget}"
            )
        if self.targets != Targets() and self.prompt_budget != AUTO:
            raise ConfigError("--target-ttft and --target-tpot need --prompt-budget auto")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"--warmup must be from 0 to below 1, got {self.warmup:g}")
        check_policy(self.policy, self.dispatch)
        if self.batch_tokens <= self.slots:
            raise ConfigError(
                f"--batch-tokens {self.batch_tokens} must be above --slots {self.slots}: a step "
                "computes a token of each request that decodes"
            )
        self._check_trace()

    @property
    def groups(self) -> Mapping[str, RankGroup]:
        """All groups by name, ``workers`` first."""
        beside = {f"beside{number}": each for number, each in enumerate(self.beside, 1)}
        return {"default": RankGroup(self.workers), **beside}

    @property
    def rows(self) -> Sequence[TraceRequest]:
        """The requests: the first of the trace, or with its own times the earliest.

        Raises:
            InputError: too few of them have times.
        """
        if self.arrivals.kind == "trace":
            return self.trace.earliest(self.requests)
        return self.trace.requests[: self.requests]

    def _check_trace(self) -> None:
        usable = len(self.trace.requests)
        if usable < self.requests:
            raise InputError(
                f"{self.trace.name}: has {usable} usable requests, not {self.requests}; lower "
                "--requests"
            )
        rows = self.rows
        prefixes = {row.block_tokens for row in rows if row.blocks}
        for size in prefixes:
            if size % self.block_tokens:
                raise ConfigError(
                    f"--block-tokens must divide {size}, the size of the trace's blocks, got "
                    f"{self.block_tokens}"
                )
        if self.think is not None and self.arrivals.kind == "closed":
            raise ConfigError(
                "--think has sessions whose first turns come by --arrivals; with closed:N each "
                "client sends its next request at once: give one of the two"
            )
        if self.think is not None and not prefixes:
            raise InputError(
                f"{self.trace.name}: tells no prompts that continue others; --think needs a trace "
                "with hash_ids"
            )
        longest = max(row.prompt_tokens + row.output_tokens for row in rows)
        if longest > self.kv_tokens // self.block_tokens * self.block_tokens:
            raise ConfigError(
                f"--kv-tokens {self.kv_tokens}: the longest request of {self.trace.name} has "
                f"{longest} tokens and fits no worker"
            )

    def described(self) -> dict[str, object]:
        """Everything that a result depends on."""
        plain = ("policy", *_RANGES, "barrier", "prompt_budget", "starvation_s", "warmup")
        return {
            "trace": self.trace.name,
            **{name: getattr(self, name) for name in plain},
            **{name: SERVE[name] for name in ("lookahead", "overcommit")},
            "beside": ",".join(map(str, self.beside)) or None,
            "arrivals": str(self.arrivals),
            "dispatch": self.dispatch.value,
            "prefill_window": str(self.prefill_window),
            "target_ttft_s": self.targets.ttft_s,
            "target_tpot_s": self.targets.tpot_s,
            "classes": ",".join(map(str, self.classes)) or None,
            "step_time": str(self.step_time),
        }


def whole(text: str) -> int | None:
    """A whole number of at most 18 digits; None: other text."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
