"""Emulated ranks behind one barrier under routers that die and disagree: one budget a step."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import zmq

from router.core.types import Snapshot
from router.core.wire import BudgetMessage, encode, full_endpoint
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.rank_steps import SnapshotLog, knows_prompts, reading
from tests.support.server import Server, running_router, wait_until

RANKS, CLIENTS = 2, 6
FLEET = ("--workers", str(RANKS), "--slots", "8", "--step-time", "0.01,1e-7,0,2e-5")
WAIT_S = 60


@contextmanager
def prompts(fleet: Fleet) -> Iterator[None]:
    """Long prompts to every rank, past all routers, until the block ends."""
    stop = threading.Event()

    def ask(number: int) -> None:
        url = fleet.workers[number % RANKS].partition(",")[0]
        while not stop.is_set():
            body = {"model": "emulated", "prompt": [number] * 2000, "max_tokens": 20}
            httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status()

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
        for each in asked:
            each.result()


def wait_for(log: SnapshotLog, budget: int) -> None:
    def kept() -> bool:
        return all(told[-1].prompt_budget == budget for told in log.snapshots)

    wait_until(kept, WAIT_S, f"all ranks keep to {budget} tokens")


def steps(told: list[Snapshot]) -> dict[int, Snapshot]:
    """By number, without heartbeats."""
    return {one.step: one for one in told if one.scheduled_prefill_tokens + one.step_s > 0}


def endpoints(fleet: Fleet) -> list[str]:
    return [spec.partition("snapshots=")[2] for spec in fleet.workers]


def test_ranks_keep_one_budget_whatever_routers_do(tmp_path: Path) -> None:
    """Two at once, one that reaches a rank alone, one that stands still, and both killed."""
    with running_fleet(tmp_path, *FLEET, "--no-prefix-caching") as fleet:
        workers = worker_flags(fleet)
        with (
            reading(endpoints(fleet)) as log,
            prompts(fleet),
            running_router(tmp_path, *workers, "--prompt-budget", "300") as first,
        ):
            wait_for(log, 300)
            with running_router(tmp_path, *workers, "--prompt-budget", "200") as second:
                wait_for(log, 200)
                second.kill()
                wait_for(log, 300)
            with running_router(tmp_path, *workers[:2], "--prompt-budget", "100"):
                wait_for(log, 100)
                os.kill(first.process.pid, signal.SIGSTOP)
                # The other rank holds no budget any more.
                wait_for(log, 0)
            os.kill(first.process.pid, signal.SIGCONT)
            wait_for(log, 300)
            first.kill()
            wait_for(log, 0)
    ranks = [steps(told) for told in log.snapshots]
    common = ranks[0].keys() & ranks[1].keys()
    assert {number for number in common if ranks[0][number].prompt_budget} != set()
    for number in common:
        assert len({rank[number].prompt_budget for rank in ranks}) == 1, number
    for rank in ranks:
        for one in rank.values():
            assert one.prompt_budget in (0, 100, 200, 300)
            assert one.scheduled_prefill_tokens <= (one.prompt_budget or 2048)
    assert max(one.scheduled_prefill_tokens for one in ranks[0].values()) > 300


def test_in_windows_the_same_steps_of_all_ranks_compute_prompts(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, *FLEET, "--no-prefix-caching") as fleet,
        reading(endpoints(fleet)) as log,
        prompts(fleet),
        zmq.Context() as context,
    ):
        wait_for(log, 0)
        for endpoint, told in zip(endpoints(fleet), log.snapshots, strict=True):
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(full_endpoint(endpoint))
                message = BudgetMessage("r", told[-1].epoch, told[-1].time_s, 300, every=4)
                dealer.send(encode(message))
        wait_for(log, 300)
        wait_for(log, 0)
    open_steps = set()
    for told in log.snapshots:
        bounded = [one for one in steps(told).values() if one.prompt_budget == 300]
        assert len(bounded) > 20
        open_steps |= {one.step % 4 for one in bounded if one.scheduled_prefill_tokens}
    assert len(open_steps) == 1


@contextmanager
def unasked(tmp_path: Path, *flags: str) -> Iterator[tuple[SnapshotLog, Server]]:
    """Engines that get long prompts, behind a router without a flag."""
    with (
        running_fleet(tmp_path, *FLEET, "--no-prefix-caching", *flags) as fleet,
        reading(endpoints(fleet)) as log,
        prompts(fleet),
        running_router(tmp_path, *worker_flags(fleet)) as router,
    ):
        yield log, router


def learned(router: Server) -> None:
    wait_until(lambda: knows_prompts(router), WAIT_S, "it has learned what prompts cost")


def test_without_a_flag_ranks_that_wait_for_each_other_have_a_budget(tmp_path: Path) -> None:
    """By the cost, three times the 10 ms of a step without prompts: 1,500 tokens at least."""
    with unasked(tmp_path) as (log, router):
        wait_for(log, 512)
        learned(router)
        wait_until(
            lambda: all((told[-1].prompt_budget or 0) >= 1500 for told in log.snapshots),
            WAIT_S,
            "the learned budget is in force",
        )


def test_without_a_flag_free_engines_have_none(tmp_path: Path) -> None:
    with unasked(tmp_path, "--no-barrier") as (log, router):
        learned(router)
        wait_for(log, 0)
        assert 'prompt_budget_tokens{by="router"' not in router.get("/metrics").text


def with_prompts(told: list[Snapshot]) -> list[Snapshot]:
    """Steps that computed many tokens of prompts."""
    return [one for one in steps(told).values() if one.scheduled_prefill_tokens > 300]


def test_steps_keep_the_target_while_prompts_come(tmp_path: Path) -> None:
    """A step takes 10 ms without prompts, and 40 ms more with all tokens that it may hold."""
    auto = ("--prompt-budget", "auto", "--target-tpot", "0.02")
    with running_fleet(tmp_path, *FLEET, "--no-prefix-caching") as fleet:
        workers = worker_flags(fleet)
        with (
            reading(endpoints(fleet)) as log,
            prompts(fleet),
            running_router(tmp_path, *workers, *auto) as router,
        ):
            wait_until(lambda: bool(log.snapshots[0][-1].prompt_budget), WAIT_S, "it tries budgets")
            tried = [len(told) for told in log.snapshots]
            learned(router)
            before = [len(told) for told in log.snapshots]

            def often() -> bool:
                """However seldom a busy machine asks: engines step on meanwhile."""
                later = zip(log.snapshots, before, strict=True)
                return all(len(with_prompts(told[seen:])) > 50 for told, seen in later)

            wait_until(often, WAIT_S, "50 further steps of each rank with prompts")
            after = [len(told) for told in log.snapshots]
            metrics = router.get("/metrics").text
    assert 'evenstep_prompt_budget_tokens{by="router",group="default"}' in metrics
    for told, free_end, seen, end in zip(log.snapshots, tried, before, after, strict=True):
        free, kept = steps(told[:free_end]), steps(told[seen:end])
        assert max(one.step_s for one in free.values()) > 0.045
        assert sum(one.step_s <= 1.02 * 0.02 for one in kept.values()) >= 0.9 * len(kept)
