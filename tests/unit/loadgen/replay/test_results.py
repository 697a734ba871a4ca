"""Aggregation of a replay: figures worked out by hand, keys as in ``vllm bench serve``."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from loadgen.replay.replay_results import (
    Report,
    RequestResult,
    Run,
    Window,
    parse_goodput,
    shortfall,
    summarize,
)
from loadgen.traces.request_classes import RequestClass
from router.core.errors import ConfigError
from router.core.targets import Targets

CONDITIONS: Report = {"trace": "t", "seed": 7, "warmup": 0.1}
# Wall seconds; at scale 2 all reported times are half of these.
FIRST = RequestResult(100, 5, 0.0, 0.0, 1.0, 5.0, (1.0, 3.0))
SECOND = RequestResult(300, 1, 1.0, 1.2, 4.0, 4.0)
RUN = Run([FIRST, SECOND], 2, 2, Window(0.0, 5.0), Window(2.0, 4.5))


def report(run: Run = RUN, goodput_ms: Mapping[str, float] = MappingProxyType({})) -> Report:
    return summarize(run, CONDITIONS, 2.0, goodput_ms)


def test_keys_of_vllm_bench_serve() -> None:
    keys = report().keys()
    assert keys >= {
        "num_prompts",
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
    }
    assert keys >= {"request_throughput", "request_goodput", "output_throughput"}
    assert keys >= {
        f"{part}_{name}_ms"
        for part in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    } | {"total_token_throughput"}


def test_rates_are_per_engine_second() -> None:
    found = report()
    assert found["duration"] == 2.5
    assert found["wall_duration_s"] == 5.0
    assert found["request_throughput"] == 2 / 2.5
    assert found["output_throughput"] == 6 / 2.5
    assert found["total_token_throughput"] == 406 / 2.5
    assert found["mean_admitted_prompt_tokens"] == 200


def test_latency_counts_from_the_scheduled_arrival() -> None:
    found = report()
    assert found["mean_ttft_ms"] == pytest.approx((500 + 1500) / 2)
    assert found["mean_e2el_ms"] == pytest.approx((2500 + 1500) / 2)
    assert found["mean_lateness_ms"] == pytest.approx(50)
    assert found["median_itl_ms"] == pytest.approx(1000)
    assert found["std_itl_ms"] == pytest.approx(500)


def test_tpot_leaves_out_requests_of_one_token() -> None:
    assert report()["mean_tpot_ms"] == pytest.approx((2500 - 500) / 4)


def test_steady_window_shares_a_request_out_evenly() -> None:
    steady = report()["steady"]
    # Of FIRST, tokens 2 to 5 arrive between 1 and 5 s, 2.5 of them between 2 and 4.5 s.
    assert steady == {
        "start_s": 1.0,
        "duration": 1.25,
        "output_throughput": pytest.approx((2.5 + 1) / 1.25),
        "mean_admitted_prompt_tokens": 300,
    }
    assert report(dataclasses.replace(RUN, steady=None))["steady"] is None


def test_failures_are_counted_apart_and_measured_nowhere() -> None:
    rejected = RequestResult(9, 0, 0.0, 0.0, None, 0.1, status=429, error="HTTP 429: full")
    broken = RequestResult(9, 2, 0.0, 0.0, 0.5, 9.0, error="no usage event")
    found = report(Run([FIRST, rejected, broken, SECOND], 6, 5, RUN.whole, RUN.steady))
    assert (found["num_prompts"], found["sent"], found["completed"]) == (6, 5, 2)
    assert (found["failed"], found["rejected"], found["lost"]) == (2, 1, 1)
    assert found["errors"] == {"HTTP 429: full": 1, "no usage event": 1}
    kept = ("output_throughput", "mean_ttft_ms", "p99_e2el_ms", "steady")
    assert [found[key] for key in kept] == [report()[key] for key in kept]


def test_what_became_of_the_others_is_said_in_a_line() -> None:
    full = RequestResult(9, 0, 0.0, 0.0, None, 0.1, status=429, error="HTTP 429: full")
    stopped = Run([FIRST, full, full, SECOND], 9, 6, RUN.whole, RUN.steady, interrupted=True)
    assert shortfall(report(stopped)) == (
        "2 of 9 completed: 2 x HTTP 429: full; interrupted with 2 open and 3 unsent"
    )


def test_nothing_completed() -> None:
    found = report(Run([], 3, 0, Window(0.0, 0.0), Window(0.0, 1.0), interrupted=True))
    assert found["interrupted"] is True
    assert found["output_throughput"] is found["p99_ttft_ms"] is None
    assert found["mean_admitted_prompt_tokens"] is None
    assert found["steady"] == {
        "start_s": 0.0,
        "duration": 0.5,
        "output_throughput": 0.0,
        "mean_admitted_prompt_tokens": None,
    }


@pytest.mark.parametrize(
    ("bounds", "good"),
    [({"ttft": 600}, 1), ({"tpot": 499}, 1), ({"tpot": 500}, 2), ({"ttft": 600, "e2el": 1}, 0)],
)
def test_goodput(bounds: dict[str, float], good: int) -> None:
    assert report(goodput_ms=bounds)["request_goodput"] == good / 2.5
    assert report()["request_goodput"] is None


def test_conditions_are_repeated() -> None:
    found = report()
    assert found | CONDITIONS == found
    assert found["time_scale"] == 2.0


def test_of_classes_those_are_good_that_meet_their_targets() -> None:
    chat, batch = RequestClass("chat", 0.5, Targets(0.5, 0.5)), RequestClass("batch", 0.5)
    results = [
        dataclasses.replace(FIRST, class_=chat),
        dataclasses.replace(SECOND, class_=chat),
        dataclasses.replace(SECOND, class_=batch),
        dataclasses.replace(SECOND, class_=batch, error="no usage event"),
    ]
    found = report(Run(results, 4, 4, RUN.whole, RUN.steady))
    assert found["met_by_class"] == {"batch": 0.5, "chat": 0.5}
    assert found["request_goodput"] == 2 / 2.5
    assert report()["met_by_class"] == {}


def test_parse_goodput() -> None:
    assert parse_goodput("ttft:500, tpot:50") == {"ttft": 500, "tpot": 50}
    assert parse_goodput(None) == {}
    for text, message in (("x:1", "unknown metric 'x'"), ("ttft:fast", "write ttft:500")):
        with pytest.raises(ConfigError, match=message):
            parse_goodput(text)
