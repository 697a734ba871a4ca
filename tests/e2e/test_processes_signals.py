"""Signals to several processes at every moment, and processes that hang instead of ending."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.chaos import body
from tests.support.fleet import running_fleet, worker_flags
from tests.support.processes import DECIDER, PROXY, pids, samples, wait_all_up
from tests.support.server import Server, free_port, running_router, starting, wait_until

OLD, NEW = "sk-old-0123456789", "sk-new-0123456789"
SEVERAL = ("--processes", "2", "--policy", "least_tokens")


@contextlib.contextmanager
def several(folder: Path, *flags: str) -> Iterator[Server]:
    with running_fleet(folder, "--slots", "8") as fleet:
        told = ("--processes", "2", "--policy", "least_tokens", *flags, *worker_flags(fleet))
        with running_router(folder, *told) as router:
            wait_all_up(router)
            yield router


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs, for the block at most."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def status(
    router: Server, path: str = "/health", timeout_s: float = 30, **fields: Any
) -> int | str:
    """Of an answer on a connection of its own; or why there is none."""
    try:
        method = "POST" if fields else "GET"
        answer = httpx.request(
            method,
            router.url + path,
            timeout=timeout_s,
            trust_env=False,
            **fields,
        )
    except httpx.TransportError as error:
        return type(error).__name__
    return answer.status_code


def test_a_hangup_while_the_deciding_process_starts_is_carried_out(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"old {OLD}\n")
    port = free_port()
    command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port), *SEVERAL]
    command += ["--worker", "http://127.0.0.1:9", "--api-key-file", str(keys)]
    with starting(command, port, tmp_path / "log") as router:
        wait_until(lambda: bool(pids(router, DECIDER)), 60, "the deciding process starts")
        with stopped(pids(router, DECIDER)[0]):  # wherever it is
            keys.write_text(f"new {NEW}\n")
            router.process.send_signal(signal.SIGHUP)
        said = "settings read again"
        wait_until(lambda: said in router.log.read_text(), 120, "it is carried out")
        headers = {"authorization": f"Bearer {OLD}"}
        answer = httpx.get(router.url + "/v1/models", headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 401
        assert router.alive


def test_a_word_is_given_when_it_is_true_of_all(tmp_path: Path) -> None:
    keys, said = tmp_path / "keys", "settings read again"
    keys.write_text(f"one {OLD}\n")
    with several(tmp_path, "--api-key-file", str(keys)) as router:
        asked: dict[str, Any] = {
            "content": body(1, stream=False),
            "headers": {"authorization": f"Bearer {OLD}"},
        }
        assert status(router, "/v1/completions", **asked) == 200
        with stopped(pids(router, PROXY)[0]):
            keys.write_text(f"one {NEW}\n")
            router.process.send_signal(signal.SIGHUP)

            def refused() -> bool:
                return status(router, "/v1/completions", timeout_s=1, **asked) == 401

            wait_until(refused, 60, "the other one has taken it")
            # After half a minute the first would be replaced, by one that has taken it.
            assert said not in router.log.read_text().partition(" hangs")[0]
        wait_until(lambda: said in router.log.read_text(), 60, "it is said")
        assert [status(router, "/v1/completions", **asked) for _ in range(8)] == [401] * 8


def test_a_proxy_that_hangs_is_replaced(tmp_path: Path) -> None:
    with several(tmp_path) as router, ThreadPoolExecutor(8) as at_once:

        def one_says_so(_: int) -> bool:
            with contextlib.suppress(httpx.TransportError, json.JSONDecodeError):
                health = httpx.get(router.url + "/health", timeout=3, trust_env=False).json()
                return bool(health["proxies"] == {"up": 1, "of": 2})
            return False

        def said() -> bool:
            # Half of the connections meet the proxy that hangs, which is replaced after 20 s more.
            return any(at_once.map(one_says_so, range(8)))

        with stopped(pids(router, PROXY)[0]):
            wait_until(said, 60, "/health says so")
            wait_until(lambda: "proxy 0 hangs" in router.log.read_text(), 90, "it is found")
        wait_all_up(router)
        restarts = samples(router, "evenstep_process_restarts_total")
        assert restarts == {'role="proxy"': 1, 'role="decider"': 0}


def test_a_deciding_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    with several(tmp_path) as router:
        with stopped(pids(router, DECIDER)[0]):
            wait_until(lambda: status(router) == 503, 60, "/health says so")
            asked: dict[str, Any] = {"content": body(1, stream=False)}
            assert status(router, "/v1/completions", **asked) == 503
            said = "the deciding process hangs"
            wait_until(lambda: said in router.log.read_text(), 90, "it is found")
        wait_until(lambda: status(router) == 200, 60, "the next one is there")
        wait_all_up(router)
        assert status(router, "/v1/completions", **asked) == 200
        restarts = samples(router, "evenstep_process_restarts_total")
        assert restarts == {'role="proxy"': 0, 'role="decider"': 1}


def test_a_priority_beyond_all_is_a_priority(tmp_path: Path) -> None:
    with several(tmp_path) as router:
        for priority in (10**30, -(10**30)):
            asked = {"model": "emulated", "prompt": [1], "max_tokens": 1, "priority": priority}
            for _ in range(4):
                assert status(router, "/v1/completions", json=asked) == 200


def test_an_end_while_processes_start_ends_all(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "router.cli", "serve", "--port", str(port), *SEVERAL]
    command += ["--worker", "http://127.0.0.1:9"]
    for number in range(4):
        with starting(command, port, tmp_path / f"log-{number}") as router:

            def children(wanted: int = number) -> bool:
                return len(pids(router, DECIDER) + pids(router, PROXY)) >= wanted

            wait_until(lambda: bool(pids(router, "supervisor")), 60, "the parent is there")
            wait_until(children, 60, "children start")
            router.process.send_signal(signal.SIGHUP)
            router.process.send_signal(signal.SIGTERM)
            router.process.send_signal(signal.SIGHUP)
            router.process.wait(timeout=60)
            wait_until(lambda: not pids(router, DECIDER) + pids(router, PROXY), 60, "all end")
