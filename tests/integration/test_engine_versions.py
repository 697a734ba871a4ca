"""The plug-in with the schedulers of each version of vLLM that it supports, without a model.

All but the CPU engine's own are there as Python files alone, imported in its environment. A new
release is one line of ``RELEASES``; the oldest, the CPU engine's and the newest are tested longest.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_patches.plugin.compat import TESTED_VERSIONS
from tests.support.admission_schedulers import REQUESTS
from tests.support.decided_schedulers import REASONS
from tests.support.engine import Installation
from tests.support.engine_python import hidden_lengths, real_schedulers
from tests.support.engine_sources import sources

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

# None: installed as a whole.
RELEASES = {
    "0.26": "0.26.0",
    "0.27": "0.27.1",
    "0.28": "0.28.0",
    "0.29": "0.29.0",
    "0.30": "0.30.0",
    "0.31": "0.31.0",
    "0.32": None,
    "0.33": "0.33.0",
}
LONGEST = ("0.26", "0.32", "0.33")

STATES = 1000
# What each does in one process, by steps: to import vLLM takes longer than most of it.
BETWEEN = {
    "names": 0,
    "capacity": STATES,
    "agents": 0,
    "admission": 0,
    **dict.fromkeys(("check", "remote", "drafts", "sessions", "decided", "bounded"), 100),
}
LONG = {
    **BETWEEN,
    **dict.fromkeys(("check", "remote", "sessions"), 300),
    "decided": 670,
    "bounded": 400,
}
MODEL = {"model": 400}  # but for 0.26, which counts a lookup that found no memory
LAST = {"hidden": 40}  # it changes what later tasks would find


@dataclass(frozen=True, slots=True)
class Told:
    """What a version's schedulers did, by task."""

    version: str
    by_task: Mapping[str, Any]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, engine_installation: Installation) -> Told:
    version: str = request.param
    tasks = BETWEEN
    if version in LONGEST:
        tasks = LONG | ({} if version == "0.26" else MODEL) | LAST
    files = python_files(engine_installation, version)
    report = real_schedulers(engine_installation, tasks, files)
    return Told(version, report)


each = pytest.mark.parametrize("told", RELEASES, indirect=True, scope="module")
between = pytest.mark.parametrize(
    "told", [one for one in RELEASES if one not in LONGEST], indirect=True, scope="module"
)
longest = pytest.mark.parametrize("told", LONGEST, indirect=True, scope="module")


def test_all_versions_are_here() -> None:
    assert tuple(RELEASES) == TESTED_VERSIONS
    assert (min(RELEASES), "0.32", max(RELEASES)) == LONGEST


@each
def test_everything_that_is_read_is_there(told: Told) -> None:
    nothing = {"version": told.version, "missing": [], "end_signal": []}
    assert told.by_task["names"] == nothing


@pytest.mark.parametrize("version", RELEASES)
def test_hidden_lengths_take_one_operation_a_step(
    engine_installation: Installation, version: str
) -> None:
    files = python_files(engine_installation, version)
    report = hidden_lengths(engine_installation, 500, files)
    assert (report["wrong"], report["elsewhere"]) == (0, 0)
    assert report["ended"] > 30
    write, make = "aten.index_put_.default", "aten.lift_fresh.default"
    assert report["quiet"].keys() == {write, "none hidden: []"}
    assert report["other"].keys() == {write, ",".join([make] * 3 + [write]), "none hidden: []"}


@each
def test_what_fits_is_what_vllm_lets_in(told: Told) -> None:
    """The router, the gate and vLLM agree, for the KV groups of real models."""
    report = told.by_task["capacity"]
    assert len(report) == 7
    for model, by_scheduler in report.items():
        for scheduler, seen in by_scheduler.items():
            where = told.version, model, scheduler
            assert seen["states"] == STATES // 2, where
            assert 0.05 < seen["fits"] / seen["states"] < 0.95, where
            # With steps ahead, cached states of Mamba become free at times not followed here.
            late = (model, scheduler) == ("Bamba 9B, cached", "EvenstepAsyncScheduler")
            most = 0.03 * seen["states"] if late else 0
            assert max(seen["gate"], seen["router"]) <= most, where
            assert seen["alone"] == 0, where


