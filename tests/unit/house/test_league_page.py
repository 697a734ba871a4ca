"""The league's page: places, reasons and what routers told."""

from pathlib import Path

import pytest

from tests.bench.league import places
from tests.bench.league.page import counted, league_text, summarize
from tests.bench.league.parts import kept_parts
from tests.bench.league.places import NO_REASON, league_line, losses, reasons
from tests.bench.league.standings import (
    KEEPS_UP,
    LEADS,
    behind,
    overloaded,
    standings,
    tables_of,
    verdict,
)
from tests.bench.league.workloads import WORKLOADS
from tests.support.league_parts import kept

OPEN = WORKLOADS["open-80"]


def test_the_best_is_first_and_who_fails_requests_last(tmp_path: Path) -> None:
    for seed, ttft in enumerate((100.0, 110.0, 120.0)):
        kept(tmp_path, OPEN, "evenstep", seed, mean_ttft_ms=ttft)
        kept(tmp_path, OPEN, "fast", seed, mean_ttft_ms=ttft - 10)
        kept(tmp_path, OPEN, "failing", seed, mean_ttft_ms=1.0, completed=90, failed=10)
    found = standings(OPEN, kept_parts(OPEN.name, tmp_path))
    assert [each.entrant for each in found] == ["fast", "evenstep", "failing"]
    told = found[1].of("mean_ttft_ms")
    assert told is not None
    assert told.mean == 110.0
    assert told.half_width == pytest.approx(4.303 * 10 / 3**0.5)
    judged = verdict(OPEN, found)
    assert judged is not None
    assert (judged.place, judged.of, judged.leads) == (2, 3, False)
    assert judged.behind == pytest.approx((10 / 90 + 10 / 100 + 10 / 110) / 3)


def test_entrants_are_compared_by_the_seeds_that_all_have_had(tmp_path: Path) -> None:
    for seed, ttft in enumerate((100.0, 200.0, 300.0)):
        kept(tmp_path, OPEN, "evenstep", seed, mean_ttft_ms=ttft)
    kept(tmp_path, OPEN, "other", 0, mean_ttft_ms=110.0)
    (first, second) = standings(OPEN, kept_parts(OPEN.name, tmp_path))
    assert (first.entrant, len(first.parts), len(second.parts)) == ("evenstep", 1, 1)


def test_rules_that_run_once_stand_below_and_take_no_seed_from_the_others(tmp_path: Path) -> None:
    for seed, ttft in enumerate((100.0, 200.0)):
        kept(tmp_path, OPEN, "evenstep", seed, mean_ttft_ms=ttft)
        kept(tmp_path, OPEN, "other", seed, mean_ttft_ms=ttft + 20)
    kept(tmp_path, OPEN, "smg prefix_hash", 0, mean_ttft_ms=90.0)
    ((_, judged),) = tables_of(tmp_path)
    assert [(each.entrant, len(each.parts)) for each in judged] == [("evenstep", 2), ("other", 2)]
    ((_, below),) = tables_of(tmp_path, once=True)
    assert [(each.entrant, len(each.parts)) for each in below] == [
        ("smg prefix_hash", 1),
        ("evenstep", 1),
    ]
    text = league_text(tmp_path)
    assert (
        text.index("| other | 170")
        < text.index("with one seed:")
        < text.index("| smg prefix_hash | 90")
    )


def test_most_tokens_are_first_where_those_count(tmp_path: Path) -> None:
    load = WORKLOADS["decode-saturated"]
    kept(tmp_path, load, "evenstep", 0, tokens_per_s=100.0)
    kept(tmp_path, load, "other", 0, tokens_per_s=100 * (1 + LEADS / 2))
    judged = verdict(load, standings(load, kept_parts(load.name, tmp_path)))
    assert judged is not None
    assert judged.place == 2
    assert judged.leads


