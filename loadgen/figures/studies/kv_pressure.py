"""Admission under KV pressure: evictions, throughput and latency by policy."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from loadgen.figures.admission_cases import AdmissionCase
from loadgen.figures.fingerprints import ADMISSION_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, at_least, at_most
from loadgen.figures.study import COMPUTING, Study
from loadgen.figures.tables import Column, Table, metric_table
from loadgen.report.intervals import Estimate, paired
from loadgen.simulator.admission.admission_command import AdmissionOptions

EVICTIONS = Column("evictions per 1,000", "evictions_per_1k", 1.0, 1)
TOKENS = Column("throughput, tok/s", "throughput_tok_s", 1.0, 0)
LATENCY = Column("latency mean, s", "latency_mean_s")
P99 = Column("latency p99, s", "latency_p99_s", 1.0, 1)
FIRST = Column("TTFT mean, s", "ttft_mean_s")
USED = Column("KV used, mean %", "kv_used_mean", 0.01, 1)
COLUMNS = (EVICTIONS, TOKENS, LATENCY, P99, FIRST, USED)

ENGINE = "vLLM's order"
CONSTANT, DEFAULT = "headroom, 5 % constant", "headroom (default)"
_WAYS: Mapping[str, AdmissionOptions] = MappingProxyType(
    {
        ENGINE: AdmissionOptions("off"),
        "vLLM's order, watermark 5 %": AdmissionOptions("off", watermark=0.05),
        CONSTANT: AdmissionOptions("headroom", '{"adaptive": false}'),
        DEFAULT: AdmissionOptions("headroom"),
        "headroom, 20 % constant": AdmissionOptions(
            "headroom", '{"headroom": 0.2, "adaptive": false}'
        ),
        "wait": AdmissionOptions("wait"),
        "nested_wait": AdmissionOptions("nested_wait"),
        "memory_checked, lengths seen": AdmissionOptions(
            "memory_checked", predict="quantile:0.5", margin=0.05
        ),
        "memory_checked, true lengths": AdmissionOptions("memory_checked"),
    }
)
_CHAT, _CALM, _REASON = "chat70b, 11/s", "chat70b, 8/s", "reason32b, 1.5/s"
_LOADS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {_CHAT: ("chat70b", 11.0), _CALM: ("chat70b", 8.0), _REASON: ("reason32b", 1.5)}
)
_SEEDS = 10
# Settings of arXiv 2502.07115, section 7: number of requests and rates.
_PAPER_REQUESTS = 10_000
_RATES = (50, 10)
_EXACT, _ERRING, _STARVING = "true lengths", "sigma 0.8, margin 10 %", "true lengths, no ageing"
_TOLD: Mapping[str, AdmissionOptions] = MappingProxyType(
    {
        ENGINE: AdmissionOptions("off"),
        DEFAULT: AdmissionOptions("headroom"),
        _EXACT: AdmissionOptions("memory_checked"),
        _STARVING: AdmissionOptions("memory_checked", '{"ageing": 0}'),
        "sigma 0.8": AdmissionOptions("memory_checked", predict="lognormal:0.8"),
        _ERRING: AdmissionOptions("memory_checked", predict="lognormal:0.8", margin=0.1),
    }
)
_CALM_SHARE = 0.02


def beside(outcomes: Outcomes, load: str, way: str, column: Column) -> Estimate:
    """Relative difference from vLLM's order, seed by seed."""
    ours, engine = outcomes[load, way], outcomes[load, ENGINE]
    return paired(ours.each(column.metric), engine.each(column.metric))


def _spread(found: Estimate) -> str:
    return "" if found.half_width is None else f"± {found.half_width:.1%}"


class KvPressureStudy(Study):
    title = "Admission under KV pressure"
    conditions = (
        "One engine, continuous batching with chunked prefill, 256 sequences, 2,048 tokens a step; "
        "evicted requests keep their tokens and their KV is computed again, last in first out. "
        "chat70b: the memory of arXiv 2502.07115, 16,492 tokens, 8,000 requests (10,000 for MC-SF) "
        "of 41 prompt and 85 output tokens on average; reason32b: 120,000 tokens, 3,000 requests "
        "of 320 and 1,300, a deep overload. Poisson arrivals, every request counted to its end, "
        "the first 15 % of the arrivals left out."
    )
    code = ADMISSION_FOLDERS
    physics = COMPUTING

    def cases(self) -> Iterator[AdmissionCase]:
        for (load, (scenario, rate)), (way, options) in product(_LOADS.items(), _WAYS.items()):
            placed = replace(options, scenario=scenario, rate=rate)
            yield AdmissionCase((load, way), placed, seeds=_SEEDS)
        for rate, (told, options) in product(_RATES, _TOLD.items()):
            placed = replace(options, rate=float(rate), requests=_PAPER_REQUESTS)
            yield AdmissionCase((f"MC-SF, {rate}/s", told), placed)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        loads = [(load, f"{load}, {_SEEDS} seeds", _WAYS) for load in _LOADS]
        loads += [
            (f"MC-SF, {rate}/s", f"MC-SF: chat70b, {rate}/s, 5 seeds", _TOLD) for rate in _RATES
        ]
        return [
            metric_table(title, "policy", [(way, outcomes[load, way]) for way in ways], COLUMNS)
            for load, title, ways in loads
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for load, gain, tail in ((_CHAT, 0.05, 0.2), (_REASON, 0.04, 0.15)):
            for way in (CONSTANT, DEFAULT):
                fewer = outcomes[load, way].ratio(outcomes[load, ENGINE], EVICTIONS.metric)
                yield at_most(f"{load}, {way}: evictions / vLLM's order's", fewer, 0.1)
                more = beside(outcomes, load, way, TOKENS)
                yield at_least(f"{load}, {way}: gain in throughput", more.mean, gain, _spread(more))
                shorter = beside(outcomes, load, way, P99)
                text = f"{load}, {way}: latency p99 beside vLLM's order"
                yield at_most(text, shorter.mean, -tail, _spread(shorter))
        for way in (CONSTANT, DEFAULT):
            for column, what in ((TOKENS, "throughput"), (LATENCY, "mean latency")):
                off = beside(outcomes, _CALM, way, column).mean
                text = f"{_CALM}, {way}: {what}, difference from vLLM's order"
                yield at_most(text, abs(off), _CALM_SHARE)
        for rate, ratio in zip(_RATES, (3, 2), strict=True):
            load = f"MC-SF, {rate}/s"
            exact = outcomes[load, _EXACT]
            yield at_most(f"{load}, {_EXACT}: most evictions", max(exact.each(EVICTIONS.metric)), 0)
            longer = outcomes[load, ENGINE].ratio(exact, LATENCY.metric)
            yield at_least(f"{load}: mean latency, vLLM's order / {_EXACT}", longer, ratio)
            erring = outcomes[load, _ERRING].mean(EVICTIONS.metric)
            yield at_most(f"{load}, {_ERRING}: evictions per 1,000", erring, 5)

    def words(self, outcomes: Outcomes) -> str:
        return (
            "Overload figures depend on the number of requests: the queue grows for as long as "
            "they come. MC-SF at 10/s: vLLM's order becomes critical just there, so its mean "
            "latency, and with it the ratio, differs much from seed to seed."
        )
