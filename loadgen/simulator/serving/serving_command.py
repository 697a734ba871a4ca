"""``evenstep simulate serving``: whole engines in virtual time."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rich.console import Console

from loadgen.model.measured_step_time import load_step_time
from loadgen.run.options import StepTimeFlag, command_of, flag, same_named
from loadgen.run.simulation_options import JsonFlag, SlotsFlag, WorkersFlag, trace_flag
from loadgen.simulator.decode.decode_config import SERVE
from loadgen.simulator.serving.serving_config import (
    AUTO,
    PrefillWindow,
    ServingArrivals,
    ServingConfig,
    whole,
)
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.simulator.serving.serving_table import serving_table
from loadgen.traces.trace import load_trace
from loadgen.traces.trace_files import BLOCK_TOKENS
from router.commands.json_output import STDOUT, write_json
from router.core.errors import ConfigError
from router.core.policies.policy_table import POLICIES
from router.core.prompt_budget import Targets
from router.core.types import Dispatch

_TRACE = "mooncake-synthetic"


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Command line of ``evenstep simulate serving``."""

    policy: Annotated[str, flag(f"One of {', '.join(POLICIES)}.", "P")] = SERVE["policy"]
    trace: Annotated[str | None, trace_flag(_TRACE)] = None
    requests: Annotated[int, flag("The first requests of the trace.", "N")] = 2500
    arrivals: Annotated[
        str, flag("A rate per second, or the trace's times, scaled.", ServingArrivals.FORMS)
    ] = "poisson:7"
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
    prompt_budget: Annotated[
        str | None,
        flag(
            "Of these at most so many of prompts; auto: as the router chooses for each step, by "
            "the learned cost [no further bound].",
            "auto|N",
        ),
    ] = None
    target_ttft: Annotated[
        float | None, flag("For auto: mean time to the first token, seconds.", "S")
    ] = None
    target_tpot: Annotated[
        float | None, flag("For auto: mean time of each further token, seconds.", "S")
    ] = None
    prefill_window: Annotated[
        str, flag("Prompts in OPEN of so many steps, alike on all.", "OPEN/OF")
    ] = "1/1"
    step_time: StepTimeFlag = "5e-3,9.5e-8,0,5e-5"
    dispatch: Annotated[
        Dispatch, flag("From the pool when a slot is free, or at once on arrival.")
    ] = SERVE["dispatch"]
    pool: Annotated[
        int, flag("Waiting requests that the policy sees, of an unbounded queue.", "N")
    ] = SERVE["pool_size"]
    dispatch_delay: Annotated[
        int, flag("Steps that a request sent at a step's end is on its way.", "N")
    ] = 0
    warmup: Annotated[float, flag("Share of the requests left out, the first.", "SHARE")] = 0.2
    seed: Annotated[int, flag("Of arrivals and random choices.", "S")] = SERVE["seed"]
    json_file: JsonFlag = None

    def config(self) -> ServingConfig:
        """Build the configuration."""
        return ServingConfig(
            **same_named(self, ServingConfig)
            | {
                "trace": load_trace(self.trace or _TRACE),
                "arrivals": ServingArrivals.parse(self.arrivals),
                "prompt_budget": _budget(self.prompt_budget),
                "targets": Targets(self.target_ttft, self.target_tpot),
                "prefill_window": PrefillWindow.parse(self.prefill_window),
                "step_time": load_step_time(self.step_time),
            }
        )


@command_of(ServingOptions)
def serving(options: ServingOptions) -> None:
    """Simulate whole engines, by default behind one barrier, in virtual time.

    Workers compute prompts in chunks, cache prefixes and wait for the slowest at every step. The
    live router's own code decides; it learns the step time from the steps. A Mooncake trace with
    hash_ids brings the prefixes that prompts share; other traces share none:
    evenstep simulate serving --policy barrier_time --dispatch instant --trace mooncake.jsonl.
    """
    result = simulate_serving(options.config())
    Console(stderr=options.json_file == STDOUT).print(serving_table(result))
    write_json(result.report(), options.json_file)


def _budget(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == AUTO:
        return AUTO
    if (tokens := whole(text)) is None:
        raise ConfigError(f"--prompt-budget takes auto or a number of tokens, got {text!r}")
    return tokens
