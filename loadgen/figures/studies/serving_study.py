"""Whole engines behind one barrier: policies for workers that compute prompts and cache prefixes.

The figures to reach are those of a proof of concept with other conventions: a prefix counts as
cached from its request's admission on, every request is admitted at once, loads are tokens computed
so far, and the queue that llm-d's score sees is all requests of a worker. The rows "as the proof"
have the last two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from msgspec.structs import replace as changed

from loadgen.figures.claims import Claim, at_most, paired_at_most, within
from loadgen.figures.fingerprints import SERVING_FOLDERS
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Outcomes, Sample
from loadgen.figures.serving_cases import ServingCase
from loadgen.figures.study import SERVING, Study
from loadgen.figures.tables import Column, Table, shown
from loadgen.report.intervals import paired
from loadgen.simulator.serving.serving_command import ServingOptions
from router.core.policies.baselines import PerRequest
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.policies.prompts import kv_cost, prefix_score
from router.core.types import Assignment, Dispatch, Request, WorkerView

_PROMPT_HEAVY, _DECODE_HEAVY = "5e-3,9.5e-8,0,5e-5", "5e-3,9.5e-8,0,5e-6"
ALL_TOKENS, FEW_TOKENS, _WINDOW, DECODES = (
    "2,048 tokens a step",
    "512 tokens a step",
    "2,048 tokens in one of four steps",
    "t_p 5e-6, 16/s",
)
_BASE = ServingOptions(policy="barrier_time", trace="mooncake-synthetic", dispatch=Dispatch.INSTANT)
REGIMES: Mapping[str, ServingOptions] = MappingProxyType(
    {
        ALL_TOKENS: replace(_BASE, step_time=_PROMPT_HEAVY),
        DECODES: replace(_BASE, step_time=_DECODE_HEAVY, arrivals="poisson:16"),
        FEW_TOKENS: replace(_BASE, step_time=_PROMPT_HEAVY, batch_tokens=512),
        _WINDOW: replace(_BASE, step_time=_PROMPT_HEAVY, prefill_window="1/4"),
    }
)
OURS, JOINT = "barrier_time", "bfio"
_TUNED_COST, _TUNED_SCORE = "kv_cost, tuned", "prefix_score, tuned"
_AS_PROOF = ", as the proof"
_RULES = ("least_tokens", "prefix_score", "kv_cost", "lmetric", "least_prefill", "cache_aware")
# The rows of the smaller tables.
_SHORT = (
    *("lmetric", "least_prefill", OURS, JOINT),
    *(name + _AS_PROOF for name in ("least_tokens", "prefix_score", "kv_cost")),
)
# Found by ``tests/bench/tune_peer_rules.py`` on conversations.
_COST_WEIGHTS = {_PROMPT_HEAVY: 64.0, _DECODE_HEAVY: 8.0}
_SCORE_WEIGHTS = {_PROMPT_HEAVY: (1.0, 0.5, 2.0), _DECODE_HEAVY: (1.0, 2.0, 2.0)}


class AsProof(Policy):
    """A policy that sees loads and queues as the proof of concept counts them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def assign(
        self,
        waiting: Sequence[Request],
        workers: Sequence[WorkerView],
        known: Known = NOTHING,
    ) -> Sequence[Assignment]:
        seen = [
            changed(
                each,
                load_tokens=max(0, each.load_tokens - each.pending_prompt_tokens),
                waiting=each.requests,
            )
            for each in workers
        ]
        return self._policy.assign(waiting, seen, known)


def _as_proof(name: str, seed: int) -> Policy:
    return AsProof(POLICIES[name].make(PolicySettings(seed=seed)))


def _cost(weight: float, seed: int) -> Policy:
    return PerRequest(kv_cost(weight))


def _score(weights: tuple[float, float, float], seed: int) -> Policy:
    return PerRequest(prefix_score(seed, *weights))


@dataclass(frozen=True)
class _Figures:
    """Figures of the proof of concept, one seed: seconds and milliseconds."""

    ttft_s: float
    tpot_ms: float
    ttft_p99_s: float | None = None
    tpot_p99_ms: float | None = None