@each
def test_agents_on_one_prompt_run_side_by_side(told: Told) -> None:
    """40 of them, where memory is for six such prompts."""
    for seen in told.by_task["agents"].values():
        assert seen["together"] >= 35
        assert seen["preempted"] == 0
        assert seen["ended"] == 40


@between
def test_versions_between(told: Told) -> None:
    """Each task compares by itself, step by step; here it is seen that it had something to."""
    report = told.by_task
    for name in ("check", "remote", "drafts", "sessions"):
        for seen in report[name].values():
            assert seen["steps"] > 80
    decided = [seen for cases in report["decided"].values() for seen in cases.values()]
    assert sum(seen["schedules"] for seen in decided) == 15 * 100
    assert sum(seen["lora"] + seen["grammar"] for seen in decided) > 20
    assert report["bounded"]["admission"]["preempted"] == 0
    for by_policy in report["admission"].values():
        assert by_policy["memory_checked"]["preempted"] == 0
        for seen in by_policy.values():
            assert seen["ended"] + seen["aborted"] == REQUESTS


@longest
@pytest.mark.parametrize("kv", ["check", "remote"])
def test_snapshots_are_exact(told: Told, kv: str) -> None:
    """With ``remote``, KV also comes from other engines, at once or later, and is held for them."""
    for seen in told.by_task[kv].values():
        assert seen["steps"] > 250
        assert min(seen.values()) > 0


@longest
def test_sessions_are_told_input_by_input(told: Told) -> None:
    """Snapshots, the prefix cache, and the number by which the end signal knows them."""
    for seen in told.by_task["sessions"].values():
        assert seen["steps"] > 250
        assert min(seen.values()) > 5


@pytest.mark.parametrize("told", LONGEST[1:], indirect=True, scope="module")
def test_the_engine_model_schedules_caches_and_preempts_alike(told: Told) -> None:
    report = told.by_task["model"]
    for seen in report["whole"]:
        assert min(seen.values()) > 0
    for seen in report["chunks"]:
        assert seen["hits"] > 0


@longest
def test_admission_keeps_its_books_and_the_memory(told: Told) -> None:
    """What the policies' ledgers have is compared with vLLM's after every step."""
    for by_policy in told.by_task["admission"].values():
        assert by_policy["memory_checked"]["preempted"] == 0
        assert by_policy["off"]["preempted"] > 2 * by_policy["headroom"]["preempted"]
        assert by_policy["sessions"]["turns"] > 0
        for seen in by_policy.values():
            assert seen["ended"] + seen["aborted"] == REQUESTS
            assert min(seen["steps"], seen["most_waiting"], seen["aborted"]) > 0


@longest
def test_only_those_enter_whom_admission_chose(told: Told) -> None:
    """10,000 schedules, in which vLLM passes over requests for each of its reasons."""
    total: Counter[str] = Counter()
    for cases in told.by_task["decided"].values():
        for seen in cases.values():
            total.update(seen)
    assert total["schedules"] > 10_000
    # 0.26 waits neither for an encoder's output nor for late tokens.
    common = ("entered", "full", "grammar", "lora", "connector")
    reasons = common if told.version == "0.26" else (*common, *REASONS)
    assert min(total[name] for name in reasons) > 5


@longest
def test_without_any_one_name_an_engine_serves_and_says_what_it_lacks(told: Told) -> None:
    """Hidden from the plug-in in turn; all else that is told is compared with what vLLM has."""
    for seen in told.by_task["hidden"].values():
        assert seen["names"] > 110
        assert seen["steps"] > 100
        assert seen["wrong"] == {}


@longest
def test_prompt_budgets_are_kept(told: Told) -> None:
    report = dict(told.by_task["bounded"])
    assert report.pop("admission")["preempted"] == 0
    for seen in report.values():
        assert min(seen.values()) > 0


def python_files(engine: Installation, version: str) -> Path | None:
    """Where they are; None for the version that is installed as a whole."""
    release = RELEASES[version]
    return None if release is None else sources(release, engine.python)
