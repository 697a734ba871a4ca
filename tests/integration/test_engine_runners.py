"""Logits processors of the plug-in in whole engines, with either of vLLM's model runners.

Triton's interpreter runs the second one's kernels, on a CPU. Other releases than the CPU engine's
own: ``make test-releases``.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_engine_releases import ALL
from tests.support.engine import Installation
from tests.support.engine_python import real_engines
from tests.support.engine_sources import serving, triton

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

# 0.31 is the first whose second runner takes a processor of one's own; None: the CPU engine's own.
RELEASES = ("0.31.0", None, "0.33.0")
RUNNERS = [("first", None), *[("second", release) for release in RELEASES]]


def paths(engine: Installation, runner: str, release: str | None) -> list[Path]:
    if release is not None and not os.environ.get(ALL):
        pytest.skip("a target of its own: make test-releases")
    found = [] if release is None else [serving(release, engine.python)]
    return [*found, triton(engine.python)] if runner == "second" else found


@pytest.mark.parametrize(("runner", "release"), RUNNERS)
def test_end_probabilities_are_the_models(
    engine_installation: Installation, runner: str, release: str | None
) -> None:
    """Beside the log-probabilities that vLLM returns itself; random weights, so no skill."""
    with_runner = paths(engine_installation, runner, release)
    report = real_engines(engine_installation, "ends", 80, *with_runner)
    check_ends(report)
    assert len(report["cold"]["told"]) > 1
    assert {probability for _, probability, _ in report["ignored"]["told"]} == {0.0}
    at_first = [chance for _, chance in report["at first not"]["should"][:2]]
    assert at_first == [0.0, 0.0]
    assert 0.0 not in [chance for _, chance in report["greedy"]["should"][:2]]


def test_with_drafted_tokens_the_first_of_each_step_counts(
    engine_installation: Installation,
) -> None:
    report = real_engines(engine_installation, "drafted", 80, triton(engine_installation.python))
    check_ends(report)
    steps = [before for before, _ in report["greedy"]["should"]]
    assert len(steps) < steps[-1]


@pytest.mark.parametrize("runner", ["first", "second"])
def test_a_preempted_request_is_averaged_anew(
    engine_installation: Installation, runner: str
) -> None:
    """From its next token on: what is computed again, in several steps, does not count."""
    with_runner = paths(engine_installation, runner, None)
    report = real_engines(engine_installation, "preempted", 120, *with_runner)
    check_ends(report)
    told = [one for way in report.values() for one in way["told"]]
    # With the second one only that which ignores end tokens is preempted.
    assert any(since and (probability or runner == "second") for _, probability, since in told)


def check_ends(report: dict[str, Any]) -> None:
    for name, way in report.items():
        assert len(way["should"]) > 1, name
        for tokens, probability, since in way["told"]:
            it_is = [chance for before, chance in way["should"] if since <= before < tokens]
            should = averaged(it_is)
            assert probability == pytest.approx(should, rel=1e-3, abs=1e-9), (name, tokens)
        assert way["told"], name


@pytest.mark.parametrize(("runner", "release"), RUNNERS)
def test_hidden_lengths(
    engine_installation: Installation, runner: str, release: str | None
) -> None:
    report = real_engines(
        engine_installation, "hidden", 12, *paths(engine_installation, runner, release)
    )
    drafts = runner == "second" and release != "0.31.0"
    assert list(report) == (["plain", "drafts"] if drafts else ["plain"])
    for seen in report.values():
        assert seen["seen"] == seen["should"]
    assert all((seen["several"] > 0) == (name == "drafts") for name, seen in report.items())


def averaged(chances: list[float]) -> float:
    """The mean of the first 16, then a sixteenth of each new one."""
    mean = sum(chances[:16]) / len(chances[:16])
    for chance in chances[16:]:
        mean = mean * 15 / 16 + chance / 16
    return mean
