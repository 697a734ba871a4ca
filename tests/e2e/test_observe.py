"""``evenstep observe`` beside a plain proxy, against what the fleet itself has recorded."""

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.emulator.record import StepRecord, read_record
from loadgen.traces.recordings import load_recording
from loadgen.traces.trace import load_trace
from router.recording.lines import Recording
from tests.support.fleet import running_fleet, worker_flags
from tests.support.replays import run_replay
from tests.support.round_robin import round_robin
from tests.support.server import Server, free_port, running, wait_until

WORKERS = 4
PER_TOKEN_S = 1e-6
FLEET = ("--workers", str(WORKERS), "--slots", "8", "--kv-tokens", "60000")
OBSERVE = [sys.executable, "-m", "router.cli", "observe"]


@dataclass(frozen=True, slots=True)
class Observed:
    """What the observer said, and what the fleet has recorded.

    Attributes:
        report: of ``--json``; lines: printed; pages: from its admin port, by path.
        truth: by step.
    """

    report: dict[str, Any]
    lines: list[str]
    pages: dict[str, httpx.Response]
    recording: Recording
    truth: dict[int, StepRecord]
    sent: Counter[tuple[int, int]]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("observed")
    truth, said, file = folder / "truth.csv", folder / "said.json", folder / "seen.jsonl"
    port = free_port()
    # Of those that end in their first step no engine shows anything.
    drawn = [row for row in load_trace("burstgpt").sample(300, 0) if row.output_tokens > 1]
    sent = Counter((row.prompt_tokens, min(120, row.output_tokens)) for row in drawn)
    trace = folder / "trace.csv"
    rows = [f"{prompt},{output}" for prompt, output in sent.elements()]
    trace.write_text("\n".join(["Request tokens,Response tokens", *rows]))
    # Told, for what is learned of so few steps on a busy machine may be far off.
    step_time = ("--step-time", f"5e-3,{PER_TOKEN_S}")
    with running_fleet(folder, *FLEET, *step_time, "--record", str(truth)) as fleet:
        command = [*OBSERVE, *worker_flags(fleet), "--admin-port", str(port), "--every", "1"]
        command += [*step_time, "--record", str(file), "--json", str(said)]
        first = fleet.server.port
        with (
            running(command, port, folder / "observe.log") as observer,
            round_robin(range(first, first + WORKERS)) as url,
        ):
            requests = ("--trace", str(trace), "--arrivals", "closed:40")
            report = run_replay(url, folder / "replay.json", *requests)
            assert report["completed"] == len(rows)
            wait_until(lambda: steps_seen(observer) == fleet.state()["steps"], 60, "all is seen")
            pages = {path: observer.get(path) for path in ("/health", "/metrics", "/")}
            observer.process.send_signal(signal.SIGTERM)
            assert observer.process.wait(60) == 0
            lines = observer.log.read_text().splitlines()
    steps = {row.step: row for row in read_record(truth)}
    said_at_end = json.loads(said.read_text())
    return Observed(said_at_end, lines, pages, load_recording(file), steps, sent)


def steps_seen(observer: Server) -> float:
    lines = observer.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("evenstep_barrier_steps_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def idle_share(rows: list[StepRecord]) -> float:
    """Of the workers' time, by the step time that the fleet was given."""
    gaps = [WORKERS * max(row.load_tokens) - sum(row.load_tokens) for row in rows]
    return PER_TOKEN_S * sum(gaps) / (WORKERS * sum(row.step_s for row in rows))


def test_loads_are_those_of_the_fleet_exactly(observed: Observed) -> None:
    """With the token that each request gains in the step, which the fleet does not count yet."""
    seen = [step for step in observed.recording.steps if step.step in observed.truth]
    assert len(seen) == len(observed.truth)
    # A rank whose message comes after another's next one is not in the step, which says so: how
    # often, says how busy the machine is.
    whole = [step for step in seen if step.together]
    assert len(whole) > 0.75 * len(seen)
    for step in whole:
        row = observed.truth[step.step]
        held = [load - ran for load, ran in zip(step.loads, step.running, strict=True)]  # type: ignore[operator]
        assert tuple(held) == row.load_tokens
        assert tuple(step.running) == row.running


def test_the_idle_share_is_the_fleets_own(observed: Observed) -> None:
    known = [step.step for step in observed.recording.steps if step.waiting_s is not None]
    truth = idle_share([observed.truth[step] for step in known])
    group = observed.report["groups"]["default"]
    assert group["idle_share"] == pytest.approx(truth, rel=0.02)
    assert truth > 0.1
    assert len(known) > 0.5 * len(observed.truth)
    assert (group["workers_up"], group["idle_share_source"]) == (WORKERS, "modelled")


def test_requests_are_seen_with_their_lengths(observed: Observed) -> None:
    recording = observed.recording
    seen = Counter((line.prompt_tokens, line.output_tokens) for line in recording.requests)
    assert seen == observed.sent
    assert observed.report["requests"] == observed.sent.total()
    assert {line.outcome for line in recording.requests} == {"completed"}
    assert all(line.dispatched_s is None for line in recording.requests)
    assert recording.header.source == "observe"


def test_the_admin_port_tells_it_as_well(observed: Observed) -> None:
    health = observed.pages["/health"].json()
    assert health["status"] == "ok"
    assert all(worker["up"] for worker in health["groups"]["default"])
    metrics = observed.pages["/metrics"].text
    assert 'evenstep_barrier_steps_total{group="default",pool="empty"}' in metrics
    assert "evenstep_requests_total" not in metrics, "nothing is routed here"
    assert "<html" in observed.pages["/"].text


def test_every_line_and_the_last_one_say_what_it_costs(observed: Observed) -> None:
    said = [line for line in observed.lines if "waiting for the fullest: " in line]
    assert len(said) > 2
    share = observed.report["groups"]["default"]["idle_share"]
    assert said[-1].startswith("all      default: ")
    assert f"{share:.1%} of the workers' time, modelled" in said[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no workers: give each one that steps with the others, as in --worker http"),
        (["--worker", "http://127.0.0.1:9"], "worker 127.0.0.1:9 has no snapshots=ENDPOINT"),
    ],
)
def test_what_cannot_be_observed_is_refused(flags: list[str], message: str) -> None:
    done = subprocess.run(
        [*OBSERVE, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_it_ends_with_a_report_when_nobody_reads_its_lines_any_more(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    worker = f"http://127.0.0.1:9,snapshots=ipc://{tmp_path}/nobody"
    command = [*OBSERVE, "--worker", worker, "--every", "0.1", "--json", str(said)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as observer:
        assert observer.stdout is not None
        assert observer.stderr is not None
        assert b"no snapshots arrive" in observer.stdout.readline()
        observer.stdout.close()
        assert b"Traceback" not in observer.stderr.read()
        assert observer.wait(60) == 1
    assert json.loads(said.read_text())["groups"]["default"]["workers_up"] == 0
