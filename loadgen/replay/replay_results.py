"""Measurements of a replay as one JSON-able report: keys of ``vllm bench serve``, and our own.

The module is pure: results of requests in, figures out. Wall seconds are divided by the time scale
only here, so every reported time is in engine seconds.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from loadgen.traces.request_classes import ALL, RequestClass
from router.core.errors import ConfigError
from router.core.step_time import number_in

TOO_MANY_REQUESTS = 429
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

Report = dict[str, object]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One ended request; times in wall seconds since the start of the run."""

    prompt_tokens: int
    output_tokens: int  # tokens in the engine's usage event
    scheduled_s: float  # time at which it was due; latency counts from here
    sent_s: float
    first_s: float | None  # arrival of the first content; None if there was none
    end_s: float
    gaps_s: Sequence[float] = ()  # gaps between consecutive arrivals of content
    status: int | None = 200  # HTTP status, None without an answer
    # Error message; None for a complete request with the right number of tokens.
    error: str | None = None
    # Tokens of the prompt that the engine had cached; None: it told of none.
    cached_tokens: int | None = None
    class_: RequestClass = ALL


@dataclass(frozen=True, slots=True)
class Window:
    """A span of the run in wall seconds since its start."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that happened to the requests of one replay."""

    results: Sequence[RequestResult]  # result of every ended request, failed or not
    planned: int
    sent: int  # sent requests; those without a result never ended
    whole: Window  # span from the first sending to the last end
    # Span from the end of the warm-up to the last sending; None for too short a run.
    steady: Window | None
    interrupted: bool = False
    start_unix_s: float = 0.0  # wall clock (seconds since 1970) at the start


def parse_goodput(text: str | None) -> dict[str, float]:
    """Parse bounds such as ``ttft:500,tpot:50`` (milliseconds), or raise ConfigError."""
    bounds = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition(":")
        if name not in GOODPUT_METRICS:
            raise ConfigError(
                f"--goodput: unknown metric {name!r}; write ttft:MS,tpot:MS,e2el:MS or some of them"
            )
        bounds[name] = number_in(value)
        if not 0 < bounds[name] < math.inf:
            raise ConfigError(
                f"--goodput: {value!r} is no number of milliseconds; write {name}:500"
            )
    return bounds


def summarize(
    run: Run, conditions: Report, scale: float, goodput_ms: Mapping[str, float]
) -> Report:
    """Report on one run at ``scale`` wall seconds per engine second, conditions first.

    It lacks the cluster's figures. A good request keeps ``goodput_ms`` of ``GOODPUT_METRICS``, or
    where there are classes, its targets.
    """
    done = [result for result in run.results if result.error is None]
    errors = Counter(result.error for result in run.results if result.error is not None)
    gaps_s = (gap_s for result in done for gap_s in result.gaps_s)
    prompt_tokens = sum(result.prompt_tokens for result in done)
    # Engines tell of cached tokens only if asked to.
    cached = [result.cached_tokens for result in done if result.cached_tokens is not None]
    return {
        **conditions,
        "time_scale": scale,
        "time_unit": "engine seconds (wall seconds / time_scale)",
        "num_prompts": run.planned,
        "sent": run.sent,
        "completed": len(done),
        "failed": len(run.results) - len(done),
        "rejected": sum(result.status == TOO_MANY_REQUESTS for result in run.results),
        "lost": run.sent - len(run.results),
        "interrupted": run.interrupted,
        "errors": dict(errors.most_common()),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": sum(result.output_tokens for result in done),
        "cached_prompt_share": ratio(sum(cached), prompt_tokens) if cached else None,
        **_rates(run, done, scale, goodput_ms),
        **_spread("ttft", map(_ttft_s, done), scale),
        **_spread("tpot", (_tpot_s(each) for each in done if each.output_tokens > 1), scale),
        **_spread("itl", gaps_s, scale),
        "itl_unit": "between arrivals of content; one arrival may carry several tokens",
        **_spread("e2el", map(_e2el_s, done), scale),
        **_spread("lateness", (each.sent_s - each.scheduled_s for each in run.results), scale),
        "mean_admitted_prompt_tokens": _mean(each.prompt_tokens for each in done),
        "steady": _steady(done, run.steady, scale),
    }


