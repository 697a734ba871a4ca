"""Entrants of the league before emulated engines; peers only where they are installed already."""

import contextlib
import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from _pytest.mark import ParameterSet

from loadgen.run.child_processes import Child
from tests.bench.league.entrant import Engines, Entrant
from tests.bench.league.entrants import ENTRANTS
from tests.bench.league.pins import PEERS
from tests.support.server import free_port

WORKERS, SLOTS, BLOCK = 2, 4, 16
STEP_TIME = "2e-3,0,0,1e-6"
SESSIONS, TURNS = 4, 3
# What each router counts of the requests that it has sent to engines.
ROUTED = {
    "evenstep": "evenstep_requests_assigned_total",
    "vllm-router": "vllm_router_cb_outcomes_total",
    "sglang-router": "smg_worker_cb_outcomes_total",
    "smg": "smg_worker_cb_outcomes_total",
    "envoy": "rq_total",
    "haproxy": "stot",
}
# What each proxy counts of the requests that engine 1 has refused.
REFUSED = {"envoy": "rq_error 1", "haproxy": "wretr 1"}
# What shows that a router has read engines' state as real ones tell it, not by some second way.
READ = {"vllm-router cache_aware": "vllm_router_kv_routing_inputs_total render"}


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[Engines]:
    """Engines that also tell the token ids of texts."""
    ready, first, kv = folder / "ready.json", free_port(16), free_port(WORKERS)
    command = [
        *("-m", "tests.bench.league.rendering", "emulate", "--port", str(first)),
        *("--workers", str(WORKERS), "--slots", str(SLOTS), "--no-barrier"),
        *("--step-time", STEP_TIME, "--kv-events-port", str(kv), "--json", str(ready)),
    ]
    with Child(command, folder / "fleet.log", sys.executable) as emulated:
        emulated.until(lambda: ready.exists() or None, 60.0)
        told = json.loads(ready.read_text())
        started = told["workers"]
        yield Engines(
            urls=[worker["url"] for worker in started],
            workers=[worker["spec"] for worker in started],
            kv_events=list(range(kv, kv + WORKERS)),
            slots=SLOTS,
            block_tokens=BLOCK,
            model="emulated",
            time_scale=1.0,
            step_time=tuple(map(float, STEP_TIME.split(","))),
            control=told["control"],
        )


def usage(url: str, session: int, turn: int, tokens: int, words: int = 50) -> dict[str, Any]:
    """What the engine counted of a streamed answer."""
    body = {
        "model": "emulated",
        "prompt": f"session {session}, " + "which says the same again and again. " * words,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"evenstep_output_tokens": tokens},
    }
    headers = {
        "x-request-id": f"{session}-{turn}",
        "x-session-id": f"session-{session}",
        "x-smg-routing-key": f"session-{session}",
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    counted: dict[str, Any] = json.loads(events[-1])["usage"]
    return counted


def counted(engine: str) -> float:
    page = httpx.get(f"{engine}/metrics", timeout=30).text
    name = "vllm:prompt_tokens_total{"
    (line,) = (line for line in page.splitlines() if line.startswith(name))
    return float(line.split()[-1])


def serves(entrant: Entrant, folder: Path) -> None:
    """Lengths that only the engine may know reach it, and the router tells what it has done."""
    with fleet(folder) as engines, entrant.start(engines, folder) as running:
        lengths = [3 + session + turn for turn in range(TURNS) for session in range(SESSIONS)]
        for at, tokens in enumerate(lengths):
            turn, session = divmod(at, SESSIONS)
            assert usage(running.url, session, turn, tokens)["completion_tokens"] == tokens
        assert sum(map(counted, engines.urls)) > 0
        assert running.pids()
        evidence = running.evidence()
        routed = sum(
            value for key, value in evidence.items() if key.startswith(ROUTED[entrant.peer])
        )
        assert routed == len(lengths), evidence
        if (read := READ.get(entrant.name)) is not None:
            assert evidence.get(read) == len(lengths) * WORKERS, evidence


@pytest.mark.parametrize("name", ["evenstep", "evenstep kv_cost tuned"])
def test_evenstep_serves(name: str, tmp_path: Path) -> None:
    serves(ENTRANTS[name], tmp_path)


def _peers(*peers: str) -> Iterator[ParameterSet]:
    """Each entrant of these products; all but its first one are slow."""
    seen = set()
    for name, entrant in ENTRANTS.items():
        if entrant.peer in peers:
            yield pytest.param(name, marks=[pytest.mark.slow] if entrant.peer in seen else [])
            seen.add(entrant.peer)


# Those behind the bench's relay have tests of their own.
@pytest.mark.parametrize("name", [*_peers(*ROUTED.keys() - {"evenstep"})])
def test_a_peer_serves_where_it_is_installed(name: str, tmp_path: Path) -> None:
    entrant = ENTRANTS[name]
    if not PEERS[entrant.peer].installed:
        pytest.skip(f"{entrant.peer} is not installed here: the league installs it")
    serves(entrant, tmp_path)


@pytest.mark.parametrize("name", [*_peers(*REFUSED)])
def test_a_proxy_sends_what_one_engine_refuses_to_another(name: str, tmp_path: Path) -> None:
    """That engine passes its health checks all the time; prompts are as long as the longest."""
    entrant = ENTRANTS[name]
    if not PEERS[entrant.peer].installed:
        pytest.skip(f"{entrant.peer} is not installed here: the league installs it")
    with fleet(tmp_path) as engines, entrant.start(engines, tmp_path) as running:
        fails = httpx.post(f"{engines.control}/workers/1/fault", json={"kind": "error"}, timeout=30)
        assert fails.is_success
        sessions = count()
        while running.evidence()[REFUSED[entrant.peer]] < TURNS:
            assert usage(running.url, next(sessions), 0, 3, words=1200)["completion_tokens"] == 3
