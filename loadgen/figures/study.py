"""The type of a study, and the studies' common conditions (arXiv 2601.17855, section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loadgen.figures.cases import trace_lengths
from loadgen.figures.claims import Claim
from loadgen.figures.fingerprints import DECODE_FOLDERS
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Outcomes
from loadgen.figures.tables import Table
from loadgen.report.origin import Document, Engines, origin
from loadgen.simulator.decode.decode_config import PAPER, DecodeConfig
from loadgen.simulator.decode.oracle import Knowledge

TRACE_NAMES: Mapping[str, str] = MappingProxyType(
    {"burstgpt": "BurstGPT lengths", "azure-conv": "Azure conversation lengths"}
)


@dataclass(frozen=True, slots=True)
class Study:
    """One question to the simulator.

    Attributes:
        title: subject of the study.
        conditions: conditions of the simulation, in a sentence or two.
        measure: function that has its cases run.
        tables: function from outcomes to tables.
        claims: function from outcomes to claims; a claim that fails is shown as missed.
        draw: function that writes a PNG to a path, and further ones beside it; None: no picture.
        words: interpretation of the figures and their limits; None: nothing to add.
        code: files and folders that decide its figures, beside its own file.
    """

    title: str
    conditions: str
    measure: Callable[[Laboratory], Outcomes]
    tables: Callable[[Outcomes], Sequence[Table]]
    claims: Callable[[Outcomes], Iterable[Claim]] = lambda _: ()
    draw: Callable[[Outcomes, Path], None] | None = None
    words: Callable[[Outcomes], str] | None = None
    code: Sequence[str] = DECODE_FOLDERS

    def origin(self) -> Document:
        """Origin of figures that are simulated now."""
        own = self.measure.__module__.replace(".", "/") + ".py"
        return origin(Engines.SIMULATED, (*self.code, own))


def _way(policy: str, **changes: Any) -> Mapping[str, Any]:
    return MappingProxyType({"policy": policy, **changes})


def oracle(missed: float = 0.0) -> Knowledge:
    """Knowledge of all ends, except those of a fraction of the requests."""
    return Knowledge("oracle", missed)


# The paper's objective as printed; the tie weight only breaks ties.
PLAIN: Mapping[str, float] = MappingProxyType(
    {"discount": 1.0, "tie_weight": 1e-9, "lead_tokens": 0.0}
)
# Policies with their information, by the names that tables and keys use.
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fcfs": _way("fcfs"),
        "jsq": _way("jsq"),
        "least_tokens": _way("least_tokens"),
        "vllm_score_2025": _way("vllm_score_2025"),
        "vllm_score_2026": _way("vllm_score_2026"),
        "balance_route H=0": _way("balance_route", horizon=0),
        "balance_route H=20, oracle": _way("balance_route", horizon=20, knowledge=oracle()),
        "plain program H=20, oracle": _way("bfio", horizon=20, **PLAIN, knowledge=oracle()),
        "bfio, no look-ahead": _way("bfio"),
        "bfio, survival curve": _way("bfio", knowledge=Knowledge("survival")),
        "bfio, oracle missing 50 %": _way("bfio", knowledge=oracle(0.5)),
        "bfio, oracle missing 30 %": _way("bfio", knowledge=oracle(0.3)),
        "bfio, oracle missing 10 %": _way("bfio", knowledge=oracle(0.1)),
        "bfio, oracle": _way("bfio", knowledge=oracle()),
    }
)
NONE, ORACLE = "bfio, no look-ahead", "bfio, oracle"
GREEDY, GREEDY_ORACLE = "balance_route H=0", "balance_route H=20, oracle"


def config(trace: str, way: str, **changes: Any) -> DecodeConfig:
    """A bundled trace under the paper's conditions: G=16, B=72, pool 128, 4,500 steps.

    Args:
        trace: name from ``TRACE_NAMES``.
        way: name from ``WAYS``.
        changes: fields of ``DecodeConfig`` to replace.
    """
    return DecodeConfig(**{**PAPER, "lengths": trace_lengths(trace), **WAYS[way], **changes})
