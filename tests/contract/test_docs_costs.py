"""Words of the pages that hold for the runs that are kept; their numbers are filled in."""

from docs.kept_figures import read_figures
from docs.stale_figures import DATA


def test_with_retries_and_breaker_no_request_meets_a_black_hole() -> None:
    ways = read_figures(DATA / "reliability/black_hole.json")["ways"]
    assert list(ways) == ["no retries, no breaker", "retries, no breaker", "as it is"]
    assert ways["as it is"]["failed"] == 0


def test_gbp_cr_beside_the_best() -> None:
    found = read_figures(DATA / "chains/gbp_cr.json")
    assert found["equal"]["optimal"] == found["equal"]["fleets"]
    assert found["unequal"]["worst_ratio"] == 2


def test_how_long_the_planner_searches() -> None:
    found = read_figures(DATA / "chains/planning.json")
    assert list(found["cpu_s"]) == ["six types of GPU", "all different"]
    assert found["loads"][-2] < 1 < found["loads"][-1]
    assert (found["servers"], found["blocks"]) == (1000, 200)


def test_no_request_is_lost_but_where_a_replica_is_killed() -> None:
    found = read_figures(DATA / "replicas/takeovers.json").values()
    assert [each["answers_lost_of_others"] + each["answers_refused"] for each in found] == [0, 0]
