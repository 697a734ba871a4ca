"""``evenstep simulate decode``: one policy in virtual time, or several on the same requests."""

import time
from dataclasses import dataclass, replace
from typing import Annotated

from rich.console import Console

from loadgen.engine.prefill_settings import (
    DEFAULT_CHUNK,
    DEFAULT_PREFILL,
    DEFAULT_TRANSFER,
    parse_prefill_time,
    parse_transfer_time,
    refuse,
)
from loadgen.model.measured_step_time import load_step_time
from loadgen.run.options import JsonFlag, StepTimeFlag, command_of, same_named, trace_flag
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import KEPT_WAITING, SERVE, DecodeConfig, DecodeSettings
from loadgen.simulator.decode.length_sources import (
    LAW_FORMS,
    LawLengths,
    LengthSource,
    TraceLengths,
)
from loadgen.simulator.decode.oracle import Knowledge
from loadgen.simulator.decode.policy_comparison import Comparison, comparison_table, decode_table
from loadgen.simulator.decode.prefill_workers import PrefillConfig
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import load_trace
from loadgen.traces.trace_files import MAX_TOKENS
from router.commands.json_output import STDOUT, write_json
from router.commands.options import flag
from router.core.errors import ConfigError
from router.core.forecast.forecast import WorkProfile
from router.core.step_time import numbers