PROOF: Mapping[tuple[str, str], _Figures] = MappingProxyType(
    {
        (ALL_TOKENS, "least_tokens" + _AS_PROOF): _Figures(13.6, 127, 56),
        (ALL_TOKENS, "prefix_score" + _AS_PROOF): _Figures(1.40, 120, 6.6),
        (ALL_TOKENS, "kv_cost" + _AS_PROOF): _Figures(1.34, 117, 5.1),
        (ALL_TOKENS, "lmetric"): _Figures(1.37, 127, 9.5),
        (ALL_TOKENS, "least_prefill"): _Figures(0.71, 107, 3.5),
        (ALL_TOKENS, OURS): _Figures(0.70, 102, 3.4),
        (FEW_TOKENS, "least_tokens" + _AS_PROOF): _Figures(14.3, 41),
        (FEW_TOKENS, "prefix_score" + _AS_PROOF): _Figures(2.09, 40),
        (FEW_TOKENS, "kv_cost" + _AS_PROOF): _Figures(1.71, 37.5),
        (FEW_TOKENS, "lmetric"): _Figures(1.66, 42),
        (FEW_TOKENS, "least_prefill"): _Figures(0.83, 37.5),
        (FEW_TOKENS, OURS): _Figures(0.85, 36.2),
        (_WINDOW, "least_tokens" + _AS_PROOF): _Figures(13.9, 36),
        (_WINDOW, "prefix_score" + _AS_PROOF): _Figures(2.38, 38),
        (_WINDOW, "kv_cost" + _AS_PROOF): _Figures(1.78, 35),
        (_WINDOW, "lmetric"): _Figures(1.74, 39),
        (_WINDOW, "least_prefill"): _Figures(0.97, 35.5),
        (DECODES, "least_tokens" + _AS_PROOF): _Figures(0.33, 20.3, None, 31),
        (DECODES, "kv_cost" + _AS_PROOF): _Figures(0.13, 17.1, None, 26),
        (DECODES, "least_prefill"): _Figures(0.13, 19.7, None, 36),
        (DECODES, OURS): _Figures(0.11, 16.6, None, 26),
    }
)

TTFT, TTFT_P99 = Column("TTFT, s", "ttft_mean_s"), Column("p99, s", "ttft_p99_s", 1.0, 1)
TPOT = Column("TPOT, ms", "tpot_mean_s", 1e-3, 1)
TPOT_P99 = Column("p99, ms", "tpot_p99_s", 1e-3, 0)
HITS = Column("cached, %", "prefix_hit_share", 0.01, 1)
IDLE = Column("idle, %", "idle_share", 0.01, 1)
COLUMNS = (TTFT, TTFT_P99, TPOT, TPOT_P99, HITS, IDLE)


def _ways(options: ServingOptions) -> dict[str, ServingCase]:
    """The rows of a regime."""
    plain = {name: replace(options, policy=name) for name in (*_RULES, OURS)}
    plain[JOINT] = replace(options, policy=JOINT, dispatch=Dispatch.POOL)
    cases = {name: ServingCase((), each) for name, each in plain.items()}
    makers: dict[str, partial[Policy]] = {
        _TUNED_COST: partial(_cost, _COST_WEIGHTS[options.step_time]),
        _TUNED_SCORE: partial(_score, _SCORE_WEIGHTS[options.step_time]),
    }
    for name in ("least_tokens", "prefix_score", "kv_cost"):
        makers[name + _AS_PROOF] = partial(_as_proof, name)
    for way, make in makers.items():
        cases[way] = ServingCase((), plain[way.partition(",")[0]], make)
    if options.step_time == _PROMPT_HEAVY and options != REGIMES[ALL_TOKENS]:
        return {way: case for way, case in cases.items() if way in _SHORT}
    return cases


