"""Open arrivals: where token-aware routing suffices, and where it does not."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from loadgen.figures.cases import Case
from loadgen.figures.laboratory import Laboratory
from loadgen.figures.samples import Claim, Outcomes, Sample, at_most
from loadgen.figures.study import TRACE_NAMES, Study, mean_output_tokens, options_of, trace_tables
from loadgen.figures.tables import IMBALANCE, THROUGHPUT, TPOT, TTFT, TTFT_P99, Table
from loadgen.report.charts import draw_line, finish, legend, panels, save
from router.core.types import Dispatch

PERCENT = (60, 80, 95, 105, 110, 115)
BELOW = tuple(percent for percent in PERCENT if percent <= 95)
OVERLOAD = 110
TPOT_LOSS = 0.01
TTFT_SHARE: Mapping[str, float] = {"burstgpt": 0.1, "azure-conv": 0.25}
OURS = "bfio, pool"
_RIVAL = "least_tokens"
FORMS: Mapping[str, Mapping[str, Any]] = {
    OURS: {"policy": "bfio", "dispatch": Dispatch.POOL},
    "least_tokens, pool": {"policy": "least_tokens", "dispatch": Dispatch.POOL},
    "least_tokens, instant": {"policy": "least_tokens", "dispatch": Dispatch.INSTANT},
    "jsq, pool": {"policy": "jsq", "dispatch": Dispatch.POOL},
    "jsq, instant": {"policy": "jsq", "dispatch": Dispatch.INSTANT},
}


def capacity_per_s(outcomes: Outcomes, trace: str) -> float:
    """Requests per second that FCFS serves when the pool never runs empty."""
    return outcomes[trace, "capacity"].mean("throughput_tok_s") / mean_output_tokens(trace)


def _better(outcomes: Outcomes, trace: str, percent: int, metric: str) -> Sample:
    """Least-tokens in the form of dispatch with the lower metric."""
    forms = [outcomes[trace, str(percent), f"{_RIVAL}, {way.value}"] for way in Dispatch]
    return min(forms, key=lambda sample: sample.mean(metric))


class ArrivalsStudy(Study):
    title = "Open arrivals"
    conditions = (
        "Poisson arrivals, G=16, B=72, no look-ahead. Pool: the policy sees the 128 oldest of "
        "those that wait. Instant: each request is sent on arrival and queues in its engine. 100 % "
        "is what FCFS serves with a full pool. 4,500 steps (3,000 to 100 %) without the first 500."
    )

    def measure(self, laboratory: Laboratory) -> Outcomes:
        full = laboratory.run(
            [Case((trace, "capacity"), options_of(trace, "fcfs")) for trace in TRACE_NAMES]
        )
        cases = []
        for trace, percent in product(TRACE_NAMES, PERCENT):
            rate = round(capacity_per_s(full, trace) * percent / 100, 2)
            changes: dict[str, Any] = {"arrivals": f"poisson:{rate}", "pool": 128}
            if percent <= 100:
                changes["steps"] = 3000
            cases += [
                Case((trace, str(percent), form), options_of(trace, "fcfs", **settings, **changes))
                for form, settings in FORMS.items()
            ]
        return {**full, **laboratory.run(cases)}

    def tables(self, outcomes: Outcomes) -> list[Table]:
        columns = (TPOT, TTFT, TTFT_P99, THROUGHPUT, IMBALANCE)
        rows = {f"{load} %, {form}": (str(load), form) for load, form in product(PERCENT, FORMS)}
        tables = trace_tables(outcomes, "load, policy and dispatch", rows, columns)
        full = [f"{capacity_per_s(outcomes, trace):,.0f}" for trace in TRACE_NAMES]
        return [
            replace(table, title=f"{table.title}: {rate} requests/s are 100 %")
            for table, rate in zip(tables, full, strict=True)
        ]

    def claims(self, outcomes: Outcomes) -> Iterator[Claim]:
        for trace, name in TRACE_NAMES.items():
            for percent in BELOW:
                ours = outcomes[trace, str(percent), OURS]
                rival = _better(outcomes, trace, percent, TPOT.metric)
                text = f"{name}, {percent} % of FCFS capacity: TPOT, bfio / {_RIVAL}' better form"
                yield at_most(text, ours.ratio(rival, TPOT.metric), 1 + TPOT_LOSS)
            ours = outcomes[trace, str(OVERLOAD), OURS]
            rival = _better(outcomes, trace, OVERLOAD, TTFT.metric)
            text = f"{name}, {OVERLOAD} %: mean TTFT, bfio / {_RIVAL}' better form"
            seconds = f"{ours.mean(TTFT.metric):.3f} s, {rival.mean(TTFT.metric):.2f} s"
            yield at_most(text, ours.ratio(rival, TTFT.metric), TTFT_SHARE[trace], seconds)

    def draw(self, outcomes: Outcomes, path: Path) -> None:
        figure, every_axes = panels(2, rows=2, height=3.6)
        for column, (trace, name) in enumerate(TRACE_NAMES.items()):
            for row, metric in enumerate((TPOT, TTFT)):
                axes = every_axes[2 * row + column]
                for style, form in enumerate(FORMS):
                    samples = [outcomes[trace, str(percent), form] for percent in PERCENT]
                    draw_line(axes, metric.line(form, PERCENT, samples, style))
                finish(axes, "arrivals, % of FCFS capacity", metric.title, name)
            every_axes[2 + column].set_yscale("log")
        legend(every_axes[0])
        caption = "Poisson arrivals, G=16, B=72, no look-ahead, no prefill time"
        save(figure, path, f"simulated; {caption}")

    def words(self, outcomes: Outcomes) -> str:
        return (
            "Above its own capacity a policy's queue grows for as long as the run lasts: TTFT "
            "there is that of about a minute, and grows with it. Prefill takes no time here."
        )