_TRACE = "burstgpt"
ARRIVALS = "full|poisson:RATE|trace"
# Within these bounds, sums of tokens stay far below the limits of 64 bits.
_MOST_DRIFT = 1000
_MOST_BETA = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions(DecodeSettings):
    """Command line of ``evenstep simulate decode``."""

    trace: Annotated[str | None, trace_flag(_TRACE)] = None
    lengths: Annotated[str | None, flag(f"In place of a trace: {LAW_FORMS}.", "LAW:IN,OUT")] = None
    pool: Annotated[
        int | None,
        flag(
            f"Requests kept waiting [{KEPT_WAITING}]; with other arrivals, room to wait "
            f"[{SERVE['pool_size']}].",
            "N",
        ),
    ] = None
    lead: Annotated[
        float | None,
        flag("Tokens by which a worker that can be filled is left below [rule].", "TOKENS"),
    ] = None
    lookahead: Annotated[
        str, flag("What is known of coming ends.", "auto|none|cap|survival|oracle|miss:P")
    ] = SERVE["lookahead"]
    arrivals: Annotated[str, flag("Always enough, a rate per second, the trace's.", ARRIVALS)] = (
        "full"
    )
    drift: Annotated[float, flag("Tokens that a request grows by in a step.", "D")] = 1.0
    prefill_cost: Annotated[
        str | None, flag("Workers prefill: work per token, chunk.", "BETA,CHUNK")
    ] = None
    step_time: StepTimeFlag = "4.95e-3,9.5e-8"
    prefill_workers: Annotated[int, flag("Further workers that compute the prompts.", "P", 0)] = 0
    prefill_step_time: Annotated[
        str | None,
        flag(
            f"Seconds: a prefill worker's step, each prompt token in it [{DEFAULT_PREFILL}].",
            "C,t_p",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None, flag(f"Prompt tokens that a step computes at most [{DEFAULT_CHUNK}].", "N")
    ] = None
    prefill_kv_tokens: Annotated[
        int | None,
        flag("KV memory of a prefill worker; KV stays until it has been fetched [no bound].", "N"),
    ] = None
    kv_transfer_time: Annotated[
        str | None,
        flag(
            "Seconds until a decode worker has a prompt's KV: any, per token "
            f"[{DEFAULT_TRANSFER}].",
            "L,t",
        ),
    ] = None
    seeds: Annotated[int, flag("Runs of each policy, with seeds from --seed on.", "N", 1)] = 1
    json_file: JsonFlag = None

    def configs(self) -> list[DecodeConfig]:
        """Build the configuration of each policy from the options."""
        arrivals = Arrivals.parse(self.arrivals, ARRIVALS)
        usual = KEPT_WAITING if arrivals.kind == "full" else SERVE["pool_size"]
        names = self.policy.split(",")
        if len(set(names)) < len(names):
            raise ConfigError(f"--policy: give each policy once, got {self.policy!r}")
        first = DecodeConfig(
            **same_named(self, DecodeConfig)
            | {
                "policy": names[0],
                "pool": usual if self.pool is None else self.pool,
                "lengths": self._lengths(),
                "arrivals": arrivals,
                "lead_tokens": self.lead,
                "knowledge": Knowledge.parse(self.lookahead),
                "profile": _profile(self.drift, self.prefill_cost),
                "step_time": load_step_time(self.step_time),
                "prefill": self._prefill(),
            }
        )
        return [first, *(replace(first, policy=name) for name in names[1:])]

    def _lengths(self) -> LengthSource:
        if self.lengths is None:
            return TraceLengths.of(load_trace(self.trace or _TRACE))
        if self.trace is not None:
            raise ConfigError("--trace and --lengths: give one of them")
        return LawLengths.parse(self.lengths)

    def _prefill(self) -> PrefillConfig | None:
        chunk, kv_tokens = self.prefill_chunk, self.prefill_kv_tokens
        if self.prefill_workers == 0:
            given = {
                "--prefill-step-time": self.prefill_step_time,
                "--prefill-chunk": chunk,
                "--prefill-kv-tokens": kv_tokens,
                "--kv-transfer-time": self.kv_transfer_time,
            }
            refuse(given, "is of prefill workers: give --prefill-workers")
            return None
        return PrefillConfig(
            self.prefill_workers,
            parse_prefill_time(self.prefill_step_time),
            DEFAULT_CHUNK if chunk is None else chunk,
            0 if kv_tokens is None else kv_tokens,
            parse_transfer_time(self.kv_transfer_time),
        )


@command_of(DecodeOptions)
def decode(options: DecodeOptions) -> None:
    """Simulate workers whose decode steps wait for the slowest, in virtual time.

    With --prefill-workers the prompts are computed first, and the result has the parts of the TTFT
    (prefill_queue_mean_s, prefill_mean_s, handoff_wait_mean_s, kv_transfer_mean_s,
    first_step_mean_s), the KV kept for decode workers (prefill_kept_mean_tokens,
    prefill_kept_max_tokens, of all prefill workers), the shares of the prefill workers' time in
    steps and without memory for a prompt that waits (prefill_busy_share, prefill_stalled_share),
    and the prompts that were not computed at the end (prefill_waiting_at_end):
    evenstep simulate decode --arrivals poisson:1400 --prefill-workers 40 --prefill-kv-tokens 16384.

    Several policies, or several seeds, give means with 95 % intervals, and of paired seeds the
    differences from the first policy: evenstep simulate decode --policy jsq,bfio --seeds 5.
    """
    configs = options.configs()
    try:
        runs = {
            config.policy: [
                simulate(replace(config, seed=options.seed + n), clock=time.perf_counter)
                for n in range(options.seeds)
            ]
            for config in configs
        }
    except MemoryError as error:
        raise ConfigError(
            "--workers times --slots, --pool or --horizon: too much for this machine's memory"
        ) from error
    console = Console(stderr=options.json_file == STDOUT)
    if len(configs) == options.seeds == 1:
        (result,) = runs[configs[0].policy]
        console.print(decode_table(result))
        write_json(result.report(), options.json_file)
        return
    comparison = Comparison(runs)
    console.print(comparison_table(comparison))
    write_json(comparison.report(), options.json_file)


def _profile(drift: float, prefill_cost: str | None) -> WorkProfile:
    if not 0 <= drift <= _MOST_DRIFT:
        raise ConfigError(f"--drift takes a number from 0 to {_MOST_DRIFT:,}, got {drift:g}")
    if prefill_cost is None:
        return WorkProfile(growth=drift)
    values = numbers("--prefill-cost", prefill_cost)
    beta, chunk = values if len(values) == 2 else (0.0, 0.0)
    if not 0 < beta <= _MOST_BETA or not 1 <= chunk <= MAX_TOKENS or not chunk.is_integer():
        raise ConfigError(
            f"--prefill-cost takes BETA,CHUNK with BETA above 0 and up to {_MOST_BETA:,}, and "
            f"CHUNK a whole number of tokens from 1 to {MAX_TOKENS:,}, got {prefill_cost!r}"
        )
    return WorkProfile(growth=drift, prefill_beta=beta, prefill_chunk=int(chunk))
