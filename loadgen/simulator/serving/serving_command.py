"""``evenstep simulate serving``: whole engines in virtual time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from rich.console import Console, RenderableType

from loadgen.model.measured_step_time import load_step_time
from loadgen.report.numbers import figures_with_notes
from loadgen.run.options import JsonFlag, StepTimeFlag, command_of, same_named, trace_flag
from loadgen.simulator.serving.serving_config import (
    AUTO,
    PrefillWindow,
    RankGroup,
    ServingConfig,
    ServingSettings,
    whole,
)
from loadgen.simulator.serving.serving_results import ServingResult
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.request_classes import FORM, parse_classes
from loadgen.traces.trace import load_trace
from router.commands.json_output import STDOUT, write_json
from router.commands.options import flag
from router.core.errors import ConfigError
from router.core.targets import Targets

_TRACE = "mooncake-synthetic"
ARRIVALS = "poisson:RATE|trace[:SCALE]|closed:N"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions(ServingSettings):
    """Command line of ``evenstep simulate serving``."""

    trace: Annotated[str | None, trace_flag(_TRACE)] = None
    arrivals: Annotated[str, flag("A rate per second, or the trace's times, scaled.", ARRIVALS)] = (
        "poisson:7"
    )
    beside: Annotated[
        str | None,
        flag(
            "Further groups of one model: each a barrier of so many workers, with steps of this "
            "speed; its requests go where the router sends them.",
            RankGroup.FORM,
        ),
    ] = None
    prompt_budget: Annotated[
        str | None,
        flag(
            "Prompt tokens of a step at most; auto: as the router chooses for each step, by the "
            "learned cost [no further bound].",
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
    classes: Annotated[
        str | None,
        flag("Classes of requests: share, seconds to the first and each further token.", FORM),
    ] = None
    json_file: JsonFlag = None

    def config(self) -> ServingConfig:
        """Build the configuration."""
        return ServingConfig(
            **same_named(self, ServingConfig)
            | {
                "trace": load_trace(self.trace or _TRACE),
                "arrivals": Arrivals.parse(self.arrivals, ARRIVALS),
                "prompt_budget": _budget(self.prompt_budget),
                "targets": Targets(self.target_ttft, self.target_tpot),
                "beside": () if self.beside is None else RankGroup.parse(self.beside),
                "classes": () if self.classes is None else parse_classes(self.classes),
                "prefill_window": PrefillWindow.parse(self.prefill_window),
                "step_time": load_step_time(self.step_time),
            }
        )


@command_of(ServingOptions)
def serving(options: ServingOptions) -> None:
    """Simulate whole engines, by default behind one barrier, in virtual time.

    Workers compute prompts in chunks and cache prefixes; at the barrier they wait for the slowest
    at every step. The live router's own code decides; it learns the step time from the steps. A
    Mooncake trace with hash_ids brings the prefixes that prompts share; other traces share none:
    evenstep simulate serving --policy barrier_time --dispatch instant --trace mooncake.jsonl.
    """
    result = simulate_serving(options.config())
    Console(stderr=options.json_file == STDOUT).print(_table(result))
    write_json(result.report(), options.json_file)


_ROWS = (
    ("TTFT, s", "ttft_mean_s", 1.0),
    ("TTFT p50, s", "ttft_p50_s", 1.0),
    ("TTFT p99, s", "ttft_p99_s", 1.0),
    ("latency, s", "latency_mean_s", 1.0),
    ("TPOT, ms", "tpot_mean_s", 1e3),
    ("TPOT p99, ms", "tpot_p99_s", 1e3),
    ("throughput, tok/s", "throughput_tok_s", 1.0),
    ("targets met, requests/s", "goodput_per_s", 1.0),
    ("of the prompts cached, %", "prefix_hit_share", 100.0),
    ("idle share, %", "idle_share", 100.0),
    ("step, ms", "step_mean_s", 1e3),
    ("evictions in 1,000 requests", "evictions_per_1k", 1.0),
    ("completed", "completed", 1),
)


def _table(result: ServingResult) -> RenderableType:
    used = result.parameters
    budget = used["prompt_budget"]
    prompts = "" if budget is None else f", {_bound(used)}"
    window = used["prefill_window"]
    some = "" if window == str(PrefillWindow()) else f", prompts in {window} of the steps"
    sessions = "" if used["think"] is None else f", turns {used['think']:g} s after an answer"
    workers = f"{used['workers']} workers{'' if used['barrier'] else ', each stepping alone,'}"
    if used["beside"] is not None:
        workers += f" and groups of {used['beside']} beside them,"
    notes: tuple[str, ...] = (
        f"{used['trace']}, {used['requests']} requests, arrivals {used['arrivals']}{sessions}, "
        f"seed {used['seed']}; the first {used['warmup']:.0%} are left out",
        f"{workers} of {used['slots']} slots and {used['kv_tokens']} KV tokens, "
        f"{used['batch_tokens']} tokens a step{prompts}{some}; "
        f"{used['dispatch']} dispatch",
        f"step time {used['step_time']}, learned {used['learned_step_time'] or 'none'}",
    )
    if used["classes"] is not None:
        met = ", ".join(f"{name} {share:.1%}" for name, share in result.met_by_class.items())
        causes = ", ".join(f"{cause} {count}" for cause, count in result.misses.items())
        notes += (f"targets met: {met}; missed: {causes}",)
    return figures_with_notes(str(used["policy"]), notes, (_ROWS, result))


def _bound(used: Mapping[str, object]) -> str:
    if used["prompt_budget"] != AUTO:
        return f"{used['prompt_budget']} of them prompts'"
    targets = ((name, used[f"target_{name}_s"]) for name in ("ttft", "tpot"))
    told = [f"{name.upper()} {target:g} s" for name, target in targets if target is not None]
    return f"prompts' by the router's budget{' for ' * bool(told)}{' and '.join(told)}"


def _budget(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == AUTO:
        return AUTO
    if (tokens := whole(text)) is None:
        raise ConfigError(f"--prompt-budget takes auto or a number of tokens, got {text!r}")
    return tokens
