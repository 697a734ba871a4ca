"""Children of the demo: they get ready, they say why not, and they always end."""

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import loadgen.demo.run
import loadgen.run.child_processes
from loadgen.demo.run import Fleet, RunPlan, execute
from loadgen.run.child_processes import Child, free_ports, signals_as_interrupts
from router.core.errors import ConfigError, EvenstepError
from router.core.types import Dispatch
from tests.support.server import wait_until

EMULATE = ("emulate", "--workers", "1", "--no-snapshots")


def children() -> set[int]:
    """Live children of this process."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


@pytest.mark.parametrize("threads", [0, 1])
def test_an_interrupt_while_a_child_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    done = threading.Event()
    others = [threading.Thread(target=done.wait) for _ in range(threads)]
    for other in others:
        other.start()
    start = subprocess.Popen

    def interrupted(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **settings)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    before = children()
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    # A shell's background jobs begin with interrupts ignored.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Child(["emulate"], tmp_path / "log"):
            pytest.fail("the block was entered")
    finally:
        signal.signal(signal.SIGINT, earlier)
        done.set()
    assert children() == before


def emulator(folder: Path) -> tuple[Child, Path]:
    ready = folder / "ready.json"
    port = str(free_ports(2))
    return Child([*EMULATE, "--port", port, "--json", str(ready)], folder / "log"), ready


def test_a_child_ends_with_its_block(tmp_path: Path) -> None:
    child, ready = emulator(tmp_path)
    before = children()
    with child:
        child.until(lambda: ready.exists() or None, 60)
        assert child.exit_code is None
        assert len(children() - before) == 1
    assert child.exit_code == 0
    assert children() == before


def test_a_child_ends_with_an_exception(tmp_path: Path) -> None:
    child, ready = emulator(tmp_path)
    before = children()
    with pytest.raises(ZeroDivisionError), child:
        child.until(lambda: 1 // 0 if ready.exists() else None, 60)
    assert children() == before


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    said = "evenstep emulate ended with 2: error: --workers"
    child = Child(["emulate", "--workers", "0"], tmp_path / "log")
    with child, pytest.raises(EvenstepError, match=said):
        child.until(lambda: None, 60)


def test_a_child_that_does_not_get_ready(tmp_path: Path) -> None:
    child, ready = emulator(tmp_path)
    with child:
        child.until(lambda: ready.exists() or None, 60)
        with pytest.raises(EvenstepError, match=r"was not ready within 0.1 s:"):
            child.until(lambda: None, 0.1)


def test_a_child_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    child, ready = emulator(tmp_path)
    with child:
        child.until(lambda: ready.exists() or None, 60)
        assert child.finish(0.1) == 0


def test_a_child_that_ignores_signals_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loadgen.run.child_processes, "GRACE_S", 0.1)
    child, ready = emulator(tmp_path)
    before = children()
    with child:
        child.until(lambda: ready.exists() or None, 60)
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)
    assert child.exit_code == -signal.SIGKILL


def test_termination_is_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), signals_as_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_free_ports_are_free_and_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        around = range(port - 150, port + 150)
        monkeypatch.setattr(loadgen.run.child_processes, "PORTS", around)
        # Other programs hold ports of this range too: few in a row are always to be had.
        first = free_ports(4)
        assert port not in range(first, first + 4)


def test_no_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loadgen.run.child_processes, "_is_free", lambda _port: False)
    with pytest.raises(ConfigError, match="no 3 consecutive free ports"):
        free_ports(3)


def test_a_run_whose_router_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    before = children()
    plan = RunPlan("nonsense", Dispatch.POOL, requests=5, cap_tokens=9, seed=0, time_scale=1.0)
    with pytest.raises(EvenstepError, match=r"evenstep serve ended with 2: .*nonsense"):
        execute(plan, Fleet(workers=2), tmp_path, timeout_s=20)
    assert children() == before


def sent(url: str) -> int:
    """Requests at a router that are not answered."""
    groups = httpx.get(f"{url}/health", timeout=60).json()["groups"].values()
    at_workers = sum(worker["in_flight"] for group in groups for worker in group["workers"])
    return int(at_workers + sum(group["pool_requests"] for group in groups))


def test_a_run_that_takes_too_long_counts_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time ends once all have been sent, however long that takes; the first answer is far."""
    finish, arguments, urls = Child.finish, loadgen.demo.run.replay_arguments, list[str]()

    def noted(plan: RunPlan, fleet: Fleet, url: str, file: Path) -> list[str]:
        urls.append(url)
        return arguments(plan, fleet, url, file)

    def finish_once_sent(child: Child, timeout_s: float) -> int:
        wait_until(lambda: sent(urls[0]) == 9, 180, "all have been sent")
        return finish(child, timeout_s)

    monkeypatch.setattr(loadgen.demo.run, "replay_arguments", noted)
    monkeypatch.setattr(Child, "finish", finish_once_sent)
    plan = RunPlan("jsq", Dispatch.POOL, requests=9, cap_tokens=400, seed=0, time_scale=500.0)
    before = children()
    outcome = execute(plan, Fleet(workers=2, slots=2), tmp_path, timeout_s=0.1)
    assert not outcome.complete
    assert outcome.report["interrupted"] is True
    assert outcome.report["lost"] == 9
    assert children() == before
    wait_until(lambda: not list(tmp_path.glob("*.ready")), 60, "the ready file is gone")
