"""A rank of a lockstep group that dies and comes back under load: the barrier's accounts go on."""

from functools import partial
from pathlib import Path

from tests.support.barrier_accounts import Accounts
from tests.support.chaos import cluster, live
from tests.support.replays import replaying
from tests.support.server import Server, wait_until

RANKS = 4
WAIT_S = 60
STEPS = 100
LOAD = ("--arrivals", "closed:24", "--max-tokens", "200", "--requests", "100000")


def have_stepped(router: Server, before: float) -> bool:
    return Accounts.of(router, RANKS).steps >= before + STEPS


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
            before = Accounts.of(router, RANKS)
            wait_until(partial(have_stepped, router, before.steps), WAIT_S, "they step again")
            after = Accounts.of(router, RANKS)
            shares.append(after.known_since(before))
            assert after.steps < before.steps + 3 * STEPS, "judged within its first steps"
    assert min(shares) > 0.95, shares
