"""``evenstep demo`` as a user types it, in a small form, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.emulator.record import read_record
from tests.bench.bench_demo_bar import FORM
from tests.support.server import wait_until

DEMO = [sys.executable, "-m", "router.cli", "demo"]
# Faster than the machine can step: the figures mean nothing, the parts all work.
SMALL = ["--requests", "200", "--time-scale", "0.2"]


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, directly or not."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    own = {int(child) for child in listed.split()}
    return own.union(*map(descendants, own))


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def test_small_demo(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [*DEMO, *SMALL, "--policies", "jsq,bfio", "--out", str(out), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert set(summary) == {"decode", "prompts"}
    for world in summary.values():
        runs = [f"{run['policy']}-{run['dispatch']}" for run in world["runs"]]
        assert runs == ["jsq-instant", "bfio-pool"]
        assert {run["complete"] for run in world["runs"]} == {True}
        assert {run["replay"]["lost"] for run in world["runs"]} == {0}
        assert world["conditions"]["requests"] == 200
        assert world["calibration"] == []
    assert done.stderr.count("not a GPU's gain") == 2
    for name in ("loads.png", "power.png", "prompts.png"):
        assert (out / name).stat().st_size > 10_000
    for run in summary["decode"]["runs"]:
        steps = read_record(out / "decode" / run["record"])
        tokens = sum(sum(step.running) for step in steps)
        assert tokens == run["replay"]["total_output_tokens"]
    for run in summary["prompts"]["runs"]:
        # The system prompts alone are half of the prompts.
        assert 0.4 < run["replay"]["cached_prompt_share"] < 1
        assert 0 < run["replay"]["cluster"]["whole"]["idle_share"] < 1


def test_the_routers_figures_agree_with_the_fleets(tmp_path: Path) -> None:
    command = [*DEMO, "--worlds", "decode", "--policies", "bfio", "--out", str(tmp_path)]
    command += ["--requests", "900", "--time-scale", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "summary.json").read_text())["decode"]["runs"]
    truth, seen = run["steps_whole"], run["replay"]["cluster"]["whole"]
    assert seen["steps"] == pytest.approx(truth["steps"], rel=0.02)
    assert seen["mean_load_tokens"] == pytest.approx(truth["mean_load_tokens"], rel=0.03)
    assert seen["energy_j_per_output_token"] == pytest.approx(truth["energy_j_per_token"], rel=0.05)


def test_bfio_is_as_much_better_here_as_the_bar_says(tmp_path: Path) -> None:
    """Measured now, on this machine, unless the demo finds that too busy."""
    command = [*DEMO, *FORM, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    world = json.loads((tmp_path / "summary.json").read_text())["decode"]
    assert f"BF-IO's bar: {world['verdict']}"[:60] in " ".join(done.stdout.split())
    if world["verdict"].startswith("not measured"):
        pytest.skip(world["verdict"])
    assert world["verdict"].startswith("met: throughput x "), world["comparison"]


def test_a_demo_without_time_says_so_and_ends(tmp_path: Path) -> None:
    """Trial and first run get 10 seconds each; others do not begin."""
    command = [*DEMO, "--worlds", "decode", "--policies", "jsq,bfio"]
    command += ["--requests", "100000", "--seconds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "bfio, pool dispatch: not measured, the time is over" in said
    world = json.loads((tmp_path / "summary.json").read_text())["decode"]
    (run,) = world["runs"]
    assert run["policy"] == "jsq"
    assert run["not_measured"].endswith("when the time was over: give more --seconds")
    assert world["comparison"] is None
    assert world["verdict"].startswith("not measured: jsq-instant: ")
    assert "jsq - - - - - - -" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*DEMO, "--out", str(tmp_path), "--requests", "5000", "--time-scale", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        # Fleet, router and replay.
        wait_until(lambda: len(descendants(process.pid)) == 3, 60, "a run")
        started = descendants(process.pid)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "nothing was left running" in said
    assert alive(started) == set()
    assert os.getpid() not in started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "jsq,fastest"), "--policies: unknown policy 'fastest'"),
        (("--worlds", "mars"), "--worlds: unknown world 'mars'; known: decode, prompts"),
        (("--out", "/dev/null/demo"), "--out: cannot write to /dev/null/demo"),
        (("--time-scale", "0"), "--time-scale"),
        (("--json", "no/x.json"), "--json: cannot write no/x.json: there is no folder no"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
