"""What a replay sends: arrivals, prompts, bodies."""

import json

import pytest

from loadgen.replay.replay_command import ARRIVALS
from loadgen.replay.workload import Workload, plan
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, TraceRequest
from router.core.errors import ConfigError, InputError

TRACE = Trace("t", "f", tuple(TraceRequest(n, n, 100.0 + n) for n in range(1, 41)))


def workload(*requests: TraceRequest, reveal: bool = False) -> Workload:
    return Workload(requests, Arrivals("trace"), "m", 50, 3, reveal)


@pytest.mark.parametrize("text", ["closed:8", "poisson:2.5", "trace"])
def test_arrivals(text: str) -> None:
    assert str(Arrivals.parse(text, ARRIVALS)) == text


@pytest.mark.parametrize("text", ["", "closed", "closed:0", "closed:1.5", "poisson:0", "poisson:x"])
def test_unknown_arrivals(text: str) -> None:
    with pytest.raises(ConfigError, match="write closed:N"):
        Arrivals.parse(text, ARRIVALS)


def test_bodies() -> None:
    short, long = map(json.loads, workload(TraceRequest(3, 7), TraceRequest(1, 80)).bodies())
    assert len(short.pop("prompt")) == 3
    assert short == {
        "model": "m",
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "vllm_xargs": {"evenstep_output_tokens": 7},
    }
    assert len(long["prompt"]) == 1
    assert long["max_tokens"] == 50


def test_revealed_lengths() -> None:
    body = json.loads(next(workload(TraceRequest(3, 7), reveal=True).bodies()))
    assert (body["max_tokens"], body["ignore_eos"]) == (7, True)
    assert "vllm_xargs" not in body


def test_expected_tokens_are_capped() -> None:
    assert workload().expected_tokens(TraceRequest(1, 80)) == 50
    assert workload().expected_tokens(TraceRequest(1, 8)) == 8


def test_prompts_differ_and_repeat_with_the_seed() -> None:
    load = workload(*[TraceRequest(64, 1)] * 30)
    prompts = {tuple(json.loads(body)["prompt"][:16]) for body in load.bodies()}
    assert len(prompts) == 30
    assert list(load.bodies()) == list(load.bodies())
    assert all(100 <= token < 228 for prompt in prompts for token in prompt)


def test_closed_plan_has_no_times() -> None:
    requests = plan(TRACE, Arrivals("closed", 4), None, seed=0)
    assert len(requests) == 40
    assert {request.arrival_s for request in requests} == {None}


def test_poisson_plan_has_the_same_requests_at_its_rate() -> None:
    closed = plan(TRACE, Arrivals("closed", 4), 2000, seed=5)
    requests = plan(TRACE, Arrivals("poisson", 10.0), 2000, seed=5)
    assert [each.prompt_tokens for each in requests] == [each.prompt_tokens for each in closed]
    times = [each.arrival_s or 0.0 for each in requests]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)


def test_trace_plan_takes_its_own_times() -> None:
    assert [each.arrival_s for each in plan(TRACE, Arrivals("trace"), 3, 0)] == [0.0, 1.0, 2.0]
    with pytest.raises(InputError, match="not 41"):
        plan(TRACE, Arrivals("trace"), 41, 0)
