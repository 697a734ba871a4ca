"""A trial: decode workers behind one policy, with its command line and names."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

from loadgen.figures.fingerprints import DECODE_FOLDERS, HANDOFF_FOLDERS
from loadgen.figures.trials import QUICK_SEEDS, QUICK_SHARE, Run, Trial
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import PAPER, DecodeConfig, flag, usual_pool
from loadgen.simulator.decode.decode_results import StepRecords
from loadgen.simulator.decode.length_sources import TraceLengths
from loadgen.simulator.decode.prefill_results import PrefillResult
from loadgen.simulator.decode.prefill_workers import PrefillConfig
from loadgen.simulator.decode.simulated_router import PARAMETERS
from loadgen.traces.trace import BUNDLED, load_trace
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.types import Assignment, Request, WorkerView

# Kept metrics of a run, with the look-ahead's parameters and skill.
_KEPT = (
    *("avg_imbalance_tokens", "throughput_tok_s", "tpot_mean_s", "ttft_mean_s", "ttft_p99_s"),
    *("energy_j", "mean_load_tokens", "max_load_tokens", "mean_admitted_prompt_tokens"),
    *("max_pool_wait_steps", "slot_bubble_steps", "steps", "completed", "waiting_at_end"),
)
_CHOSEN = (*PARAMETERS, "skill")
# Further metrics of a run with prefill workers.
_PREFILL_METRICS = tuple(each.name for each in fields(PrefillResult))
BEFORE_REFILL = "imbalance_before_refill_tokens"


@dataclass(frozen=True, slots=True)
class Case(Trial):
    """One row of a study."""

    config: DecodeConfig  # settings of the simulation; the seed is replaced
    before_refill: bool = False  # measure the imbalance before each refill of free slots as well
    keep_records: bool = False  # keep every step of the first seed

    @property
    def metrics(self) -> tuple[str, ...]:
        prefill = _PREFILL_METRICS if self.config.prefill is not None else ()
        before = (BEFORE_REFILL,) if self.before_refill else ()
        return (*_KEPT, *_CHOSEN, *prefill, *before)

    @property
    def code(self) -> Sequence[str]:
        return HANDOFF_FOLDERS if self.config.prefill else DECODE_FOLDERS

    @property
    def differs(self) -> Mapping[str, object]:
        """Settings that differ from the paper's conditions."""
        config = self.config
        default = settings(DecodeConfig(policy="bfio", lengths=config.lengths, **PAPER))
        required = {"policy": config.policy, "lengths": config.lengths.name}
        given = settings(config).items()
        return required | {name: value for name, value in given if value != default.get(name)}

    @property
    def command(self) -> str | None:
        config, lengths = self.config, self.config.lengths
        if config.known_profile is not None:
            return None
        default = DecodeConfig(policy="bfio", lengths=lengths, pool=usual_pool(config.arrivals))
        if config.prefill is not None:
            default = replace(default, prefill=PrefillConfig(config.prefill.workers))
        usual = _flags(default)
        words = [f"--policy {config.policy}", f"--lengths {lengths.name}"]
        if isinstance(lengths, TraceLengths):
            bundled = {path.name: name for name, path in BUNDLED.items()}
            words[1] = f"--trace {shlex.quote(bundled.get(lengths.name, lengths.name))}"
        for name, value in _flags(config).items():
            if value != usual[name] or name == "--prefill-workers":
                words.append(f"{name} {value}")
        return " ".join(["evenstep simulate decode", *words])

    def depends_on(self, seed: int) -> list[object]:
        lengths, drawn = self.config.lengths, self.config.lengths.name
        if isinstance(lengths, TraceLengths):
            content = lengths.prompts.tobytes() + lengths.outputs.tobytes()
            drawn = hashlib.sha256(content).hexdigest()
        shown = (self.before_refill or None, self.keep_records)
        return [settings(self.config), seed, *shown, drawn]

    def run(self, seed: int) -> Run:
        config = replace(self.config, seed=seed)
        watched = BeforeRefill(POLICIES[config.policy].make(PolicySettings(seed=seed)))
        result = simulate(
            config,
            policy=watched if self.before_refill else None,
            keep_records=self.keep_records and seed == 0,
        )
        report = result.report()
        run: Run = {name: report[name] for name in _KEPT}
        run |= {name: result.parameters[name] for name in _CHOSEN}
        if result.prefill is not None:
            run |= result.prefill.report()
        if self.before_refill:
            run[BEFORE_REFILL] = float(np.mean(watched.imbalances))
        if result.records is not None:
            kept = result.records
            run["records"] = {name: getattr(kept, name).tolist() for name in StepRecords.__slots__}
        return run

    def shortened(self) -> Case:
        steps = max(40, self.config.steps // QUICK_SHARE)
        warmup = min(self.config.warmup, steps // 4)
        small: DecodeConfig = replace(self.config, steps=steps, warmup=warmup)
        return replace(self, config=small, seeds=min(self.seeds, QUICK_SEEDS))


class BeforeRefill(Policy):
    """A policy that records the imbalance before it fills the workers' slots."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.imbalances: list[int] = []  # G max L - sum L at each decision, in tokens

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        loads = [worker.load_tokens for worker in workers]
        self.imbalances.append(len(loads) * max(loads) - sum(loads))
        return self._policy.assign(waiting, workers, known)


@cache
def trace_lengths(name: str) -> TraceLengths:
    """Lengths of a bundled trace."""
    return TraceLengths.of(load_trace(name))


def settings(config: DecodeConfig) -> dict[str, object]:
    """All settings that a result depends on, except the seed."""
    everything = config.described() | {name: getattr(config, name) for name in PARAMETERS}
    del everything["seed"]
    return everything


_PLAIN_FLAGS = (
    *("workers", "slots", "pool", "steps", "warmup", *PARAMETERS),
    *("deadline_steps", "dispatch_delay", "overcommit", "kv_tokens", "arrivals"),
    "size_error",
)


def _flags(config: DecodeConfig) -> dict[str, str]:
    """All flags of a command line with their values, except policy and lengths."""
    profile, prefill = config.profile, config.prefill
    plain = {flag(name): getattr(config, name) for name in _PLAIN_FLAGS}
    flags = plain | {
        "--dispatch": config.dispatch.value,
        "--lookahead": config.knowledge,
        "--drift": f"{profile.growth:g}",
        "--prefill-cost": f"{profile.prefill_beta:g},{profile.prefill_chunk}",
        "--step-time": config.step_time,
    }
    if prefill is not None:
        computes, transfer = prefill.time, prefill.transfer
        flags |= {
            "--prefill-workers": prefill.workers,
            "--prefill-step-time": f"{computes.base_s:g},{computes.per_token_s:g}",
            "--prefill-chunk": prefill.chunk,
            "--prefill-kv-tokens": prefill.kv_tokens,
            "--kv-transfer-time": f"{transfer.latency_s:g},{transfer.per_token_s:g}",
        }
    return {name: str(value) for name, value in flags.items()}