def shortfall(report: Mapping[str, object]) -> str:
    """What became of the requests, in a line for a report that lacks some."""
    errors = cast(Mapping[str, int], report["errors"])
    ends = [f"{count} x {message}" for message, count in errors.items()]
    if report["interrupted"]:
        unsent = cast(int, report["num_prompts"]) - cast(int, report["sent"])
        ends.append(f"interrupted with {report['lost']} open and {unsent} unsent")
    return f"{report['completed']} of {report['num_prompts']} completed: {'; '.join(ends)}"


def _rates(
    run: Run, done: Sequence[RequestResult], scale: float, goodput_ms: Mapping[str, float]
) -> Report:
    duration_s = run.whole.length_s / scale
    output_tokens = sum(result.output_tokens for result in done)
    total_tokens = output_tokens + sum(result.prompt_tokens for result in done)
    good, by_class = None, _met_by_class(run.results, scale)
    if by_class:
        good = sum(map(sum, by_class.values()))
    elif goodput_ms:
        good = sum(
            all(
                _MEASURED_S[name](result) / scale * 1000 <= bound_ms
                for name, bound_ms in goodput_ms.items()
            )
            for result in done
        )
    return {
        "duration": duration_s,
        "wall_duration_s": run.whole.length_s,
        "start_unix_s": run.start_unix_s,
        "request_throughput": ratio(len(done), duration_s),
        "request_goodput": None if good is None else ratio(good, duration_s),
        "goodput_ms": dict(goodput_ms),
        "met_by_class": {name: statistics.fmean(met) for name, met in by_class.items()},
        "output_throughput": ratio(output_tokens, duration_s),
        "total_token_throughput": ratio(total_tokens, duration_s),
    }


def _met_by_class(results: Iterable[RequestResult], scale: float) -> dict[str, list[bool]]:
    """Whether each ended request of a named class has met its targets; a failed one has not."""
    by_class: dict[str, list[bool]] = {}
    for each in results:
        met, wanted = each.error is None, each.class_.targets
        if met and wanted is not None:
            tpot_s = _tpot_s(each) / scale if each.output_tokens > 1 else None
            met = wanted.verdict(0.0, _ttft_s(each) / scale, tpot_s) == "met"
        if each.class_.name:
            by_class.setdefault(each.class_.name, []).append(met)
    return dict(sorted(by_class.items()))


def _ttft_s(result: RequestResult) -> float:
    first_s = result.end_s if result.first_s is None else result.first_s
    return first_s - result.scheduled_s


def _e2el_s(result: RequestResult) -> float:
    return result.end_s - result.scheduled_s


def _tpot_s(result: RequestResult) -> float:
    if result.output_tokens <= 1:
        return 0.0
    return (_e2el_s(result) - _ttft_s(result)) / (result.output_tokens - 1)


_MEASURED_S: Mapping[str, Callable[[RequestResult], float]] = {
    "ttft": _ttft_s,
    "tpot": _tpot_s,
    "e2el": _e2el_s,
}


def _spread(name: str, values_s: Iterable[float], scale: float) -> Report:
    values_ms = np.array(list(values_s)) / scale * 1000
    if not len(values_ms):
        return {f"{part}_{name}_ms": None for part in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
        f"p99_{name}_ms": float(np.percentile(values_ms, 99)),
    }


def _steady(done: Sequence[RequestResult], window: Window | None, scale: float) -> Report | None:
    if window is None:
        return None
    admitted = [
        result.prompt_tokens
        for result in done
        if result.first_s is not None and window.start_s <= result.first_s <= window.end_s
    ]
    tokens = sum(_tokens_within(result, window) for result in done)
    return {
        "start_s": window.start_s / scale,
        "duration": window.length_s / scale,
        "output_throughput": ratio(tokens, window.length_s / scale),
        "mean_admitted_prompt_tokens": _mean(admitted),
    }


def _tokens_within(result: RequestResult, window: Window) -> float:
    """The second to last token are spread evenly over their span."""
    if result.first_s is None:
        return 0.0
    inside = float(window.start_s <= result.first_s < window.end_s)
    span_s = result.end_s - result.first_s
    if span_s <= 0:
        return inside * result.output_tokens
    overlap_s = min(result.end_s, window.end_s) - max(result.first_s, window.start_s)
    return inside + (result.output_tokens - 1) * max(0.0, overlap_s) / span_s


def _mean(values: Iterable[int]) -> float | None:
    values = list(values)
    return statistics.fmean(values) if values else None


def ratio(amount: float, per: float) -> float | None:
    """None without a divisor."""
    return amount / per if per > 0 else None
