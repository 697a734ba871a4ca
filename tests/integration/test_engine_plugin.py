"""The plug-in inside a real vLLM, beside what vLLM counts itself."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.traces.recordings import load_recording
from router.core.wire import request_token
from tests.support.core import token
from tests.support.engine import MODEL, Installation
from tests.support.engine_python import real_schedulers
from tests.support.engine_watch import WAIT_S, Watched, changes, counted, told, watching
from tests.support.server import free_port, running, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCKS = 24
SLOTS = 8
MAX_TOKENS = 120
FLAGS = (
    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
    *("--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-seqs", str(SLOTS)),
    *("--max-model-len", "512", "--max-num-batched-tokens", "128", "--enable-prefix-caching"),
    *("--logits-processors", "engine_patches.end_signal:EndSignal"),
    "engine_patches.hidden_length:HiddenLength",
)


@pytest.fixture(scope="module")
def watched(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("plugin")
    with watching(engine_installation, folder, *FLAGS, end_signal=True) as watched:
        yield watched


def test_snapshots_say_what_vllm_counts(watched: Watched) -> None:
    assert watched.complete(0, range(1, 13), MAX_TOKENS) == 12 * MAX_TOKENS
    watched.rest()

    snapshots = told(watched.stream.snapshots)
    counts = counted(watched.counts, BLOCKS)
    assert [moment for moment, *_ in snapshots] == [moment for moment, _ in counts]
    assert all(mine >= theirs for (_, mine, _), (_, theirs) in zip(snapshots, counts, strict=True))
    settled = [
        (mine, theirs)
        for (_, mine, done), (_, theirs) in zip(snapshots, counts, strict=True)
        if done
    ]
    assert all(mine == theirs for mine, theirs in settled)
    assert snapshots[-1][1] == counts[-1][1] > 0
    assert len(counts) > MAX_TOKENS
    assert max(moment.running for moment, _ in counts) > 3


def test_every_request_is_found_again_by_its_token(watched: Watched) -> None:
    first = len(watched.stream.snapshots)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(watched.complete, range(20, 24), [[5]] * 4, (5, 1, 9, 2)))
    watched.rest()

    messages = watched.stream.snapshots[first:]
    finished = [request_token(id_) for one in messages for id_ in one.finished]
    shown = {request_token(row.id) for one in messages for row in one.running}
    assert sorted(filter(None, finished)) == [token(number) for number in range(20, 24)]
    assert shown == set(finished)
    assert {(one.group, one.worker, one.rank) for one in messages} == {("g", "w", 0)}
    assert {one.slots for one in messages} == {SLOTS}


def test_an_observer_sees_every_request_and_its_length(watched: Watched, tmp_path: Path) -> None:
    file, report = tmp_path / "seen.jsonl.gz", tmp_path / "report.json"
    worker = f"{watched.server.url},id=w,group=g,snapshots={watched.endpoint}"
    lengths, port = [1, 2, 9, 30, 17, 1, 40, 5, 12, 3], free_port()
    command = [sys.executable, "-m", "router.cli", "observe", "--worker", worker]
    command += ["--record", str(file), "--json", str(report), "--admin-port", str(port)]
    with running(command, port, tmp_path / "observe.log") as observer:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(watched.complete, range(60, 70), [[3]] * 10, lengths))
        watched.rest()
        observer.process.terminate()
        assert observer.process.wait(WAIT_S) == 0
    seen = load_recording(file)
    assert sorted(line.output_tokens for line in seen.requests) == sorted(lengths)
    assert {line.outcome for line in seen.requests} == {"completed"}
    told = json.loads(report.read_text())
    assert sum(step.step_s for step in seen.steps) < told["seconds"]
    assert told["requests"] == len(lengths)


def test_a_client_that_hangs_up_is_told(watched: Watched) -> None:
    first = len(watched.stream.snapshots)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": token(30)}
    url = f"{watched.server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=WAIT_S) as answer:
        next(answer.iter_lines())

    def gone() -> bool:
        messages = watched.stream.snapshots[first:]
        return token(30) in [request_token(id_) for one in messages for id_ in one.finished]

    wait_until(gone, WAIT_S, "the end of the request is told")
    watched.rest()
    snapshots = told(watched.stream.snapshots)
    assert changes(m for m, *_ in snapshots) == changes(
        m for m, _ in counted(watched.counts, BLOCKS)
    )


def test_ends_are_told_from_another_process(watched: Watched) -> None:
    """The workers of a CPU engine have processes of their own."""
    first = len(watched.stream.snapshots)
    prompt = {"model": MODEL, "prompt": "x", "max_tokens": 30, "temperature": 0.7}
    httpx.post(f"{watched.server.url}/v1/completions", json=prompt, timeout=WAIT_S)
    wait_until(
        lambda: any(one.finished for one in watched.stream.snapshots[first:]),
        WAIT_S,
        "the stream has shown the request's end",
    )
    rows = [row for one in watched.stream.snapshots[first:] for row in one.running]
    told = [row.end_probability for row in rows if row.end_probability is not None]
    assert told
    assert all(0 < probability < 0.1 for probability in told)  # nearly uniform over 262 tokens


@pytest.mark.parametrize(
    ("hidden", "more", "tokens", "reason"),
    [
        (1, {}, 1, "stop"),
        (37, {"temperature": 0}, 37, "stop"),
        (37, {"min_tokens": 50}, 37, "stop"),
        (37, {"n": 3}, 3 * 37, "stop"),
        (80, {}, 60, "length"),
        (37, {"ignore_eos": True}, 60, "length"),
        (None, {"ignore_eos": True}, 60, "length"),
    ],
)
def test_a_hidden_length(
    watched: Watched, hidden: int | None, more: dict[str, Any], tokens: int, reason: str
) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 60, **more}
    if hidden is not None:
        body["vllm_xargs"] = {"evenstep_output_tokens": hidden}
    answer = httpx.post(f"{watched.server.url}/v1/completions", json=body, timeout=WAIT_S).json()
    assert answer["usage"]["completion_tokens"] == tokens
    assert {choice["finish_reason"] for choice in answer["choices"]} == {reason}


def test_a_hidden_length_that_is_none_is_refused(watched: Watched) -> None:
    body = {"model": MODEL, "prompt": "x", "vllm_xargs": {"evenstep_output_tokens": "many"}}
    answer = httpx.post(f"{watched.server.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 400
    assert "evenstep_output_tokens must be a positive integer" in answer.text


def test_a_replay_gets_the_lengths_of_its_trace(watched: Watched, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    lengths = [5 + 7 * number % 60 for number in range(16)]
    lines = [
        {"timestamp": number, "input_length": 30, "output_length": length, "hash_ids": []}
        for number, length in enumerate(lengths)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "router.cli", "replay", "--url", watched.server.url]
    command += ["--trace", str(trace), "--arrivals", "closed:6", "--max-tokens", "50"]
    subprocess.run([*command, "--json", str(report)], check=True, timeout=2 * WAIT_S)
    told = json.loads(report.read_text())
    assert (told["failed"], told["completed"]) == (0, len(lengths))
    assert told["total_output_tokens"] == sum(min(length, 50) for length in lengths)


@pytest.mark.slow
def test_real_schedulers_under_memory_pressure(engine_installation: Installation) -> None:
    """Both flavours, without a model: the asynchronous one runs on no CPU engine.

    With drafts, requests keep none to three of them in a step.
    """
    report = real_schedulers(engine_installation, {"check": 600, "drafts": 400})

    for flavour in ("EvenstepScheduler", "EvenstepAsyncScheduler"):
        seen, drafting = report["check"][flavour], report["drafts"][flavour]
        assert seen["steps"] > 500
        assert drafting["growths"] > 300
        assert min(*seen.values(), *drafting.values()) > 0


def test_real_schedulers_keep_prompt_budgets(engine_installation: Installation) -> None:
    report = real_schedulers(engine_installation, {"bounded": 400})["bounded"]

    assert report.pop("admission").pop("preempted") == 0
    for seen in report.values():
        assert min(seen.values()) > 0
