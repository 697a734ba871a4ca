"""Runs the cases of studies: several at a time, each once; what is finished is kept on disk."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from loadgen.figures.cases import (
    PARAMETERS,
    Case,
    command_line,
    differing,
    with_seed,
)
from loadgen.figures.fingerprints import fingerprint
from loadgen.figures.samples import Key, Outcomes, Sample
from loadgen.simulator.config import DecodeConfig
from loadgen.simulator.decode import simulate
from loadgen.simulator.handoff import PrefillResult
from loadgen.simulator.results import StepRecords
from router.forecast import Outlook
from router.policies import POLICIES, PolicySettings
from router.types import Assignment, Policy, Request, WorkerView

# What is kept of a run, with the look-ahead's parameters and skill.
METRICS = (
    *("avg_imbalance_tokens", "throughput_tok_s", "tpot_mean_s", "ttft_mean_s", "ttft_p99_s"),
    *("energy_j", "mean_load_tokens", "max_load_tokens", "mean_admitted_prompt_tokens"),
    *("max_pool_wait_steps", "slot_bubble_steps", "steps", "completed", "waiting_at_end"),
)
# And of one with prefill workers.
PREFILL_METRICS = tuple(each.name for each in fields(PrefillResult))
CHOSEN = (*PARAMETERS, "skill")
BEFORE_REFILL = "imbalance_before_refill_tokens"
DIGITS = 7
QUICK_SEEDS = 2
QUICK_SHARE = 25

Run = dict[str, Any]
Tell = Callable[[str], None]


class Laboratory(Protocol):
    """Where studies have their cases run."""

    def run(self, cases: Sequence[Case]) -> Outcomes:
        """Run every repetition of every case; in the order of the cases."""
        ...


@dataclass(frozen=True, slots=True)
class Bench:
    """A laboratory on this machine.

    Attributes:
        folder: takes one file for each finished run.
        processes: runs at a time.
        quick: fewer steps and seeds, to see that it works: no figures to believe.
        tell: is told how far it is.
    """

    folder: Path
    processes: int = 2
    quick: bool = False
    tell: Tell = lambda _: None

    def run(self, cases: Sequence[Case]) -> Outcomes:
        """See ``Laboratory.run``."""
        shortened = [_shortened(case) if self.quick else case for case in cases]
        wanted = [(case, seed) for case in shortened for seed in range(case.seeds)]
        paths = {(case.key, seed): self._path(case, seed) for case, seed in wanted}
        missing = [each for each in wanted if not _readable(paths[each[0].key, each[1]])]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._do(missing, paths)
        return {
            case.key: _sample(case, [_read(paths[case.key, n]) for n in range(case.seeds)])
            for case in shortened
        }

    def _path(self, case: Case, seed: int) -> Path:
        return self.folder / f"{fingerprint(case, with_seed(case, seed))}.json"

    def _do(self, wanted: Sequence[tuple[Case, int]], paths: dict[tuple[Key, int], Path]) -> None:
        begun_s = time.monotonic()
        for done, (case, seed, run) in enumerate(self._finished(wanted), 1):
            path = paths[case.key, seed]
            part = path.with_suffix(".part")
            part.write_text(json.dumps(run), encoding="utf-8")
            part.replace(path)
            left_s = (time.monotonic() - begun_s) / done * (len(wanted) - done)
            name = " ".join(case.key)
            self.tell(f"{done}/{len(wanted)} {name}, seed {seed}; about {left_s / 60:.0f} min left")

    def _finished(self, wanted: Sequence[tuple[Case, int]]) -> Iterator[tuple[Case, int, Run]]:
        if self.processes == 1 or len(wanted) < 2:
            for case, seed in wanted:
                yield case, seed, run_once(case, seed)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self.processes, len(wanted)), context) as executor:
            futures: dict[Future[Run], tuple[Case, int]] = {
                executor.submit(run_once, case, seed): (case, seed) for case, seed in wanted
            }
            try:
                for future in as_completed(futures):
                    yield (*futures[future], future.result())
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise


class BeforeRefill:
    """A policy whose workers are looked at before it fills their slots.

    Args:
        policy: decides.

    Attributes:
        imbalances: G max L - sum L at each decision, in tokens.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.imbalances: list[int] = []

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        outlook: Outlook | None = None,
    ) -> Sequence[Assignment]:
        """See ``types.Policy.assign``."""
        loads = [worker.load_tokens for worker in workers]
        self.imbalances.append(len(loads) * max(loads) - sum(loads))
        return self._policy.assign(waiting, workers, outlook)


def run_once(case: Case, seed: int) -> Run:
    """One simulation, JSON-able."""
    config = with_seed(case, seed)
    watched = BeforeRefill(POLICIES[config.policy].make(PolicySettings(seed=seed)))
    result = simulate(
        config,
        policy=watched if case.before_refill else None,
        keep_records=case.keep_records and seed == 0,
    )
    report = result.report()
    run: Run = {name: report[name] for name in METRICS}
    run |= {name: result.parameters[name] for name in CHOSEN}
    if result.prefill is not None:
        run |= result.prefill.report()
    if case.before_refill:
        run[BEFORE_REFILL] = float(np.mean(watched.imbalances))
    if result.records is not None:
        kept = result.records
        run["records"] = {name: getattr(kept, name).tolist() for name in StepRecords.__slots__}
    return run


def _readable(path: Path) -> bool:
    """Whole: what was spoilt, by a crash of the machine for one, is missing."""
    try:
        return {*METRICS, *CHOSEN} <= _read(path).keys()
    except (OSError, ValueError, AttributeError):
        return False


def _read(path: Path) -> Run:
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    return run


def _sample(case: Case, runs: Sequence[Run]) -> Sample:
    records = runs[0].get("records")
    names = [name for name in runs[0] if name != "records"]
    return Sample(
        values={name: tuple(_rounded(run[name]) for run in runs) for name in names},
        command=command_line(case),
        differs=differing(case.config),
        records=records and StepRecords(**{name: np.array(rows) for name, rows in records.items()}),
    )


def _rounded(value: float | None) -> float | None:
    """As it is written: what is read again is the same."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def _shortened(case: Case) -> Case:
    config = case.config
    steps = max(40, config.steps // QUICK_SHARE)
    small: DecodeConfig = replace(config, steps=steps, warmup=min(config.warmup, steps // 4))
    return replace(case, config=small, seeds=min(case.seeds, QUICK_SEEDS))
