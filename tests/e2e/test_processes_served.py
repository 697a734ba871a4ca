"""Several processes answer as one does, and are operated as one is."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.engines.http_client import HttpClient
from tests.support.chaos import Seen, ask, body
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.processes import (
    DECIDER,
    PROXY,
    mapped,
    outcomes,
    pids,
    pss_mb,
    samples,
    wait_all_up,
)
from tests.support.server import Server, running_router, wait_until

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
POLICY = ("--policy", "least_tokens")
COMPLETION = {"model": "emulated", "prompt": [1, 2, 3], "max_tokens": 4}
CHAT = {"model": "emulated", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
# What differs from answer to answer.
NAMES = re.compile(r"es-[0-9a-f]{20}(\.es-[0-9a-f]{20})?|\"created\":\d+|_(at|s|age_s)\":[\d.]+")

ASKED: list[tuple[str, str, dict[str, Any] | bytes | None, dict[str, str]]] = [
    ("POST", "/v1/completions", COMPLETION, {}),
    ("POST", "/v1/completions", {**COMPLETION, "stream": True}, {"x-request-id": "mine"}),
    ("POST", "/v1/completions", {**COMPLETION, "stream": True}, {"x-evenstep-energy": "0"}),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, {}),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "small"}, {}),
    ("POST", "/v1/messages", CHAT, {}),
    ("POST", "/v1/completions", {**COMPLETION, "model": "none"}, {}),
    ("POST", "/v1/completions", b'{"prompt": ', {}),
    ("POST", "/v1/messages", b"[]", {}),
    ("POST", "/v1/completions", {**COMPLETION, "max_tokens": "many"}, {}),
    ("POST", "/v1/completions", COMPLETION, {"x-slo-ttft-ms": "soon"}),
    ("GET", "/v1/completions", None, {}),
    ("POST", "/tokenize", {"model": "emulated", "prompt": "Hello"}, {}),
    ("GET", "/v1/models", None, {}),
    ("GET", "/version", None, {}),
    ("HEAD", "/v1/models", None, {}),
    ("GET", "/nowhere/%2e%2E/a%20b?c=%20d", None, {}),
    ("OPTIONS", "/v1/models", None, {}),
]


@contextlib.contextmanager
def several(folder: Path, *flags: str, slots: int = 64) -> Iterator[tuple[Fleet, Server]]:
    engines = ("--workers", "2", "--slots", str(slots), "--step-time", "0.005,0")
    with running_fleet(folder, *engines) as fleet:
        told = ("--processes", "2", *POLICY, *flags, *worker_flags(fleet))
        with running_router(folder, *told) as router:
            wait_all_up(router)
            yield fleet, router


def told(router: Server, number: int) -> tuple[int, list[str], str]:
    """Status, names of the headers and text of an answer, without what is its own alone."""
    method, path, content, headers = ASKED[number]
    data = json.dumps(content).encode() if isinstance(content, dict) else content
    with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as client:
        answer = client.request(method, path, content=data, headers=headers)
    return answer.status_code, sorted(answer.headers), NAMES.sub("", answer.text)


def test_answers_are_those_of_one_process(tmp_path: Path) -> None:
    alias = ("--model-alias", "small=emulated")
    with (
        several(tmp_path, *alias) as (fleet, router),
        running_router(tmp_path, *POLICY, *alias, *worker_flags(fleet)) as alone,
    ):
        for number, asked in enumerate(ASKED):
            assert told(router, number) == told(alone, number), asked


def test_a_request_that_is_metered_is_told_its_energy(tmp_path: Path) -> None:
    with several(tmp_path) as (_, router):
        url, meter = router.url + "/v1/completions", {"x-evenstep-energy": "1"}
        whole = httpx.post(url, json=COMPLETION, headers=meter, timeout=60)
        stream = httpx.post(url, json={**COMPLETION, "stream": True}, headers=meter, timeout=60)
        assert float(whole.headers["x-evenstep-energy-joules"]) > 0
        assert b"\n\n: x-evenstep-energy-joules: " in stream.content
        assert stream.content.endswith(b"data: [DONE]\n\n")
        router.stop()
        lines = [line for line in router.log.read_text().splitlines() if "path=/v1/" in line]
        assert len(lines) == 2


def test_the_log_tells_the_tokens_that_who_has_left_has_seen(tmp_path: Path) -> None:
    with several(tmp_path) as (_, router):
        url = router.url + "/v1/completions"
        asked = {**COMPLETION, "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", url, json=asked, timeout=60) as answer:
            events = islice((line for line in answer.iter_lines() if line), 40)
            assert all(line.startswith("data: {") for line in events)
        wait_until(lambda: outcomes(router) == {"aborted": 1}, 60, "it has left")
        router.stop()
        (line,) = [line for line in router.log.read_text().splitlines() if "path=/v1/" in line]
        tokens = re.search(r"output_tokens=(\d+)", line)
        assert tokens is not None
        assert 40 <= int(tokens[1]) < 4000  # some are under way when it leaves


def test_targets_are_met_or_refused_over_all_processes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {ALICE} ttft_ms=60000 tpot_ms=60000\nbob {BOB} ttft_ms=1000\n")
    with several(tmp_path, "--api-key-file", str(keys), "--step-time", "9.5,0") as (_, router):

        def asked(key: str, **headers: str) -> httpx.Response:
            headers["authorization"] = f"Bearer {key}"
            url = router.url + "/v1/completions"
            return httpx.post(url, json={**COMPLETION, "stream": True}, headers=headers, timeout=60)

        assert asked(ALICE).status_code == 200
        assert asked(ALICE, **{"x-slo-tpot-ms": "0.001"}).status_code == 200
        refused = asked(BOB)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "9")
        assert asked(BOB, **{"x-llm-d-slo-ttft-ms": "60000"}).status_code == 200
        counts = {"met": 2, "refused": 1, "queue": 0, "prompt": 0, "tokens": 1, "failed": 0}
        expected = {f'group="default",verdict="{verdict}"': n for verdict, n in counts.items()}
        wait_until(lambda: samples(router, "evenstep_targets_total") == expected, 60, "counts")


async def test_limits_of_keys_hold_over_all_processes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {ALICE} concurrency=3\nbob {BOB} rate=5/h\n")
    with several(tmp_path, "--api-key-file", str(keys)) as (fleet, router):
        url = router.url + "/v1/completions"

        async def statuses(key: str, count: int, **fields: object) -> list[int]:
            """Answers to requests at once, each on a connection of its own."""

            async def one() -> int:
                async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                    headers = {"authorization": f"Bearer {key}"}
                    asked = {**COMPLETION, **fields}
                    return (await client.post(url, json=asked, headers=headers)).status_code

            return sorted(await asyncio.gather(*(one() for _ in range(count))))

        long = {"max_tokens": 400, "vllm_xargs": {"evenstep_output_tokens": 400}}
        assert await statuses(ALICE, 12, **long) == [200] * 3 + [429] * 9
        assert await statuses(ALICE, 3) == [200] * 3
        assert await statuses(BOB, 12) == [200] * 5 + [429] * 7
        assert await statuses("nobody", 4) == [401] * 4
        wait_until(lambda: not fleet.unfinished(), 60, "the engines are idle")
        assert samples(router, "evenstep_key_requests_total") == {'key="alice"': 6, 'key="bob"': 5}
        limited = samples(router, "evenstep_key_limited_total")
        assert limited['key="alice",limit="concurrency"'] == 9
        assert limited['key="bob",limit="rate"'] == 7
        counted = samples(router, "evenstep_unauthorized_requests_total")
        await asyncio.to_thread(wait_until, lambda: _unauthorized(router) == 4, 60, str(counted))

        keys.write_text(f"carol {ALICE}\n")
        router.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            while await statuses(BOB, 8) != [401] * 8:
                pass  # both proxies have to be told
        assert await statuses(ALICE, 8) == [200] * 8


def _unauthorized(router: Server) -> float:
    return samples(router, "evenstep_unauthorized_requests_total")[""]


async def test_metrics_are_the_sums_of_all(tmp_path: Path) -> None:
    clients, tokens = 24, 40
    with several(tmp_path) as (_, router):
        http = [HttpClient() for _ in range(clients)]
        content = body(tokens)
        await asyncio.gather(*(ask(client, router, Seen(), content) for client in http))

        def counted(name: str) -> float:
            (count,) = samples(router, f"evenstep_{name}_seconds_count").values()
            return count

        def told() -> bool:  # each proxy tells on its own what it has timed since it last told
            open_now = samples(router, "evenstep_http_connections")[""]
            return counted("time_per_output_token") >= clients and open_now >= clients

        await asyncio.to_thread(wait_until, told, 60, "the proxies have told")
        assert outcomes(router) == {"completed": clients}
        assert counted("time_per_output_token") == counted("time_to_first_token") == clients
        gaps = counted("inter_token_latency")
        assert clients * (tokens - 1) * 0.5 <= gaps <= clients * (tokens - 1)
        for client in http:
            await client.aclose()


async def test_streams_end_before_the_processes_do(tmp_path: Path) -> None:
    with several(tmp_path, "--grace", "60") as (_, router):
        client, seen = HttpClient(), [Seen() for _ in range(8)]
        meter = [(b"x-evenstep-energy", b"1")]
        tasks = [asyncio.create_task(ask(client, router, one, body(600))) for one in seen]
        whole = await client.request("POST", router.url, "/v1/completions", meter, body(600))
        async with asyncio.timeout(120):
            await asyncio.gather(*(one.first.wait() for one in seen))
            router.process.send_signal(signal.SIGTERM)
            assert all(one.complete for one in await asyncio.gather(*tasks))
            assert (await whole.read()).endswith(b"data: [DONE]\n\n")
            assert await asyncio.to_thread(router.process.wait, 60) == 0
        assert "ended; 0 requests in flight, 0 waiting" in router.log_tail()
        assert not pids(router, PROXY) + pids(router, DECIDER)
        await client.aclose()


async def test_who_is_cut_short_is_told_so(tmp_path: Path) -> None:
    with several(tmp_path, "--grace", "0") as (fleet, router):
        client, seen = HttpClient(), [Seen() for _ in range(8)]
        meter = [(b"x-evenstep-energy", b"1")]
        tasks = [asyncio.create_task(ask(client, router, one, body(900))) for one in seen]
        whole = await client.request("POST", router.url, "/v1/completions", meter, body(900))
        async with asyncio.timeout(120):
            await asyncio.gather(*(one.first.wait() for one in seen))
            router.process.send_signal(signal.SIGTERM)
            assert [one.errors for one in await asyncio.gather(*tasks)] == [1] * 8
            assert b"the router is ending" in await whole.read()
            assert await asyncio.to_thread(router.process.wait, 60) == 0
        wait_until(lambda: not fleet.unfinished(), 60, "the engines are idle")
        await client.aclose()


def test_proxies_are_small(tmp_path: Path) -> None:
    with several(tmp_path) as (_, router):
        with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as client:
            for _ in range(50):
                assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        proxies, (decider,) = pids(router, PROXY), pids(router, DECIDER)
        assert len(proxies) == 2
        for pid in proxies:
            assert not re.search("numpy|numba|llvmlite|pydantic", mapped(pid))
        assert "numpy" in mapped(decider)
        assert max(map(pss_mb, proxies)) < 80
        assert pss_mb(decider) < 220
        assert pss_mb(router.process.pid) < 25


def test_a_proxy_imports_nothing_that_decides() -> None:
    code = "import router.processes.proxy_process, sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    heavy = {
        "numpy",
        "numba",
        "fastapi",
        "pydantic",
        "typer",
        "router.dispatch.dispatcher",
        "router.core.state.cluster",
    }
    assert heavy.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-plane", "asgi"], "--processes above 1 needs --data-plane splice"),
        (["--processes", "0"], "processes = '0'"),
        (["--record", "/nowhere/at/all"], "/nowhere/at/all"),
        ([], "no workers: give at least one"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(flags: list[str], message: str) -> None:
    workers = ["--worker", "http://127.0.0.1:9"] if flags else []
    command = [sys.executable, "-m", "router.cli", "serve", "--port", "0", "--processes", "2"]
    done = subprocess.run(
        [*command, *workers, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_a_port_is_not_shared_with_another_router(tmp_path: Path) -> None:
    with several(tmp_path) as (fleet, router):
        command = [sys.executable, "-m", "router.cli", "serve", "--port", str(router.port)]
        command += ["--processes", "2", *worker_flags(fleet)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Address already in use; try another --port" in done.stderr
