"""A run recorded by a real router, then replayed and simulated."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.traces.recordings import load_recording
from loadgen.traces.trace import load_trace
from router.recording.lines import Recording, read
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.replays import run_replay
from tests.support.server import free_port, running_router

REQUESTS = 120
PER_TOKEN_S = 1e-6
STEP_TIME = ("--step-time", f"5e-3,{PER_TOKEN_S}")
FLEET = ("--workers", "4", "--slots", "8", "--kv-tokens", "40000", *STEP_TIME)
EVENSTEP = [sys.executable, "-m", "router.cli"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A replayed trace, and what the router recorded of it: in its file, and over HTTP."""

    fleet: Fleet
    trace: Path
    file: Path
    recording: Recording
    streamed: Recording


def listen(admin: int) -> Recording:
    """The first lines, of which most are of steps."""
    url, minute = f"http://127.0.0.1:{admin}/recording", {"seconds": 60}
    with httpx.stream("GET", url, params=minute, timeout=90) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [f"{line}\n".encode() for line in islice(answer.iter_lines(), REQUESTS + 80)]
    return read(lines, "streamed")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("recorded")
    trace, file, rng = folder / "trace.csv", folder / "run.jsonl.gz", random.Random(7)
    prompts = rng.sample(range(20, 900), REQUESTS)
    rows = [f"{prompt},{rng.randrange(1, 60)}" for prompt in prompts]
    trace.write_text("\n".join(["Request tokens,Response tokens", *rows]))
    admin = free_port()
    # Of so few steps the cost is not learned well where the machine is busy: it is told.
    flags = ["--policy", "least_tokens", *STEP_TIME]
    flags += ["--record", str(file), "--admin-port", str(admin)]
    with running_fleet(folder, *FLEET) as fleet, ThreadPoolExecutor(1) as pool:
        with running_router(folder, *worker_flags(fleet), *flags) as router:
            streamed = pool.submit(listen, admin)
            report = run_replay(router.url, folder / "report.json", "--trace", str(trace))
            assert report["completed"] == REQUESTS
            streamed.result()
        yield Recorded(fleet, trace, file, load_recording(file), streamed.result())


def lengths(path: Path) -> dict[int, int]:
    """Output tokens by prompt tokens, of which no two requests have the same."""
    return {row.prompt_tokens: row.output_tokens for row in load_trace(path).requests}


def test_requests_have_the_lengths_that_were_sent_and_their_times(recorded: Recorded) -> None:
    sent, seen = lengths(recorded.trace), lengths(recorded.file)
    assert seen.keys() == sent.keys()
    # An answer may be complete before the snapshots of its last steps have come.
    assert sum(seen.values()) == pytest.approx(sum(sent.values()), rel=0.01)
    for line in recorded.recording.requests:
        times = (line.arrival_s, line.dispatched_s, line.first_token_s, line.ended_s)
        assert None not in times
        assert list(times) == sorted(times)  # type: ignore[type-var]
        assert line.outcome == "completed"
    assert {line.worker for line in recorded.recording.requests} == {
        worker.id for worker in recorded.recording.header.groups["default"].workers
    }


def test_the_header_knows_the_run(recorded: Recorded) -> None:
    header = recorded.recording.header
    assert (header.source, header.policy, header.dispatch) == ("serve", "least_tokens", "pool")
    workers = header.groups["default"].workers
    assert [(worker.rank, worker.slots) for worker in workers] == [(r, 8) for r in range(4)]
    assert all(39_000 < (worker.kv_tokens or 0) <= 40_000 for worker in workers)


def test_steps_show_who_waits_for_whom(recorded: Recorded) -> None:
    steps = recorded.recording.steps
    assert len(steps) > 100
    assert [step.step for step in steps] == sorted({step.step for step in steps})
    busy = [step for step in steps if step.imbalance_tokens]
    # A rank's message may come after another's next one, and then the rank is not in the step: how
    # often, says how busy the machine is. After several there seems to be no barrier for a while.
    assert sum(step.together for step in steps) > 0.75 * len(steps)
    known = [step for step in busy if step.waiting_s is not None]
    assert len(known) > 0.5 * len(busy)
    for step in known:
        assert step.together
        waiting_s = PER_TOKEN_S * step.imbalance_tokens
        assert step.waiting_s == pytest.approx(waiting_s, rel=1e-5, abs=2e-9)
    assert max(step.pool for step in steps) > 8
    assert max(max(filter(None, step.running), default=0) for step in steps) == 8


def test_the_admin_port_tells_the_same_as_the_file(recorded: Recorded) -> None:
    assert recorded.streamed.header.groups == recorded.recording.header.groups
    assert all(one in recorded.recording.requests for one in recorded.streamed.requests)
    numbers = [step.step for step in recorded.streamed.steps]
    among = [step for step in recorded.recording.steps if step.step in set(numbers)]
    assert recorded.streamed.steps == tuple(among)
    assert len(numbers) > 50


def test_a_recording_is_replayed_at_its_own_times(recorded: Recorded, tmp_path: Path) -> None:
    flags = ("--trace", str(recorded.file), "--arrivals", "trace")
    report = run_replay(recorded.fleet.server.url, tmp_path / "again.json", *flags)
    assert (report["completed"], report["trace_format"]) == (REQUESTS, "recording")
    assert report["total_output_tokens"] == sum(lengths(recorded.file).values())


def test_a_recording_is_simulated(recorded: Recorded) -> None:
    flags = ["--trace", str(recorded.file), "--arrivals", "trace", "--policy", "least_tokens"]
    flags += ["--workers", "4", "--slots", "8", "--steps", "100000", "--warmup", "0"]
    done = subprocess.run(
        [*EVENSTEP, "simulate", "decode", *flags, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["completed"] == REQUESTS


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    command = [*EVENSTEP, "serve", "--port", "0", "--worker", "http://127.0.0.1:9"]
    done = subprocess.run(
        [*command, "--record", str(tmp_path), "--policy", "fcfs"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"--record: cannot write {tmp_path}: Is a directory; give another" in done.stderr
