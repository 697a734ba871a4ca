"""WAIT and Nested WAIT, as printed and live: arXiv 2504.11320, Example 2 and section 6."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine_patches.admission.theory.fluid import Flow
from engine_patches.admission.theory.thresholds import equal_segments, least_nested, least_wait
from loadgen.figures.engine_cases import AdmissionCase
from loadgen.figures.fingerprints import ADMISSION_FOLDERS
from loadgen.figures.samples import Claim, Outcomes, at_least, at_most
from loadgen.figures.studies.kv_pressure import EVICTIONS, LATENCY, P99, TOKENS
from loadgen.figures.study import COMPUTING, Study
from loadgen.figures.tables import Column, Table, metric_table
from loadgen.simulator.admission.admission_command import AdmissionOptions
from loadgen.simulator.admission.admission_simulation import EvictionKind, Order
from loadgen.simulator.admission.scenarios import SCENARIOS, TypedSource

_MOST_USED = Column("KV used, most %", "kv_used_max", 0.01, 1)
_COLUMNS = (TOKENS, LATENCY, P99, EVICTIONS, _MOST_USED)
_COMPLETIONS = Column("completions per iteration", "throughput_req_s", 1.0, 3)
_SLOTS = 256

_EXAMPLE = "example2"
_FCFS, _CAP, _PRINTED_CAP = "FCFS", "wait, at most 4 enter", "WAIT as printed, n = 4"
_AS_EXAMPLE = AdmissionOptions("off", scenario=_EXAMPLE, eviction=EvictionKind.RESTART)
_EXAMPLE_WAYS: Mapping[str, AdmissionOptions] = {
    _FCFS: _AS_EXAMPLE,
    _CAP: replace(_AS_EXAMPLE, policy="wait", settings='{"thresholds": [4], "headroom": 0}'),
    _PRINTED_CAP: replace(
        _AS_EXAMPLE, policy="wait", settings='{"thresholds": [4], "strict": true}'
    ),
}


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting of section 6."""

    scenario: str
    rates: tuple[float, ...]  # arrivals per second, as printed
    calm: float  # half of the stable rate
    requests: int  # with so many, the pauses at the end of a run hardly count
    nested: tuple[int, ...] = ()  # printed ratio of the thresholds; empty: lengths are known

    def flows(self, rate: float) -> list[Flow]:
        """Request types with their rates."""
        source = SCENARIOS[self.scenario].source
        assert isinstance(source, TypedSource)
        whole = sum(kind.share for kind in source.types)
        return [
            Flow(rate * kind.share / whole, kind.prompt_tokens, kind.decode_steps)
            for kind in source.types
        ]

    @property
    def segments(self) -> list[int]:
        """Output lengths at which the types end, except the last."""
        return [flow.decode_steps + 1 for flow in self.flows(1.0)][:-1]


_SETTINGS = (
    _Setting("vidur8b_low", (2000,), 400, 50_000),
    _Setting("vidur8b_high", (12_000,), 34, 10_000),
    _Setting("vidur8b_nested4", (300,), 50, 10_000, (15, 14, 12, 8)),
    _Setting("vidur8b_lmsys10", (55, 550), 34, 10_000, (66, 43, 32, 24, 17, 11, 7, 4, 2, 1)),
)
_LOADS = tuple((each, rate) for each in _SETTINGS for rate in (*each.rates, each.calm))
_PROMPTS_FIRST, _SARATHI = "vLLM before V1 (prompts first)", "Sarathi"
_RIVALS: Mapping[str, AdmissionOptions] = {
    _PROMPTS_FIRST: AdmissionOptions("off", order=Order.PREFILL_FIRST),
    _SARATHI: AdmissionOptions("off", order=Order.SARATHI),
    "vLLM's order": AdmissionOptions("off"),
}
_BY_RULE, _BY_FLUID = "as printed, thresholds by B", "as printed, fluid thresholds"
_LIVE = "live, measured"


def _ways(setting: _Setting, rate: float) -> dict[str, AdmissionOptions]:
    make = _nested if setting.nested else _known
    return {
        **_RIVALS,
        **dict(make(setting, rate)),
        "headroom (default)": AdmissionOptions("headroom"),
    }