def test_where_evenstep_is_behind_stands_at_the_top(tmp_path: Path) -> None:
    for load, ttft in (("open-60", 90.0), ("open-95", 10.0), ("chat", 50.0)):
        kept(tmp_path, WORKLOADS[load], "evenstep", 0, mean_ttft_ms=100.0 if ttft < 90 else 80.0)
        kept(tmp_path, WORKLOADS[load], "other", 0, mean_ttft_ms=ttft)
    summarize({"third": {"chat": "it needs more"}}, tmp_path)
    text = league_text(tmp_path)
    behind, _, rest = text.partition("## Evenstep's places")
    assert [line.split("](")[0] for line in behind.splitlines() if " of 2" in line] == [
        "| [open-95",
        "| [chat",
    ]
    assert "80, 1 of 2, 1 seed (1.12 times as good as other)" in rest
    assert "100, 2 of 2, behind by 900.0 %, 1 seed (0.10 times as good as other)" in rest
    assert "| third | chat | it needs more |" in rest
    assert (tmp_path / "chat.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_in_which_evenstep_is_behind_has_a_row_of_its_own(tmp_path: Path) -> None:
    kept(tmp_path, OPEN, "evenstep", 0, mean_ttft_ms=1.0, mean_tpot_ms=20.0)
    kept(tmp_path, OPEN, "other", 0, mean_ttft_ms=2.0, mean_tpot_ms=10.0)
    kept(tmp_path, OPEN, "failing", 0, mean_ttft_ms=0.5, completed=90, failed=10)
    assert [(row[1], *row[3:6]) for row in losses(tables_of(tmp_path))] == [
        ("TPOT mean, ms", "other: 10.0", "100.0 %", "2 of 3"),
    ]


def test_every_kept_figure_in_which_evenstep_is_behind_has_a_reason() -> None:
    unexplained = [row[:2] for row in losses(tables_of()) if row[-1] == NO_REASON]
    assert unexplained == []
    sentences = [text for each in reasons().values() for text in each.values()]
    assert not [text for text in sentences if "not explained" in text.lower()]


def test_every_reason_is_of_a_figure_in_which_evenstep_is_behind() -> None:
    tables = tables_of()
    rows = {(each.workload.name, each.by.removeprefix("-")) for each in behind(tables)}
    measured = {load.name for load, found in tables if verdict(load, found) is not None}
    assert reasons().keys() <= WORKLOADS.keys()
    # Others have no part of the requests that they ask now.
    for name in reasons().keys() & measured:
        assert {(name, key) for key in reasons()[name]} <= rows, name


def test_runs_of_one_seed_are_compared_with_each_other(tmp_path: Path) -> None:
    # Far apart from seed to seed, and always a tenth behind.
    for seed, ttft in ((1, 1000.0), (0, 100.0)):
        kept(tmp_path, OPEN, "evenstep", seed, mean_ttft_ms=1.1 * ttft, tokens_per_s=90.0)
    for seed, ttft in ((0, 100.0), (1, 1000.0)):
        kept(tmp_path, OPEN, "other", seed, mean_ttft_ms=ttft, tokens_per_s=100.0)
    assert [row[4] for row in losses(tables_of(tmp_path))] == ["10.0 % ± 0.0"] * 2
    assert [row[-1] for row in losses(tables_of(tmp_path))] == [NO_REASON] * 2
    assert ", 2 of 2, behind by 10.0 % ± 0.0 (0.91 times as good as other)" in league_text(tmp_path)
    assert "1 seed" not in league_text(tmp_path)


def test_what_one_seed_may_turn_is_not_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"decode-saturated": {"p99_ttft_ms": "It waits."}}
    monkeypatch.setattr(places, "reasons", lambda: known)
    for load in (OPEN, WORKLOADS["decode-saturated"]):
        for seed, ours, other in ((0, 100.0, 110.0), (1, 130.0, 100.0)):
            kept(tmp_path, load, "evenstep", seed, p99_ttft_ms=ours)
            kept(tmp_path, load, "other", seed, p99_ttft_ms=other)
    rows = {row[0].partition("]")[0]: row for row in losses(tables_of(tmp_path))}
    assert rows["[open-80"][4:] == ("10.5 % ± 248.3", "2 of 2", "Not told apart.")
    assert rows["[decode-saturated"][-1] == "Not told apart. It waits."


def test_who_is_overloaded_is_no_measure(tmp_path: Path) -> None:
    for load, served in ((OPEN, 94.0), (WORKLOADS["open-60"], 96.0), (WORKLOADS["chat"], 94.0)):
        kept(tmp_path, load, "evenstep", 0, mean_ttft_ms=10.0, tokens_per_s=99.0)
        kept(tmp_path, load, "evenstep other", 0, mean_ttft_ms=11.0, tokens_per_s=100.0)
        kept(tmp_path, load, "haproxy", 0, mean_ttft_ms=20.0, tokens_per_s=served)
        kept(tmp_path, load, "smg", 0, mean_ttft_ms=5000.0, tokens_per_s=50.0, mean_tpot_ms=9.0)
    assert 0.94 < KEEPS_UP < 0.96
    tables = tables_of(tmp_path)
    assert [load.name for load, found in tables if overloaded(load, found)] == ["open-80"]
    text = league_text(tmp_path).partition("## Evenstep's places")[2]
    rows = {line.split("]")[0][3:]: line for line in text.splitlines() if "](#" in line}
    assert "10, 1 of 4, 1 seed (others are overloaded)" in rows["open-80"]
    assert "times as good" not in rows["open-80"]
    assert "10, 1 of 4, 1 seed (2.00 times as good as haproxy)" in rows["open-60"]
    assert "overloaded" not in rows["open-60"] + rows["chat"]


