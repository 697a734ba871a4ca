"""The type of a study, and the studies' common conditions (arXiv 2601.17855, section 6)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from loadgen.engine.engine_features import EngineFeatures
from loadgen.figures.fingerprints import DECODE_FOLDERS, file_of
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Claim, Key, Outcomes
from loadgen.figures.tables import Column, Table, metric_table
from loadgen.figures.trials import Trial
from loadgen.report.origin import Document, Engines, origin
from loadgen.simulator.decode.decode_command import DecodeOptions
from loadgen.traces.trace import load_trace
from loadgen.traces.trace_files import BLOCK_TOKENS

TRACE_NAMES: Mapping[str, str] = {
    "burstgpt": "BurstGPT lengths",
    "azure-conv": "Azure conversation lengths",
}

# Workers hold tokens and grow; prompts are computed elsewhere.
DECODING: Mapping[str, object] = {
    **EngineFeatures(prefix_caching=False, block_tokens=1).described(),
    "batch_tokens": None,
    "prompts_cost": False,
}
# Workers, or others for them, compute prompts in chunks; the cases name their sizes.
COMPUTING: Mapping[str, object] = {**DECODING, "prompts_cost": True}
# Whole engines, which cache prefixes in a Mooncake trace's blocks.
SERVING: Mapping[str, object] = {
    **COMPUTING,
    **EngineFeatures(block_tokens=BLOCK_TOKENS).described(),
}


class Study(ABC):
    """One question to the simulator."""

    title: ClassVar[str]
    conditions: ClassVar[str]  # in a sentence or two
    # Files and folders that decide its figures, beside its own file.
    code: ClassVar[Sequence[str]] = DECODE_FOLDERS
    # Which features its engines have, beside the sizes that its cases name.
    physics: ClassVar[Mapping[str, object]] = DECODING
    further_pictures: ClassVar[Sequence[str]] = ()

    def cases(self) -> Iterable[Trial]:
        """What is run; a study whose cases depend on others' outcomes has its own ``measure``."""
        return ()

    def measure(self, laboratory: Laboratory) -> Outcomes:
        """Have the cases run."""
        return laboratory.run(list(self.cases()))

    @abstractmethod
    def tables(self, outcomes: Outcomes) -> Sequence[Table]: ...

    def claims(self, outcomes: Outcomes) -> Iterable[Claim]:
        """Claims about the outcomes; one that fails is shown as missed."""
        return ()

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        """Write a PNG, and ``further_pictures`` beside it; without this method there is none."""
        raise NotImplementedError

    def words(self, outcomes: Outcomes) -> str:
        """Interpretation of the figures and their limits; empty: nothing to add."""
        return ""

    @property
    def draws(self) -> bool:
        return type(self).draw is not Study.draw

    def origin(self) -> Document:
        """Origin of figures that are simulated now."""
        code = (*self.code, file_of(type(self).__module__))
        return origin(Engines.SIMULATED, code, self.physics)


# Where the paper's conditions differ from the defaults of ``serve``.
PAPER: Mapping[str, Any] = {"deadline_steps": 0, "overcommit": 0, "lookahead": "none"}
# The paper's objective as printed; the tie weight only breaks ties.
PLAIN: Mapping[str, float] = {"discount": 1.0, "tie_weight": 1e-9, "lead": 0.0}
# Policies with their information, by the names that tables and keys use.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "fcfs": {"policy": "fcfs"},
    "jsq": {"policy": "jsq"},
    "least_tokens": {"policy": "least_tokens"},
    "vllm_score_2025": {"policy": "vllm_score_2025"},
    "vllm_score_2026": {"policy": "vllm_score_2026"},
    "balance_route H=0": {"policy": "balance_route", "horizon": 0},
    "balance_route H=20, oracle": {"policy": "balance_route", "horizon": 20, "lookahead": "oracle"},
    "plain program H=20, oracle": {"policy": "bfio", "horizon": 20, **PLAIN, "lookahead": "oracle"},
    "bfio, no look-ahead": {"policy": "bfio"},
    "bfio, survival curve": {"policy": "bfio", "lookahead": "survival"},
    "bfio, oracle missing 50 %": {"policy": "bfio", "lookahead": "miss:0.5"},
    "bfio, oracle missing 30 %": {"policy": "bfio", "lookahead": "miss:0.3"},
    "bfio, oracle missing 10 %": {"policy": "bfio", "lookahead": "miss:0.1"},
    "bfio, oracle": {"policy": "bfio", "lookahead": "oracle"},
}
NONE, ORACLE = "bfio, no look-ahead", "bfio, oracle"
GREEDY, GREEDY_ORACLE = "balance_route H=0", "balance_route H=20, oracle"


def options_of(trace: str, way: str, **changes: Any) -> DecodeOptions:
    """One of ``TRACE_NAMES`` and of ``WAYS`` under the paper's conditions, with changed options.

    These are G=16, B=72, pool 128 and 4,500 steps.
    """
    return DecodeOptions(**{**PAPER, "trace": trace, **WAYS[way], **changes})


def mean_output_tokens(trace: str) -> float:
    """Of a bundled trace's requests."""
    return fmean(row.output_tokens for row in load_trace(trace).requests)


def trace_tables(
    outcomes: Outcomes, first: str, rows: Mapping[str, Key], columns: Sequence[Column]
) -> list[Table]:
    """A table for each of ``TRACE_NAMES``, with rows by their keys behind the trace."""
    return [
        metric_table(
            name, first, [(row, outcomes[trace, *key]) for row, key in rows.items()], columns
        )
        for trace, name in TRACE_NAMES.items()
    ]
