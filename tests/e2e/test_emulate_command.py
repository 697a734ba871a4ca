import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.emulator.record import read_record
from router.config.worker_notation import parse_worker
from tests.support.server import free_port, wait_until

EMULATE = [sys.executable, "-m", "router.cli", "emulate"]


@contextmanager
def emulating(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    ready = folder / "ready.json"
    process = subprocess.Popen(
        [*EMULATE, "--port", str(free_port(16)), "--json", str(ready), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(ready.exists, 60, "the ready file")
        yield process, json.loads(ready.read_text())
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_what_runs_and_ends_when_told(tmp_path: Path, number: signal.Signals) -> None:
    record = tmp_path / "steps.csv.gz"
    # Not the address of the state streams: those have no keys, and stay where no other machine is.
    flags = ["--workers", "2", "--slots", "5", "--record", str(record), "--host", "127.0.0.2"]
    with emulating(tmp_path, *flags) as (process, ready):
        assert ready["emulated"] is True
        specs = [worker["spec"] for worker in ready["workers"]]
        first = ready["workers"][0]
        assert first["url"].startswith("http://127.0.0.2:")
        assert first["snapshots"].startswith("tcp://127.0.0.1:")
        assert [parse_worker(spec).rank for spec in specs] == [0, 1]
        assert specs[0] == (
            f"{first['url']},group=default,rank=0,slots=5,snapshots={first['snapshots']}"
        )
        body = {"prompt": [1], "max_tokens": 5}
        answer = httpx.post(f"{first['url']}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert httpx.get(f"{ready['control']}/fleet", timeout=60).json()["steps"] == 5
        endless = {"prompt": [1], "max_tokens": 9999, "ignore_eos": True, "stream": True}
        url = f"{first['url']}/v1/completions"
        with httpx.stream("POST", url, json=endless, timeout=60) as stream:
            next(stream.iter_lines())
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)  # the stream would last longer
        assert process.returncode == 0
        assert "emulated" in output
        assert all(f"--worker {spec}" in output for spec in specs)
        assert "Traceback" not in output
        assert "ASGI" not in output
        assert len(read_record(record)) >= 5


def test_prefill_workers_are_named_and_stay_out_of_the_record(tmp_path: Path) -> None:
    record = tmp_path / "steps.csv"
    flags = ["--workers", "1", "--prefill-workers", "1", "--kv-expiry", "600"]
    with emulating(tmp_path, *flags, "--record", str(record)) as (process, ready):
        answers, prefills = ready["workers"]
        assert (answers["role"], prefills["role"]) == ("both", "prefill")
        assert "role=" not in answers["spec"]
        assert prefills["spec"] == (
            f"{prefills['url']},group=default,role=prefill,rank=1,slots=72,"
            f"snapshots={prefills['snapshots']}"
        )
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": keep}
        answer = httpx.post(f"{prefills['url']}/v1/completions", json=body, timeout=60).json()
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        body["kv_transfer_params"] = answer["kv_transfer_params"]
        assert httpx.post(f"{answers['url']}/v1/completions", json=body, timeout=60).is_success
        fleet = httpx.get(f"{ready['control']}/fleet", timeout=60).json()
        assert fleet["prefill_steps"] == 1
        assert [worker["kv_handoff"]["fetched"] for worker in fleet["workers"]] == [0, 1]
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert f"--worker {prefills['spec']}" in output
    assert "1 more that only prefill" in output
    rows = read_record(record)
    assert len(rows) >= 4
    assert {len(row.load_tokens) for row in rows} == {1}


def test_json_to_stdout_is_one_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*EMULATE, "--port", str(free_port()), "--workers", "1", "--no-snapshots", "--json", "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    process.terminate()
    assert process.communicate(timeout=60)[0] == ""
    assert ready["workers"][0]["snapshots"] is None
    assert "snapshots" not in ready["workers"][0]["spec"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--step-time", "fast"], "--step-time"),
        (["--speed", "1,2,3"], "--speed"),
        (["--slots", "0"], "--slots"),
        (["--prefill-workers", "-1"], "--prefill-workers"),
        (["--prefill-chunk", "100"], "--batch-tokens"),
        (["--record", "/nonexistent/steps.csv"], "steps.csv"),
        (["--json", "/nonexistent/ready.json"], "ready.json"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(flags: list[str], word: str) -> None:
    command = [*EMULATE, "--workers", "2", "--port", str(free_port()), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with emulating(tmp_path, "--workers", "1") as (_, ready):
        port = ready["workers"][0]["url"].rpartition(":")[2]
        done = subprocess.run(
            [*EMULATE, "--workers", "1", "--port", port, "--snapshot-port", str(free_port(2))],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert port in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
