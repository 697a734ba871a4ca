"""A rank of a lockstep group that dies and comes back under load: the barrier's accounts go on."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.support.chaos import cluster, live
from tests.support.replays import replaying
from tests.support.server import Server, wait_until

RANKS = 4
WAIT_S = 60
STEPS = 100
LOAD = ("--arrivals", "closed:24", "--max-tokens", "200", "--requests", "100000")


class Accounts(NamedTuple):
    """Of the group's steps so far."""

    steps: float
    worker_s: float
    known_s: float  # part of it of which it is known how long workers waited

    @classmethod
    def of(cls, router: Server) -> "Accounts":
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(router.get("/metrics").text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return cls(
            totals["evenstep_barrier_steps_total"],
            totals["evenstep_step_seconds_total"] * RANKS,
            totals["evenstep_timed_worker_seconds_total"],
        )


def have_stepped(router: Server, before: float) -> bool:
    return Accounts.of(router).steps >= before + STEPS


def test_a_rank_restarts_five_times_under_load(tmp_path: Path) -> None:
    fixed = ("--step-time", "0.02,1e-6", "--health-interval", "0.2")
    with (
        cluster(tmp_path, "--lockstep", workers=RANKS, router_flags=fixed) as (fleet, router),
        replaying(router.url, tmp_path, *LOAD),
    ):
        shares = []
        for rank in (1, 3, 1, 0, 2):
            wait_until(partial(have_stepped, router, 0), WAIT_S, "they step")
            fleet.fault(rank, "kill")
            wait_until(lambda: not live(router), WAIT_S, "the group is down")
            fleet.restore(rank)
            before = Accounts.of(router)
            wait_until(partial(have_stepped, router, before.steps), WAIT_S, "they step again")
            after = Accounts.of(router)
            known_s, worker_s = after.known_s - before.known_s, after.worker_s - before.worker_s
            shares.append(known_s / worker_s)
            assert after.steps < before.steps + 3 * STEPS, "judged within its first steps"
    assert min(shares) > 0.95, shares
