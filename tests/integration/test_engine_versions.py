"""The plug-in with the schedulers of each version of vLLM that it supports, without a model.

All but the CPU engine's own are there as Python files alone, imported in its environment. A new
release is one line of ``RELEASES``; the oldest, the CPU engine's and the newest are tested longest.
"""

from collections import Counter
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


def test_all_versions_are_here() -> None:
    assert tuple(RELEASES) == TESTED_VERSIONS
    assert (min(RELEASES), "0.32", max(RELEASES)) == LONGEST


@pytest.mark.parametrize("version", [one for one in RELEASES if one not in LONGEST])
def test_versions_between(engine_installation: Installation, version: str) -> None:
    """Each task compares by itself, step by step; here it is seen that it had something to."""
    report = task(engine_installation, version, "matrix", 100)
    assert report["names"] == {"version": version, "missing": [], "end_signal": []}
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
    check_hidden_lengths(engine_installation, version)


@pytest.mark.parametrize("version", LONGEST)
def test_everything_that_is_read_is_there(engine_installation: Installation, version: str) -> None:
    assert task(engine_installation, version, "names", 0) == {
        "version": version,
        "missing": [],
        "end_signal": [],
    }


@pytest.mark.parametrize("kv", ["check", "remote"])
@pytest.mark.parametrize("version", LONGEST)
def test_snapshots_are_exact(engine_installation: Installation, version: str, kv: str) -> None:
    """With ``remote``, KV also comes from other engines, at once or later, and is held for them."""
    report = task(engine_installation, version, kv, 300)
    for seen in report.values():
        assert seen["steps"] > 250
        assert min(seen.values()) > 0


@pytest.mark.parametrize("version", LONGEST)
def test_sessions_are_told_input_by_input(engine_installation: Installation, version: str) -> None:
    """Snapshots, the prefix cache, and the number by which the end signal knows them."""
    for seen in task(engine_installation, version, "sessions", 300).values():
        assert seen["steps"] > 250
        assert min(seen.values()) > 5


@pytest.mark.parametrize("version", ["0.32", "0.33"])  # 0.26 counts a lookup that found no memory
def test_the_engine_model_schedules_caches_and_preempts_alike(
    engine_installation: Installation, version: str
) -> None:
    report = task(engine_installation, version, "model", 400)
    for seen in report["whole"]:
        assert min(seen.values()) > 0
    for seen in report["chunks"]:
        assert seen["hits"] > 0


@pytest.mark.parametrize("version", LONGEST)
def test_admission_keeps_its_books_and_the_memory(
    engine_installation: Installation, version: str
) -> None:
    """What the policies' ledgers have is compared with vLLM's after every step."""
    report = task(engine_installation, version, "admission", 0)
    for by_policy in report.values():
        assert by_policy["memory_checked"]["preempted"] == 0
        assert by_policy["off"]["preempted"] > 2 * by_policy["headroom"]["preempted"]
        assert by_policy["sessions"]["turns"] > 0
        for seen in by_policy.values():
            assert seen["ended"] + seen["aborted"] == REQUESTS
            assert min(seen["steps"], seen["most_waiting"], seen["aborted"]) > 0


@pytest.mark.parametrize("version", LONGEST)
def test_only_those_enter_whom_admission_chose(
    engine_installation: Installation, version: str
) -> None:
    """10,000 schedules, in which vLLM passes over requests for each of its reasons."""
    report = task(engine_installation, version, "decided", 670)
    total: Counter[str] = Counter()
    for cases in report.values():
        for seen in cases.values():
            total.update(seen)
    assert total["schedules"] > 10_000
    # 0.26 waits neither for an encoder's output nor for late tokens.
    common = ("entered", "full", "grammar", "lora", "connector")
    reasons = common if version == "0.26" else (*common, *REASONS)
    assert min(total[name] for name in reasons) > 5


@pytest.mark.parametrize("version", LONGEST)
def test_without_any_one_name_an_engine_serves_and_says_what_it_lacks(
    engine_installation: Installation, version: str
) -> None:
    """Hidden from the plug-in in turn; all else that is told is compared with what vLLM has."""
    report = task(engine_installation, version, "hidden", 40)
    for seen in report.values():
        assert seen["names"] > 110
        assert seen["steps"] > 100
        assert seen["wrong"] == {}


@pytest.mark.parametrize("version", LONGEST)
def test_prompt_budgets_are_kept(engine_installation: Installation, version: str) -> None:
    report = task(engine_installation, version, "bounded", 400)
    assert report.pop("admission").pop("preempted") == 0
    for seen in report.values():
        assert min(seen.values()) > 0


@pytest.mark.parametrize("version", LONGEST)
def test_hidden_lengths_take_one_operation_a_step(
    engine_installation: Installation, version: str
) -> None:
    check_hidden_lengths(engine_installation, version)


def check_hidden_lengths(engine_installation: Installation, version: str) -> None:
    report = hidden_lengths(engine_installation, 500, python_files(engine_installation, version))
    assert (report["wrong"], report["elsewhere"]) == (0, 0)
    assert report["ended"] > 30
    write, make = "aten.index_put_.default", "aten.lift_fresh.default"
    assert report["quiet"].keys() == {write, "none hidden: []"}
    assert report["other"].keys() == {write, ",".join([make] * 3 + [write]), "none hidden: []"}


def task(engine: Installation, version: str, name: str, steps: int) -> dict[str, Any]:
    return real_schedulers(engine, name, steps, python_files(engine, version))


def python_files(engine: Installation, version: str) -> Path | None:
    """Where they are; None for the version that is installed as a whole."""
    release = RELEASES[version]
    return None if release is None else sources(release, engine.python)
