"""A trial: decode workers behind one policy, and what is measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar

import numpy as np

from loadgen.figures.fingerprints import DECODE_FOLDERS, HANDOFF_FOLDERS
from loadgen.figures.trials import QUICK_SHARE, CommandTrial, Run
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_command import DecodeOptions
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_results import StepRecords
from loadgen.simulator.decode.prefill_results import PrefillResult
from loadgen.simulator.decode.simulated_router import PARAMETERS
from router.core.forecast.forecast import WorkProfile
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
class Case(CommandTrial[DecodeOptions]):
    """One row of a study."""

    before_refill: bool = False  # measure the imbalance before each refill of free slots as well
    keep_records: bool = False  # keep every step of the first seed
    unaware: bool = False  # the policy takes a step to cost nothing but KV tokens

    name: ClassVar = "simulate decode"
    always: ClassVar = ("policy",)

    @property
    def metrics(self) -> tuple[str, ...]:
        prefill = _PREFILL_METRICS if self.options.prefill_workers else ()
        before = (BEFORE_REFILL,) if self.before_refill else ()
        return (*_KEPT, *_CHOSEN, *prefill, *before)

    @property
    def code(self) -> Sequence[str]:
        return HANDOFF_FOLDERS if self.options.prefill_workers else DECODE_FOLDERS

    @property
    def command(self) -> str | None:
        return None if self.unaware else super(Case, self).command

    def depends_on(self, seed: int) -> list[object]:
        return [self.config(seed).described(), self.before_refill, self.keep_records]

    def config(self, seed: int) -> DecodeConfig:
        """The simulation of one run."""
        (config,) = self.seeded(seed).configs()
        return replace(config, known_profile=WorkProfile()) if self.unaware else config

    def run(self, seed: int) -> Run:
        config = self.config(seed)
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
            run |= asdict(result.prefill)
        if self.before_refill:
            run[BEFORE_REFILL] = float(np.mean(watched.imbalances))
        if result.records is not None:
            kept = result.records
            run["records"] = {name: getattr(kept, name).tolist() for name in StepRecords.__slots__}
        return run

    def shortened(self) -> Case:
        steps = max(40, self.options.steps // QUICK_SHARE)
        return self.shorter(steps=steps, warmup=min(self.options.warmup, steps // 4))


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
