"""The league on engines that run already: what they are asked, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from router.core.errors import ConfigError
from tests.bench.league.entrant import Engines
from tests.bench.league.own import EVENSTEP
from tests.bench.league.real import (
    CANNOT,
    FILE,
    Cluster,
    cannot,
    cluster,
    scaled,
    step_time,
    with_capacity,
    workloads,
)
from tests.bench.league.workloads import CAPACITY, WORKLOADS

URL = "http://127.0.0.1:1"


def of(ranks: int, requests_per_s: float, most_tokens: int | None = None) -> Cluster:
    workers = [f"{URL}{rank},slots=32" for rank in range(ranks)]
    urls = [worker.partition(",")[0] for worker in workers]
    told = {"model": "m", "max_model_len": most_tokens}
    return Cluster(workers, told, Engines(urls, workers, (), 32, 16, "m", 1.0), requests_per_s)


@pytest.mark.parametrize("share", [0.25, 1.0, 2.5])
def test_requests_come_as_often_as_the_engines_are_many(share: float) -> None:
    one = WORKLOADS["open-80"].sessions(0)
    found = scaled(WORKLOADS["open-80"].sessions, share, 1.0, 0)
    assert len(found) == pytest.approx(share * len(one), rel=0.15)
    waits = [session[0].wait_s for session in found]
    assert waits == sorted(waits)
    assert len({session[0].prompt for session in found}) == len(found)
    assert found == scaled(WORKLOADS["open-80"].sessions, share, 1.0, 0)


def test_a_cluster_at_half_the_speed_gets_the_same_requests_at_half_the_rate() -> None:
    slow = workloads(of(8, CAPACITY / 2))
    assert slow.keys() == WORKLOADS.keys() - CANNOT.keys()
    assert "of what the ranks serve under evenstep, as measured; prompts" in slow["open-80"].what
    assert not [load.name for load in slow.values() if "simulation" in load.what]
    for name, load in slow.items():
        known = WORKLOADS[name]
        assert load.targets_ms == {key: 2 * value for key, value in known.targets_ms.items()}
        pairs = zip(known.sessions(1), load.sessions(1), strict=True)
        for session, slower in pairs:
            assert [ask.wait_s for ask in slower] == [2 * ask.wait_s for ask in session]
            assert [replace(ask, wait_s=0) for ask in slower] == [
                replace(ask, wait_s=0) for ask in session
            ]


def test_workloads_whose_prompts_do_not_fit_are_left_out() -> None:
    short = of(2, CAPACITY, 8192)
    assert set(cannot(short)) - set(CANNOT) == {"chat", "agents", "tenants"}
    assert workloads(short).keys() == WORKLOADS.keys() - cannot(short).keys()
    assert "--max-model-len is 8,192" in cannot(short)["chat"]


def test_clients_fill_the_slots_that_there_are() -> None:
    load = workloads(of(2, CAPACITY))["decode-saturated"]
    assert load.clients / (2 * 32) == WORKLOADS["decode-saturated"].clients / (8 * 32)


def test_costs_of_steps_are_those_that_evenstep_tells() -> None:
    told = {"evenstep_step_cost_seconds step": 0.01, "evenstep_step_cost_seconds kv_token": 1e-7}
    assert step_time(told) == [0.01, 1e-7, 0.0, 0.0]
    assert not step_time({})


@pytest.mark.parametrize(
    ("urls", "complaint"),
    [
        ("", "name the engines"),
        (URL, "needs its slots"),
        (f"{URL},slots=4 http://127.0.0.1:2,slots=5", "the same for all"),
        (f"{URL},slots=4", "does not answer as vLLM does"),
        (f"{URL},slots=4,colour=red", "unknown key 'colour'"),
        (f"{URL},slots=4,rank=0 {URL},slots=4,rank=1", "a URL of its own"),
    ],
)
def test_what_is_wrong_with_engines_is_said(urls: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        cluster(urls)


def test_a_folder_is_of_one_cluster(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"cluster": {"workers": ["http://other,slots=1"]}}')
    with pytest.raises(ConfigError, match="of another cluster"):
        with_capacity(of(1, 0.0), EVENSTEP[0], tmp_path)