def test_a_figure_worse_than_that_of_the_overloaded_has_its_ratio(tmp_path: Path) -> None:
    kept(tmp_path, OPEN, "evenstep", 0, mean_ttft_ms=20.0, tokens_per_s=100.0)
    kept(tmp_path, OPEN, "haproxy", 0, mean_ttft_ms=10.0, tokens_per_s=50.0)
    assert "2 of 2, behind by 100.0 %, 1 seed (0.50 times as good as haproxy)" in league_text(
        tmp_path
    )


def test_the_best_row_is_of_others_that_keep_up_and_the_worst_of_all(tmp_path: Path) -> None:
    for name, other, served in (("open-60", 150.0, 10.0), ("open-80", 900.0, 5.0)):
        kept(tmp_path, WORKLOADS[name], "evenstep", 0, mean_ttft_ms=100.0)
        kept(tmp_path, WORKLOADS[name], "smg", 0, mean_ttft_ms=other, tokens_per_s=served)
    line = league_line(tmp_path)
    assert (
        "Best where others are not overloaded: in `open-60`, TTFT mean 100 ms, 1.50 times" in line
    )
    assert line.endswith("Worst: in `open-60`, tokens/s 10, 1.00 times as good as smg")
    for name, good in (("evenstep", 0.0), ("smg", 3.0)):
        kept(tmp_path, WORKLOADS["open-95"], name, 0, goodput_per_s=good)
    line = league_line(tmp_path)
    assert line.endswith("Worst: in `open-95`, good/s 0.0, 0.00 times as good as smg")
    kept(tmp_path, WORKLOADS["open-95"], "smg", 0, goodput_per_s=0.0)
    assert league_line(tmp_path).endswith("Worst: in `open-95`, good/s 0.0, place 1 of 2")


def test_counters_are_of_a_workload_whose_prompts_share_something(tmp_path: Path) -> None:
    for name, value in (("decode-saturated", 1.0), ("chat", 2.0), ("tenants", 3.0)):
        kept(tmp_path, WORKLOADS[name], "evenstep", 0, evidence={"polls": value})
        if name != "chat":
            kept(tmp_path, WORKLOADS[name], "other", 0, evidence={"polls": value})
    text = league_text(tmp_path).partition("## The routers' own counters")[2]
    assert "| evenstep | chat | `polls` 2 |" in text
    assert "| other | decode-saturated | `polls` 1 |" in text


def test_figures_of_single_engines_are_added_up() -> None:
    told = {"requests 0": 2.0, "requests 1": 3.0, "polls 0 ok": 1.0, "polls 1 ok": 0, "errors": 0}
    assert counted(told) == {
        "requests": "5 (2 of 2 engines)",
        "polls ok": "1 (1 of 2 engines)",
        "errors": "0",
    }


def test_who_fails_requests_is_behind(tmp_path: Path) -> None:
    kept(tmp_path, OPEN, "evenstep", 0, mean_ttft_ms=1.0, completed=90, failed=10)
    kept(tmp_path, OPEN, "other", 0, mean_ttft_ms=2.0)
    judged = verdict(OPEN, standings(OPEN, kept_parts(OPEN.name, tmp_path)))
    assert judged is not None
    assert (judged.place, judged.leads) == (2, False)


def test_who_fails_more_than_others_does_not_lead_by_what_it_has_not_served(tmp_path: Path) -> None:
    load = WORKLOADS["faults"]
    kept(tmp_path, load, "evenstep", 0, mean_ttft_ms=10.0, completed=97, failed=3)
    kept(tmp_path, load, "other", 0, mean_ttft_ms=5.0, completed=80, failed=20)
    judged = verdict(load, standings(load, kept_parts(load.name, tmp_path)), "mean_ttft_ms")
    assert judged is not None
    assert (judged.place, judged.leads) == (1, True)


def test_an_empty_league_says_so(tmp_path: Path) -> None:
    assert league_text(tmp_path) == "Nothing has been measured yet."
