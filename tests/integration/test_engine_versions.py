"""The plug-in with the schedulers of each version of vLLM that it supports, without a model.

0.26 and 0.33 are there as Python files alone, imported in the CPU engine's environment.
"""

from __future__ import annotations

from typing import Any

import pytest

from deploy.engine.sources import sources
from engine_patches.compat import TESTED_VERSIONS
from tests.support.engine import Installation
from tests.support.engine_python import real_schedulers

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

RELEASES = {"0.26": "0.26.0", "0.32": None, "0.33": "0.33.0"}


def test_all_versions_are_here() -> None:
    assert tuple(RELEASES) == TESTED_VERSIONS


@pytest.mark.parametrize("version", RELEASES)
def test_everything_that_is_read_is_there(engine_installation: Installation, version: str) -> None:
    assert task(engine_installation, version, "names", 0) == {
        "version": version,
        "missing": [],
        "end_signal": [],
    }


@pytest.mark.parametrize("version", RELEASES)
def test_snapshots_are_exact(engine_installation: Installation, version: str) -> None:
    report = task(engine_installation, version, "check", 300)
    for flavour in ("EvenstepScheduler", "EvenstepAsyncScheduler"):
        assert report[flavour]["steps"] > 250
        assert min(report[flavour].values()) > 0


def task(engine: Installation, version: str, name: str, steps: int) -> dict[str, Any]:
    release = RELEASES[version]
    path = None if release is None else sources(release, engine.python)
    return real_schedulers(engine, name, steps, path)
