"""Whole engines that compute prompts and cache prefixes: ``bfio`` and the rules of other routers.

A study is a set of tables; a table has a row for each of its loads and ways to send them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from loadgen.figures.engine_cases import ServingCase
from loadgen.figures.fingerprints import SERVING_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, Sample, at_least, at_most, paired_at_most
from loadgen.figures.study import SERVING, Study
from loadgen.figures.tables import Column, Table, shown
from loadgen.figures.trials import SEEDS
from loadgen.report.intervals import paired
from loadgen.simulator.serving.serving_command import ServingOptions
from router.core.policies.baselines import PerRequest
from router.core.policies.policy_protocol import Policy
from router.core.policies.prompts import kv_cost, prefix_score
from router.core.types import Dispatch

OURS, JOINT = "barrier_time", "bfio"
_TUNED_COST, _TUNED_SCORE = "kv_cost, tuned", "prefix_score, tuned"
TTFT, TTFT_P99 = Column("TTFT, s", "ttft_mean_s"), Column("p99, s", "ttft_p99_s", 1.0, 1)
TPOT = Column("TPOT, ms", "tpot_mean_s", 1e-3, 1)
_THROUGHPUT = Column("tok/s", "throughput_tok_s", 1.0, 0)
_COLUMNS = (
    *(TTFT, TTFT_P99, TPOT, Column("p99, ms", "tpot_p99_s", 1e-3, 0)),
    *(Column("cached, %", "prefix_hit_share", 0.01, 1), Column("idle, %", "idle_share", 0.01, 1)),
    _THROUGHPUT,
)

_TOKEN_S = 9.5e-8  # t_l
_PROMPT_HEAVY, _DECODE_HEAVY = "5e-3,9.5e-8,0,5e-5", "5e-3,9.5e-8,0,5e-6"
_BASE = ServingOptions(
    trace="mooncake-synthetic", step_time=_PROMPT_HEAVY, dispatch=Dispatch.INSTANT
)
_DECODES = replace(_BASE, step_time=_DECODE_HEAVY, arrivals="poisson:16")
_ALL_TOKENS, _FEW_TOKENS = "2,048 tokens a step", "512 tokens a step"
_LENGTHS = "Azure conversation lengths, no prefixes"


def _cost(weight: float, seed: int) -> Policy:
    return PerRequest(kv_cost(weight))


def _score(weights: tuple[float, float, float], seed: int) -> Policy:
    return PerRequest(prefix_score(seed, *weights))


# By the step time, as ``tests/bench/tune_peer_rules.py`` found them on conversations.
_TUNED: Mapping[str, Mapping[str, partial[Policy]]] = {
    _TUNED_COST: {_PROMPT_HEAVY: partial(_cost, 64.0), _DECODE_HEAVY: partial(_cost, 8.0)},
    _TUNED_SCORE: {
        _PROMPT_HEAVY: partial(_score, (1.0, 0.5, 2.0)),
        _DECODE_HEAVY: partial(_score, (1.0, 2.0, 2.0)),
    },
}


def _at_rates(options: ServingOptions, *rates: float) -> Mapping[str, ServingOptions]:
    return {f"{rate:g}/s": replace(options, arrivals=f"poisson:{rate:g}") for rate in rates}


class ServingStudy(Study):
    """One comparison of ways; ``bfio`` sends from the pool, all rules on arrival."""

    code = SERVING_FOLDERS
    physics = SERVING
    # By the tables' titles, what the engines are and what arrives, by name of the load.
    settings: ClassVar[Mapping[str, Mapping[str, ServingOptions]]]
    ways: ClassVar[Sequence[str]] = (JOINT, OURS, "least_prefill", "kv_cost")

    def seeds(self, load: str) -> int:
        """Number of repetitions at a load."""
        return SEEDS

    def cases(self) -> Iterator[ServingCase]:
        for setting, load, options in self._loads():
            for way in self.ways:
                make = _TUNED[way][options.step_time] if way in _TUNED else None
                dispatch = Dispatch.POOL if way == JOINT else Dispatch.INSTANT
                placed = replace(options, policy=way.partition(",")[0], dispatch=dispatch)
                yield ServingCase((setting, load, way), placed, make, seeds=self.seeds(load))

    def tables(self, outcomes: Outcomes) -> list[Table]:
        titles = [column.title for column in _COLUMNS]
        header = ["load, policy", *titles, "TTFT, TPOT over barrier_time"]
        tables = []
        for setting, loads in self.settings.items():
            rows = []
            for load in loads:
                ways = self._ways(outcomes, setting, load)
                for way, sample in ways.items():
                    cells = [column.cell(sample) for column in _COLUMNS]
                    rows.append([f"{load}, {way}", *cells, _beside(sample, ways[OURS])])
            tables.append(Table(header, rows, setting))
        return tables

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for setting, load, _ in self._loads():
            ways = self._ways(outcomes, setting, load)
            yield from self.claims_at(load, f"{setting}, {load}", ways)

    def claims_at(self, load: str, text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
        """Claims at one load: prompts come as early as by any rule, and tokens as fast."""
        for name, column in (("TTFT", TTFT), ("TTFT p99", TTFT_P99), ("TPOT", TPOT)):
            said = f"{text}: {name}, {JOINT} / {OURS}, upper end"
            yield paired_at_most(said, ways[JOINT], ways[OURS], column.metric, 1.02)
        yield from _as_good_as_any(text, ways)

    def _loads(self) -> Iterator[tuple[str, str, ServingOptions]]:
        for setting, loads in self.settings.items():
            for load, options in loads.items():
                yield setting, load, options

    def _ways(self, outcomes: Outcomes, setting: str, load: str) -> Mapping[str, Sample]:
        return {way: outcomes[setting, load, way] for way in self.ways}


def _beside(sample: Sample, ours: Sample) -> str:
    """Paired ratios of means, seed by seed."""
    metrics = (TTFT.metric, TPOT.metric)
    ratios = (paired(sample.each(metric), ours.each(metric)) for metric in metrics)
    return ", ".join(f"x {shown(replace(each, mean=each.mean + 1), 1.0, 2)}" for each in ratios)


def _as_good_as_any(text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
    """No rule is much better in one of the two means."""
    for name, column in (("TTFT", TTFT), ("TPOT", TPOT)):
        means = {way: sample.mean(column.metric) for way, sample in ways.items() if way != JOINT}
        best = min(means, key=means.__getitem__)
        ratio = ways[JOINT].ratio(ways[best], column.metric)
        yield at_most(f"{text}: {name}, {JOINT} / the best rule", ratio, 1.03, best)


class ServingRulesStudy(ServingStudy):
    title = "Engines that compute prompts and cache prefixes"
    conditions = (
        "Eight ranks behind one barrier, 128 slots and 1,000,000 KV tokens each, blocks of 512; "
        "the first 2,500 requests of mooncake-synthetic with their prefixes, Poisson arrivals, the "
        "first fifth left out. C = 5 ms, t_l = 9.5e-8 s, t_p = 5e-5 s, t_r = 0. bfio sends from "
        "the pool, all rules on arrival. The router learns the step time and is given exact hits."
    )
    settings: ClassVar = {_ALL_TOKENS: _at_rates(_BASE, 7), "t_p 5e-6": _at_rates(_DECODES, 16)}
    ways = (
        *("least_tokens", "prefix_score", "kv_cost", "lmetric", "least_prefill", "cache_aware"),
        *(OURS, JOINT, _TUNED_COST, _TUNED_SCORE),
    )

    def claims_at(self, load: str, text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
        for way in ("least_prefill", "kv_cost", _TUNED_COST, _TUNED_SCORE):
            for column in (TTFT, TPOT):
                ratio = ways[OURS].ratio(ways[way], column.metric)
                yield at_most(f"{text}: {column.title}, {OURS} / {way}", ratio, 1.03)
        yield from super().claims_at(load, text, ways)


class ServingBudgetsStudy(ServingStudy):
    title = "Fewer prompt tokens a step, and prompts in some steps only"
    conditions = "As in the study above, with t_p = 5e-5 s."
    settings: ClassVar = {
        _FEW_TOKENS: _at_rates(replace(_BASE, batch_tokens=512), 7),
        "2,048 tokens in one of four steps": _at_rates(replace(_BASE, prefill_window="1/4"), 7),
    }
    ways = ("lmetric", "least_prefill", OURS, JOINT)


class ServingRatesStudy(ServingStudy):
    title = "Prompts planned jointly, or sent on arrival, by rate"
    conditions = (
        "As in the studies above, from little load to more than is computed. Ten seeds at 3.5 and "
        "5/s, where chance is worth a few percent."
    )
    OVERLOAD = "11/s"
    settings: ClassVar = {
        _ALL_TOKENS: _at_rates(_BASE, 3.5, 5, 7, 8.5, 11),
        _FEW_TOKENS: _at_rates(replace(_BASE, batch_tokens=512), 3.5, 5, 7, 8.5, 11),
        "t_p 5e-6": _at_rates(_DECODES, 16),
    }

    def seeds(self, load: str) -> int:
        return 10 if load in ("3.5/s", "5/s") else SEEDS

    def claims_at(self, load: str, text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
        if load != self.OVERLOAD:
            yield from super().claims_at(load, text, ways)
            return
        said = f"{text}: TTFT, {JOINT} / {OURS}, upper end"
        yield paired_at_most(said, ways[JOINT], ways[OURS], TTFT.metric, 0.85)
        yield from _as_good_as_any(text, ways)


class ServingTrafficStudy(ServingStudy):
    title = "Prompts planned jointly, without prefixes and where clients wait"
    conditions = (
        "As in the studies above, 2,048 tokens a step. Azure conversation lengths (azure-conv) "
        "share no prefixes; 70, 95 and 115 % of what rules on arrival serve. In sessions a prompt "
        "that continues another comes 10 s after its answer (mean, exponential): 122 of 2,500 do. "
        "A client sends its next request when it has the answer to the last. With 32 slots a rank "
        "more requests wait than there are free slots: with prefixes (mooncake-synthetic) the plan "
        "decides all the same, without them the program."
    )
    settings: ClassVar = {
        # Rules on arrival reach 39 requests a second.
        _LENGTHS: {
            "70 %": replace(_BASE, trace="azure-conv", arrivals="poisson:27"),
            "95 %": replace(_BASE, trace="azure-conv", arrivals="poisson:37"),
            "115 %": replace(_BASE, trace="azure-conv", arrivals="poisson:45"),
        },
        "clients that wait for answers": {
            "5 sessions/s": replace(_BASE, think=10.0, arrivals="poisson:5"),
            "128 clients": replace(_BASE, arrivals="closed:128"),
        },
        "32 slots a rank": {
            "prefixes, 384 clients": replace(_BASE, arrivals="closed:384", slots=32),
            "Azure, 45/s": replace(_BASE, trace="azure-conv", arrivals="poisson:45", slots=32),
        },
    }

    def claims_at(self, load: str, text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
        yield from super().claims_at(load, text, ways)
        if load in self.settings[_LENGTHS]:
            ours, theirs = ways[JOINT], ways["least_prefill"]
            said = f"{text}: {{}}, {JOINT} / least_prefill".format
            yield paired_at_most(said("TPOT"), ours, theirs, TPOT.metric, 1.0)
            ratio = ours.ratio(theirs, _THROUGHPUT.metric)
            yield at_least(said("throughput"), ratio, 1.0)


class ServingAloneStudy(ServingStudy):
    title = "Prompts planned jointly, before replicas that step alone"
    conditions = (
        "As in the studies above, without a barrier, with the first 800 requests and three seeds."
    )
    settings: ClassVar = {
        "without a barrier": {
            "t_p 5e-5, 7/s": replace(_BASE, barrier=False, requests=800),
            "t_p 5e-6, 16/s": replace(_DECODES, barrier=False, requests=800),
        }
    }
    ways = (*ServingStudy.ways, "prefix_score")

    def seeds(self, load: str) -> int:
        return 3

    def claims_at(self, load: str, text: str, ways: Mapping[str, Sample]) -> Iterator[Claim]:
        return _as_good_as_any(text, ways)


class ServingCostsStudy(ServingStudy):
    title = "What a prompt token costs, and which rule pays"
    conditions = (
        "As in the studies above, with t_l = 9.5e-8 s and, by t_p / t_l, a rate at which prompts "
        "and outputs together take some 60 % of the ranks' time: a request's prompt, without what "
        "is cached, has some 9,000 tokens; its 186 steps read 13,000."
    )
    settings: ClassVar = {
        "by t_p / t_l": {
            f"{ratio:,}, {rate:g}/s": replace(
                _BASE,
                step_time=f"5e-3,{_TOKEN_S:g},0,{ratio * _TOKEN_S:g}",
                arrivals=f"poisson:{rate:g}",
            )
            for ratio, rate in ((10, 20), (100, 15), (1000, 4.4), (10_000, 0.55))
        }
    }
    ways = (JOINT, OURS, "least_tokens")

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        return iter(())
