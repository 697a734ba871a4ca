"""The league measures a part over real HTTP, keeps it, and does not measure it again."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.bench.league.own import EVENSTEP
from tests.bench.league.parts import emulated, kept_parts
from tests.bench.league.run import on_real_engines, parts_of, run
from tests.bench.league.workloads import FaultAt, Workload, chat, poisson

DEFAULTS = EVENSTEP[0]
FLEET = ("--step-time", "5e-3,9.5e-8,0,5e-5", "--stream-interval", "4")
TARGETS_MS = {"ttft": 60_000.0, "tpot": 10_000.0}
SESSIONS = Workload(
    name="sessions",
    what="a few conversations",
    sessions=partial(chat, 6, 0.5),
    ranks=2,
    slots=16,
    time_scale=0.5,
    fleet=FLEET,
    engine_s=20.0,
    targets_ms=TARGETS_MS,
)
TENANTS = replace(
    SESSIONS,
    name="tenants",
    what="two tenants, and a rank that fails",
    sessions=partial(poisson, {"one": 20.0, "flood": 20.0}, 1.5, 8),
    time_scale=1.0,
    tenants=True,
    faults=(FaultAt(1, "error", 0.0, 20.0),),
)


def test_a_part_is_measured_once(tmp_path: Path) -> None:
    assert run([*parts_of([DEFAULTS], [SESSIONS], 1)], 5.0, tmp_path) == 0
    file = tmp_path / "sessions.json"
    (name, part), *others = kept_parts("sessions", tmp_path).items()
    assert (name, others) == ("evenstep, seed 0", [])
    sessions = SESSIONS.sessions(0)
    assert part["requests"] == sum(map(len, sessions))
    # The first session is the warm-up, of which nothing counts.
    assert part["completed"] == sum(map(len, sessions[1:]))
    assert (part["failed"], part["lost"], part["errors"]) == (0, 0, {})
    assert part["good_share"] == 1.0
    assert 0 < part["mean_ttft_ms"] < part["mean_e2el_ms"]
    assert part["mean_tpot_ms"] > 5  # a step takes longer
    assert part["hit_share"] > 0.3  # turns begin as those before them
    assert 0 <= part["idle_share"] < 1
    assert part["router_cpu_s"] > 0
    assert part["router_memory_mb"] > 10
    if not part["busy"]:
        before = file.read_bytes()
        assert run([*parts_of([DEFAULTS], [SESSIONS], 1)], 5.0, tmp_path) == 0
        assert file.read_bytes() == before


def test_figures_are_the_quiet_tenants_and_failures_have_kinds(tmp_path: Path) -> None:
    assert run([*parts_of([DEFAULTS], [TENANTS], 1)], 5.0, tmp_path) == 0
    (part,) = kept_parts("tenants", tmp_path).values()
    asked = [ask.tenant for session in TENANTS.sessions(0) for ask in session]
    counted = asked[len(asked) // 5 :]
    assert part["completed"] + part["failed"] == counted.count("one")
    assert part["flood"]["completed"] + part["flood"]["failed"] == counted.count("flood")
    assert sum(part["errors"].values()) == part["failed"]
    assert part["lost"] == part["flood"]["lost"] == 0


def test_the_league_stands_before_engines_that_run_already(tmp_path: Path) -> None:
    """Emulated ones stand for them: the league is told of their URLs alone."""
    out = tmp_path / "out"
    with emulated(replace(SESSIONS, time_scale=0.2), 0, tmp_path) as (engines, _):
        league = on_real_engines(" ".join(engines.workers), out)
        chats = [*parts_of([DEFAULTS], [league.workloads["chat"]], 1)]
        assert run(chats, 5.0, league.folder, league.engines_of) == 0
        league.finish()
    (part,) = kept_parts("chat", out).values()
    assert (part["failed"], part["origin"]["engines"]) == (0, "real")
    assert part["completed"] > 5
    assert 0 < part["hit_share"] < 1
    page = (out / "league.md").read_text()
    assert "requests/s of Azure's conversation lengths" in page
    assert "Answers end at lengths that no router sees." in page
    assert "| **evenstep** |" in page or "| **evenstep †** |" in page
    assert "![chat](chat.png)" in page
