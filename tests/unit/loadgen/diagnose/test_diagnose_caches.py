"""What a diagnosis says of prefix caches: what was found, and what another policy would find."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace as replace_fields
from rich.console import Console

from loadgen.diagnose.analysis.window import Span, Window, window_of
from loadgen.diagnose.diagnosis import Diagnosis, diagnose_window, report
from loadgen.diagnose.diagnosis_table import diagnosis_table
from loadgen.diagnose.words import answers
from loadgen.report.numbers import number
from loadgen.simulator.serving.serving_simulation import simulate_serving
from router.core.types import Dispatch
from router.recording.lines import Recording
from tests.support.recorded import header as header_of
from tests.support.recorded import recorded_with_prompts, with_conversations

NOW = ("least_tokens", Dispatch.INSTANT)
SOME = ("prefix_score", "barrier_time", "least_tokens")


@pytest.fixture(scope="module")
def whole() -> Recording:
    return recorded_with_prompts(with_conversations(*NOW))


@pytest.fixture(scope="module")
def diagnosis(whole: Recording) -> Diagnosis:
    return diagnose_window(window_of(whole, Span()), policies=SOME)


def cached(diagnosis: Diagnosis, policy: str) -> float:
    assert diagnosis.prospects is not None
    row = diagnosis.prospects.of(policy)
    assert row is not None
    assert row.caching is not None
    return row.caching.cached_share


def said(diagnosis: Diagnosis) -> str:
    return dict(answers(diagnosis))["Prefix caches?"]


def test_the_policy_in_force_finds_what_was_recorded(diagnosis: Diagnosis) -> None:
    recorded = diagnosis.found.caches.cached_share
    assert recorded is not None
    assert 0.1 < recorded < 0.6
    assert cached(diagnosis, "least_tokens") == pytest.approx(recorded, abs=0.03)


@pytest.mark.parametrize("policy", ["prefix_score", "barrier_time"])
def test_policies_that_know_the_caches_find_what_they_would(
    policy: str, diagnosis: Diagnosis
) -> None:
    assert diagnosis.prospects is not None
    row = diagnosis.prospects.of(policy)
    assert row is not None
    then = simulate_serving(with_conversations(policy, row.dispatch))
    assert cached(diagnosis, policy) > 1.8 * cached(diagnosis, "least_tokens")
    # Conversations that began before the recording count as new.
    assert 0.8 < cached(diagnosis, policy) / then.prefix_hit_share < 1


def test_words_and_report_have_them(diagnosis: Diagnosis) -> None:
    words = said(diagnosis)
    assert "of the prompts' tokens were found (recorded). Simulated: " in words
    assert diagnosis.prospects is not None
    for row in diagnosis.prospects.all:
        assert row.caching is not None
        part = f"{row.caching.cached_share:.1%}, TTFT {row.caching.ttft_s:.3g} s"
        if row.current:
            assert f"least_tokens, instant (in force) {part}" in words
    (soonest,) = sorted(diagnosis.prospects.all, key=lambda row: row.caching.ttft_s)[:1]  # type: ignore[union-attr]
    assert f"{soonest.name} {soonest.caching.cached_share:.1%}" in words  # type: ignore[union-attr]
    rows = report(diagnosis)["policies"]
    assert all(row["caching"]["cached_share"] > 0 for row in rows)


def test_prompts_that_share_nothing_gain_nothing() -> None:
    config = with_conversations(*NOW, shared=False)
    alone = diagnose_window(window_of(recorded_with_prompts(config), Span()), policies=SOME)
    assert cached(alone, "prefix_score") == 0
    assert "Prompts share too little: no policy would find more than 0.0%." in said(alone)


def changed(whole: Recording, *, kept: int = 0, **header: Any) -> Window:
    """The recording in which so many requests keep their blocks."""
    requests = [
        each if n < kept else replace_fields(each, blocks=UNSET)
        for n, each in enumerate(whole.requests)
    ]
    head = header_of(policy=NOW[0], dispatch=NOW[1].value, **header)
    return window_of(replace(whole, header=head, requests=tuple(requests)), Span())


def test_what_is_not_known_is_said(whole: Recording) -> None:
    unknown = "What another policy would find is not known: "
    for window, why in (
        (changed(whole), "no worker tells its cache."),
        (changed(whole, block_tokens=64, kept=100), "the blocks of most prompts were not"),
        (changed(whole, source="observe"), "only evenstep serve records which prompts begin"),
    ):
        found = diagnose_window(window, policies=("least_tokens",))
        assert unknown + why in said(found)
        assert found.prospects is not None
        assert {row.caching for row in found.prospects.all} == {None}


def test_workers_with_blocks_of_different_sizes_are_not_simulated(whole: Recording) -> None:
    window = changed(whole, block_tokens=64, kept=10**6)
    assert window.block_tokens == 64
    one, *others = window.workers
    workers = (replace_fields(one, block_tokens=128), *others)
    assert replace(window, workers=workers).block_tokens is None


def test_where_nothing_is_simulated_it_is_said(whole: Recording) -> None:
    window = changed(whole, block_tokens=64, kept=10**6)
    few = diagnose_window(replace(window, requests=window.requests[:40]), policies=SOME)
    assert few.prospects is None
    assert said(few).endswith("What another policy would find was not simulated.")


def test_the_table_shows_what_each_policy_finds(diagnosis: Diagnosis) -> None:
    console = Console(width=100, record=True, file=StringIO())
    console.print(diagnosis_table(diagnosis, None))
    lines = console.export_text().splitlines()
    head = next(line for line in lines if line.startswith("predicted"))
    assert head.split()[-3:] == ["cached", "TTFT,", "s"]
    shown = {line.split(",")[0]: line.split()[-2:] for line in lines}
    assert diagnosis.prospects is not None
    for row in diagnosis.prospects.all:
        assert row.caching is not None
        ttft = number(row.caching.ttft_s, 3)
        assert shown[row.policy] == [f"{row.caching.cached_share:.1%}", ttft]