class ServingStudy(Study):
    title = "Engines that compute prompts and cache prefixes"
    conditions = (
        "Eight ranks behind one barrier, 128 slots and 1,000,000 KV tokens each, blocks of 512; "
        "the first 2,500 requests of mooncake-synthetic with their prefixes, Poisson arrivals at "
        "7/s, the first fifth left out. C = 5 ms, t_l = 9.5e-8 s, t_p = 5e-5 s, t_r = 0. bfio "
        "sends from the pool, all rules on arrival. The router learns the step time and is given "
        "exact hits."
    )
    code = SERVING_FOLDERS
    physics = SERVING
    regimes: ClassVar[Sequence[str]] = (ALL_TOKENS, DECODES)

    def measure(self, laboratory: Laboratory) -> Outcomes:
        return laboratory.run(
            [
                replace(case, key=(regime, way))
                for regime in self.regimes
                for way, case in _ways(REGIMES[regime]).items()
            ]
        )

    def tables(self, outcomes: Outcomes) -> list[Table]:
        header = ["policy", *(column.title for column in COLUMNS), "TTFT, TPOT over barrier_time"]
        return [
            Table(
                header,
                [
                    [
                        way,
                        *(column.cell(sample) for column in COLUMNS),
                        beside(sample, outcomes[regime, OURS]),
                    ]
                    for (of, way), sample in outcomes.items()
                    if of == regime
                ],
                f"{regime}, 5 seeds",
            )
            for regime in self.regimes
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for (regime, way), proof in PROOF.items():
            if regime not in self.regimes:
                continue
            sample, text = outcomes[regime, way], f"{regime}, {way}"
            yield within(f"{text}: TTFT mean, s", sample, TTFT.metric, proof.ttft_s, 0.1)
            yield within(f"{text}: TPOT, s", sample, TPOT.metric, proof.tpot_ms / 1e3, 0.1)
            if (p99_s := proof.ttft_p99_s) is not None:
                yield within(f"{text}: TTFT p99, s", sample, TTFT_P99.metric, p99_s, 0.25)
            if (p99_ms := proof.tpot_p99_ms) is not None:
                yield within(f"{text}: TPOT p99, s", sample, TPOT_P99.metric, p99_ms / 1e3, 0.25)
        for regime in [each for each in (ALL_TOKENS, DECODES) if each in self.regimes]:
            ours = outcomes[regime, OURS]
            for way in ("least_prefill", "kv_cost", _TUNED_COST, _TUNED_SCORE):
                for column in (TTFT, TPOT):
                    ratio = ours.ratio(outcomes[regime, way], column.metric)
                    yield at_most(f"{regime}: {column.title}, barrier_time / {way}", ratio, 1.03)
        for regime in self.regimes:
            ways = {way: sample for (of, way), sample in outcomes.items() if of == regime}
            yield from as_good_as_ours(regime, ways)
            yield from as_good_as_any(regime, ways)


def beside(sample: Sample, ours: Sample) -> str:
    """Paired differences of means, seed by seed."""
    return ", ".join(
        f"x {shown(replace(found, mean=found.mean + 1), 1.0, 2)}"
        for found in (
            paired(sample.each(column.metric), ours.each(column.metric)) for column in (TTFT, TPOT)
        )
    )


def as_good_as_ours(text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
    """Planned jointly, prompts come as early as by the rule on arrival, and tokens as fast."""
    for name, column in (("TTFT", TTFT), ("TTFT p99", TTFT_P99), ("TPOT", TPOT)):
        said = f"{text}: {name}, {JOINT} / {OURS}, upper end"
        yield paired_at_most(said, ways[JOINT], ways[OURS], column.metric, 1.02)


def as_good_as_any(text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
    """No rule is much better in one of the two means."""
    for name, column in (("TTFT", TTFT), ("TPOT", TPOT)):
        means = {way: sample.mean(column.metric) for way, sample in ways.items() if way != JOINT}
        best = min(means, key=means.__getitem__)
        ratio = ways[JOINT].ratio(ways[best], column.metric)
        yield at_most(f"{text}: {name}, {JOINT} / the best rule", ratio, 1.03, best)


class ServingBudgetsStudy(ServingStudy):
    title = "Fewer prompt tokens a step, and prompts in some steps only"
    regimes = (FEW_TOKENS, _WINDOW)

    def words(self, outcomes: Outcomes) -> str:
        return (
            "The proof admits a request at once, and looks up its prefix then. Here, as in vLLM, "
            "prompts wait for the tokens of a step, and find what others have computed meanwhile. "
            "So the rules that send prompts to busy ranks do better than in the proof."
        )
