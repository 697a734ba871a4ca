"""What a simulation is put together from: lengths, arrivals, settings, knowledge of ends."""

import math
from dataclasses import replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.simulator.decode.decode_command import ARRIVALS
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_engines import Engines
from loadgen.simulator.decode.length_sources import LawLengths, TraceLengths
from loadgen.simulator.decode.oracle import Knowledge, OracleSignal
from loadgen.simulator.decode.request_streams import (
    ClosedStream,
    Job,
    Stream,
    open_stream,
)
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import load_trace
from router.core.errors import ConfigError, InputError
from router.core.forecast.end_signals import CapSignal, NoSignal, SurvivalSignal
from router.core.forecast.forecast import NO_CAP, Ends, Running, WorkProfile
from router.core.step_time import StepTime
from router.core.types import Dispatch
from tests.support.paper import PAPER

CONSTANT = LawLengths.parse("constant:10,5")
CONFIG = DecodeConfig(policy="bfio", lengths=CONSTANT, **PAPER)


@pytest.fixture
def timed_trace(tmp_path: Path) -> TraceLengths:
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n5,100,10\n7,200,20\n6.5,300,30\n")
    return TraceLengths.of(load_trace(path))


def first(stream: Stream, count: int) -> list[Job]:
    return [stream.due(stream.next_s(), 0)[0] for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "mean_in", "mean_out", "longest"),
    [
        ("geometric:30,12.5", 30, 12.5, None),
        ("constant:30,12", 30, 12, 12),
        ("uniform:99,12", 50, 12, None),
        ("homogeneous:99,12", 50, 12, 12),
    ],
)
def test_laws(text: str, mean_in: float, mean_out: float, longest: int | None) -> None:
    lengths = LawLengths.parse(text)
    prompts, outputs = lengths.draw(np.random.default_rng(0), 40_000)

    assert prompts.mean() == pytest.approx(mean_in, rel=0.02)
    assert outputs.mean() == pytest.approx(mean_out, rel=0.02)
    assert min(prompts.min(), outputs.min()) >= 1
    assert lengths.name == text
    assert lengths.max_output_tokens == longest


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("normal:1,2", "write one of geometric:MEAN_IN,MEAN_OUT"),
        ("geometric:1", "write one of"),
        ("geometric:0.5,2", "from 1 to 100,000,000"),
        ("geometric:nan,2", "from 1 to 100,000,000"),
        ("constant:10,inf", "from 1 to 100,000,000"),
        ("constant:10,-1", "from 1 to 100,000,000"),
        ("constant:10,x", "from 1 to 100,000,000"),
        ("constant:1.5,2", "whole number"),
        ("uniform:1.5,2", "whole number"),
    ],
)
def test_laws_that_cannot_be(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LawLengths.parse(text)


def test_rows_of_a_trace_are_drawn_with_replacement(timed_trace: TraceLengths) -> None:
    prompts, outputs = timed_trace.draw(np.random.default_rng(0), 3000)

    assert (prompts == 10 * outputs).all()
    values, counts = np.unique(prompts, return_counts=True)
    assert values.tolist() == [100, 200, 300]
    assert counts.min() > 900
    assert timed_trace.max_output_tokens == 30


@pytest.mark.parametrize("text", ["full", "poisson:2.5", "trace"])
def test_arrivals_are_written_as_they_are_read(text: str) -> None:
    assert str(Arrivals.parse(text, ARRIVALS)) == text


@pytest.mark.parametrize(
    "text", ["", "closed:4", "poisson", "poisson:0", "poisson:-1", "poisson:x", "full:3"]
)
def test_unknown_arrivals(text: str) -> None:
    with pytest.raises(ConfigError, match="--arrivals"):
        Arrivals.parse(text, ARRIVALS)


def test_full_arrivals_top_up() -> None:
    stream = open_stream(Arrivals(), CONSTANT, 3, seed=0)

    assert stream.due(1.5, 1) == [Job(0, 10, 5, 1.5), Job(1, 10, 5, 1.5)]
    assert stream.due(2.5, 3) == []
    assert [job.number for job in stream.due(2.5, 0)] == [2, 3, 4]


def test_clients_that_wait_for_their_answers() -> None:
    stream = ClosedStream(repeat((10, 5)), 3)

    assert [job.number for job in stream.due(1.5, 0, 0)] == [0, 1, 2]
    assert stream.due(2.5, 0, 3) == []
    assert stream.due(3.5, 1, 2) == [Job(3, 10, 5, 3.5)]
    assert stream.next_s() == 0


def test_poisson_arrivals_keep_their_rate_and_come_once() -> None:
    stream = open_stream(Arrivals("poisson", 50.0), CONSTANT, 3, seed=0)
    jobs = stream.due(100.0, 10**6)

    assert len(jobs) == pytest.approx(5000, rel=0.05)
    assert all(one.arrival_s < other.arrival_s for one, other in pairwise(jobs))
    assert [job.number for job in jobs] == list(range(len(jobs)))
    assert stream.due(100.0, 0) == []
    assert stream.next_s() > 100


def test_a_trace_s_own_arrivals(timed_trace: TraceLengths) -> None:
    stream = open_stream(Arrivals("trace"), timed_trace, 3, seed=0)

    assert stream.due(1.5, 0) == [Job(0, 100, 10, 0.0), Job(1, 300, 30, 1.5)]
    assert stream.next_s() == 2.0
    assert stream.due(2.0, 0) == [Job(2, 200, 20, 2.0)]
    assert stream.next_s() == math.inf


def test_a_trace_s_own_arrivals_need_a_trace_that_has_them() -> None:
    with pytest.raises(ConfigError, match="needs a --trace"):
        open_stream(Arrivals("trace"), CONSTANT, 3, seed=0)
    with pytest.raises(InputError, match="no arrival times"):
        open_stream(Arrivals("trace"), TraceLengths.of(load_trace()), 3, seed=0)


def test_a_seed_draws_the_same_requests_whenever_they_are_asked_for() -> None:
    lengths = LawLengths.parse("geometric:100,40")
    poisson = first(open_stream(Arrivals("poisson", 9.0), lengths, 1, seed=4), 20)
    full = open_stream(Arrivals(), lengths, 5, seed=4).due(0.0, 0)
    other = open_stream(Arrivals(), lengths, 5, seed=5).due(0.0, 0)

    assert [job[1:3] for job in full] == [job[1:3] for job in poisson[:5]]
    assert [job[1:3] for job in full] != [job[1:3] for job in other]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policy": "best"}, "--policy: unknown policy 'best'; known: .*bfio"),
        ({"workers": 0}, "--workers must be at least 1"),
        ({"pool": 0}, "--pool must be at least 1"),
        ({"dispatch_delay": -1}, "--dispatch-delay must be at least 0"),
        ({"tie_weight": math.nan}, "--tie-weight must be at least 0"),
        ({"horizon": -1}, "--horizon"),
        ({"warmup": 4500}, "leaves none of the 4500"),
        ({"discount": 0.0}, "--discount"),
        ({"discount": 1.5}, "--discount"),
        ({"step_time": StepTime(1.0, 0.0, 0.1)}, "t_r needs a t_l"),
        ({"policy": "fcfs", "dispatch": Dispatch.INSTANT}, "policy fcfs can dispatch by pool only"),
        ({"dispatch": Dispatch.INSTANT, "overcommit": 1}, "leaves nobody in the pool"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        replace(CONFIG, **changes)


@pytest.mark.parametrize("text", ["none", "cap", "survival", "oracle", "miss:0.3"])
def test_knowledge_is_written_as_it_is_read(text: str) -> None:
    assert str(Knowledge.parse(text)) == text


@pytest.mark.parametrize("text", ["", "all", "miss", "miss:", "miss:-0.1", "miss:1.1", "miss:x"])
def test_unknown_knowledge(text: str) -> None:
    with pytest.raises(ConfigError, match="--lookahead"):
        Knowledge.parse(text)


@pytest.mark.parametrize(
    ("text", "signal"),
    [
        ("none", NoSignal),
        ("cap", CapSignal),
        ("survival", SurvivalSignal),
        ("oracle", OracleSignal),
    ],
)
def test_knowledge_becomes_a_signal(text: str, signal: type) -> None:
    assert isinstance(Knowledge.parse(text).signal(WorkProfile(), 0), signal)


def running_engines(requests: int) -> Engines:
    engines = Engines(2, requests, WorkProfile())
    for number in range(requests):
        engines.send(Job(number, 10, 3, 0.0), number % 2, 0)
    engines.begin(0, 0.0)
    return engines


def test_an_oracle_knows_the_ends() -> None:
    engines = running_engines(4)
    engines.send(Job(9, 10, 7, 0.0), 0, 5)
    prediction = OracleSignal().predict(engines.foreseen(1, NO_CAP), 5)

    assert isinstance(prediction, Ends)
    assert prediction.steps.tolist() == [2, 2, 2, 2, 7]


def test_missed_ends_are_drawn_once_for_each_request() -> None:
    foreseen = running_engines(4000).foreseen(0, NO_CAP)
    signal = OracleSignal(missed=0.3, seed=1)
    missed = signal.predict(foreseen, 5).steps > 3

    assert missed.mean() == pytest.approx(0.3, abs=0.03)
    assert set(signal.predict(foreseen, 5).steps.tolist()) == {3, 6}
    later = running_engines(4000).foreseen(1, NO_CAP)
    assert ((signal.predict(later, 8).steps > 3) == missed).all()
    other = OracleSignal(missed=0.3, seed=2).predict(foreseen, 5).steps > 3
    assert 0.3 < (other != missed).mean() < 0.6
    assert (OracleSignal(missed=1.0).predict(foreseen, 5).steps == 6).all()


def test_an_oracle_cannot_be_asked_about_live_requests() -> None:
    column = np.zeros(1, dtype=np.int64)
    live = Running(column, column, column, column, column, column.astype(float), column, column)

    with pytest.raises(TypeError, match="simulator's requests"):
        OracleSignal().predict(live, 5)
