"""Execution of the studies' trials: several in parallel, each once; results are kept on disk."""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from loadgen.figures.fingerprints import fingerprint
from loadgen.figures.samples import Key, Outcomes, Sample
from loadgen.figures.trials import Run, Trial
from loadgen.simulator.decode.decode_results import StepRecords

DIGITS = 7

Tell = Callable[[str], None]
_Paths = Mapping[tuple[Key, int], Path]


class Laboratory(Protocol):
    """Executes the trials of studies."""

    def run(self, trials: Sequence[Trial]) -> Outcomes:
        """Run every repetition of every trial; outcomes keep the trials' order."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A laboratory on this machine."""

    folder: Path  # one file per finished run
    processes: int = 2  # parallel runs
    quick: bool = False  # fewer steps and seeds, as a smoke test; the figures mean nothing
    tell: Tell = lambda _: None  # progress

    def run(self, trials: Sequence[Trial]) -> Outcomes:
        trials = [trial.shortened() if self.quick else trial for trial in trials]
        wanted = [(trial, seed) for trial in trials for seed in range(trial.seeds)]
        paths = {
            (trial.key, seed): self.folder
            / f"{fingerprint(trial.depends_on(seed), trial.code)}.json"
            for trial, seed in wanted
        }
        missing = [each for each in wanted if not _readable(*each, paths)]
        self.folder.mkdir(parents=True, exist_ok=True)
        begun_s = time.monotonic()
        for done, (trial, seed, run) in enumerate(self._finished(missing), 1):
            path = paths[trial.key, seed]
            part = path.with_suffix(".part")
            part.write_text(json.dumps(run), encoding="utf-8")
            part.replace(path)
            left_min = (time.monotonic() - begun_s) / done * (len(missing) - done) / 60
            told = f"{done}/{len(missing)} {' '.join(trial.key)}, seed {seed}"
            self.tell(f"{told}; about {left_min:.0f} min left")
        return {
            trial.key: _sample(trial, [_read(paths[trial.key, n]) for n in range(trial.seeds)])
            for trial in trials
        }

    def _finished(self, wanted: Sequence[tuple[Trial, int]]) -> Iterator[tuple[Trial, int, Run]]:
        if self.processes == 1 or len(wanted) < 2:
            for trial, seed in wanted:
                yield trial, seed, trial.run(seed)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self.processes, len(wanted)), context) as executor:
            futures: dict[Future[Run], tuple[Trial, int]] = {
                executor.submit(trial.run, seed): (trial, seed) for trial, seed in wanted
            }
            try:
                for future in as_completed(futures):
                    yield (*futures[future], future.result())
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise


def _readable(trial: Trial, seed: int, paths: _Paths) -> bool:
    """Whether the files are whole; damaged ones, after a crash for example, count as missing."""
    try:
        return {*trial.metrics} <= _read(paths[trial.key, seed]).keys()
    except (OSError, ValueError, AttributeError):
        return False


def _read(path: Path) -> Run:
    run: Run = json.loads(path.read_text(encoding="utf-8"))
    return run


def _sample(trial: Trial, runs: Sequence[Run]) -> Sample:
    records = runs[0].get("records")
    values = {}
    for name in (name for name in runs[0] if name != "records"):
        each = [run[name] for run in runs]
        # As written, so that reading it again gives the same.
        values[name] = tuple(float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x for x in each)
    return Sample(
        values=values,
        command=trial.command,
        differs=trial.differs,
        records=records and StepRecords(**{name: np.array(rows) for name, rows in records.items()}),
    )