def _known(setting: _Setting, rate: float) -> Iterator[tuple[str, AdmissionOptions]]:
    """WAIT: types are known at arrival."""
    flows = setting.flows(rate)
    by_rule = [max(1, round(_SLOTS * flow.rate / rate / (flow.decode_steps + 1))) for flow in flows]
    cost = SCENARIOS[setting.scenario].cost
    yield _BY_RULE, _by(by_rule, strict=True)
    fluid = least_wait(flows, cost)
    if fluid is not None:
        yield _BY_FLUID, _by(fluid, strict=True)
    yield "live, thresholds by B", _by(by_rule)
    yield _LIVE, AdmissionOptions("wait")


def _nested(setting: _Setting, rate: float) -> Iterator[tuple[str, AdmissionOptions]]:
    """Nested WAIT: types show as requests end."""
    segments = equal_segments(setting.flows(rate), len(setting.nested))
    stages = [segment.last_stage - segment.first_stage + 1 for segment in segments]
    batch = sum(n * count for n, count in zip(setting.nested, stages, strict=True))
    by_rule = [max(1, round(_SLOTS * n / batch)) for n in setting.nested]
    yield _BY_RULE, _by(by_rule, segments=setting.segments, strict=True)
    fluid = least_nested(segments, SCENARIOS[setting.scenario].cost)
    if fluid is not None:
        yield _BY_FLUID, _by(fluid, segments=setting.segments, strict=True)
    yield _LIVE, AdmissionOptions("nested_wait")


def _by(thresholds: Sequence[int], **more: object) -> AdmissionOptions:
    policy = "nested_wait" if "segments" in more else "wait"
    return AdmissionOptions(policy, json.dumps({"thresholds": list(thresholds), **more}))


class WaitStudy(Study):
    title = "WAIT and Nested WAIT (arXiv 2504.11320, Example 2 and section 6)"
    conditions = (
        "Llama-3-8B on an A100 by a linear fit of its step time, 427,000 KV tokens, batches of "
        "256 requests; 10,000 requests (low demand 50,000), to the end of the last. By B: "
        "n_j = B rho_j / (l'_j + 1), and for Nested WAIT the printed ratio scaled to B in all "
        "stages, at least 1. Fluid: the least that satisfy (11) or (12), where the load is "
        "stable. As printed: requests that run pause until enough new ones wait, here for half a "
        "minute at most. Live: entries are capped, nobody pauses."
    )
    code = ADMISSION_FOLDERS
    physics = COMPUTING

    def cases(self) -> Iterator[AdmissionCase]:
        for way, options in _EXAMPLE_WAYS.items():
            yield AdmissionCase((_EXAMPLE, way), options, seeds=1)
        for setting, rate in _LOADS:
            scenario, requests = setting.scenario, setting.requests
            for way, options in _ways(setting, rate).items():
                placed = replace(options, scenario=scenario, rate=float(rate), requests=requests)
                yield AdmissionCase((scenario, f"{rate:g}", way), placed)

    def tables(self, outcomes: Outcomes) -> list[Table]:
        example = [(way, outcomes[_EXAMPLE, way]) for way in _EXAMPLE_WAYS]
        tables = [metric_table("Example 2", "policy", example, (_COMPLETIONS, LATENCY))]
        for setting, rate in _LOADS:
            key = (setting.scenario, f"{rate:g}")
            rows = [(way, outcomes[*key, way]) for way in _ways(setting, rate)]
            printed = "as printed" if rate in setting.rates else "half of what is stable"
            title = f"{setting.scenario}, {rate:,g} requests/s ({printed})"
            tables.append(metric_table(title, "policy", rows, _COLUMNS))
        return tables

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        fcfs = outcomes[_EXAMPLE, _FCFS].mean(_COMPLETIONS.metric)
        yield at_most("Example 2: FCFS, distance from 3 completions", abs(fcfs - 3), 0.02)
        for way in (_CAP, _PRINTED_CAP):
            found = outcomes[_EXAMPLE, way].mean(_COMPLETIONS.metric)
            yield at_least(f"Example 2: {way}, completions per iteration", found, 3.98)
        for setting, rate in _LOADS:
            if rate not in setting.rates:
                continue
            key = (setting.scenario, f"{rate:g}")
            rivals = [outcomes[*key, way] for way in (_PROMPTS_FIRST, _SARATHI)]
            best = max(rivals, key=lambda sample: sample.mean(TOKENS.metric))
            ratio = outcomes[*key, _BY_RULE].ratio(best, TOKENS.metric)
            text = "throughput, WAIT as printed / the better of vLLM before V1 and Sarathi"
            yield at_least(f"{setting.scenario}, {rate:,g}/s: {text}", ratio, 1)
