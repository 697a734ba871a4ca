"""Each step as the ledger closes it, for those who listen."""

import pytest
from msgspec import structs

from router.core.state.barrier import StepLedger
from router.core.state.closed_step import ClosedStep, StepPart
from router.core.types import PoolState, Snapshot
from tests.support.core import fed, snapshot

EMPTY = PoolState.EMPTY


class Watched:
    """A ledger, and the steps that it told."""

    def __init__(self) -> None:
        self.ledger = StepLedger()
        self.told: list[ClosedStep] = []
        self.ledger.on_step = self.told.append

    def report(self, worker: str, step: int, load: int, left: int | None = None) -> None:
        self.tell(worker, load, snapshot("delta", 1, step=step, step_s=0.5), left)

    def tell(self, worker: str, load: int, message: Snapshot, left: int | None = None) -> None:
        left = load if left is None else left
        self.ledger.report(worker, fed(load, left, running=load // 10), message, EMPTY, 0)
        self.ledger.complete("ab", EMPTY)


def test_a_step_tells_what_each_worker_was_in_it() -> None:
    watched = Watched()
    first = snapshot("delta", 1, step=1, step_s=0.5, power_w=200.0, waiting=4)
    watched.tell("a", 100, first)
    watched.tell("b", 60, snapshot("delta", 1, step=1, step_s=0.75))
    parts = {"a": StepPart(100, 10, 4, 200.0), "b": StepPart(60, 6, 0, None)}
    assert watched.told == [ClosedStep(1, 0.75, parts, True, None, 0)]


def test_a_rank_that_has_not_made_the_step_counts_with_what_it_holds() -> None:
    watched = Watched()
    watched.report("a", 1, 100)
    watched.report("b", 1, 60, left=20)
    watched.report("a", 2, 110)
    watched.report("a", 3, 120)  # closes step 2, without b
    assert [part.load_tokens for part in watched.told[1].parts.values()] == [110, 20]
    assert not watched.told[1].together


def test_prompt_tokens_are_those_of_the_step() -> None:
    watched = Watched()
    prompts = structs.replace(snapshot("delta", 1, step=1), scheduled_prefill_tokens=512)
    watched.tell("a", 100, prompts)
    watched.report("b", 1, 60)
    watched.report("a", 2, 110)
    watched.report("b", 2, 70)
    watched.tell("b", 80, structs.replace(prompts, step=3))
    watched.tell("b", 90, structs.replace(prompts, step=3))  # repeats it
    watched.report("a", 3, 120)
    told = [[part.prompt_tokens for part in step.parts.values()] for step in watched.told]
    assert told == [[512, 0], [0, 0], [0, 512]]


def test_an_idle_rank_runs_nothing() -> None:
    watched = Watched()
    watched.report("b", 1, 60, left=0)
    watched.report("a", 1, 100)
    watched.report("a", 2, 110)
    watched.report("a", 3, 120)
    assert watched.told[1].parts["b"] == StepPart(0, 0, 0, None)
    assert watched.told[1].together


def test_preemptions_are_those_since_the_step_before() -> None:
    watched = Watched()
    for step, total in ((1, 5), (2, 7), (3, 7), (4, 1)):  # at last its engine has begun anew
        message = snapshot("delta", 1, step=step)
        watched.tell("a", 10, structs.replace(message, preemptions_total=total))
        watched.report("b", step, 10)
    assert [step.preemptions for step in watched.told] == [0, 2, 0, 0]


def test_a_worker_that_leaves_is_no_part_of_later_steps() -> None:
    watched = Watched()
    watched.report("a", 1, 100)
    watched.report("b", 1, 60)
    watched.ledger.leave("b")
    watched.report("a", 2, 110)
    watched.report("a", 3, 120)
    assert list(watched.told[1].parts) == ["a"]


def test_waiting_is_what_the_sums_have() -> None:
    watched = Watched()
    for step in range(200):
        load = 100 + step % 7
        for worker, tokens in (("a", load), ("b", 50)):
            message = snapshot("delta", 1, step=step, step_s=0.01 + 1e-4 * load)
            watched.tell(worker, tokens, message)
    waits = [step.waiting_s for step in watched.told if step.waiting_s is not None]
    assert len(waits) > 100
    assert sum(waits) == pytest.approx(watched.ledger.totals[EMPTY].waiting_s, rel=1e-12)


def test_an_idle_rank_has_the_power_and_the_queue_that_it_told_last() -> None:
    watched = Watched()
    busy = snapshot("delta", 1, step=1, power_w=600.0, waiting=3)
    watched.tell("b", 10, busy, left=0)
    watched.report("a", 1, 100)
    watched.tell("b", 0, structs.replace(busy, power_w=90.0, waiting=0))
    watched.report("a", 2, 110)
    watched.report("a", 3, 120)
    assert watched.told[0].parts["b"] == StepPart(10, 1, 3, 600.0)
    assert watched.told[1].parts["b"] == StepPart(0, 0, 0, 90.0)


def test_saying_the_same_step_again_changes_nothing_of_it() -> None:
    watched = Watched()
    watched.report("a", 1, 100)
    watched.tell("a", 0, snapshot("full", 1, step=1, step_s=0.5), left=100)
    watched.report("b", 1, 60)
    assert watched.told[0].parts["a"] == StepPart(100, 10, 0, None)


def test_who_no_longer_listens_is_told_nothing_and_who_comes_late_knows_what_was_said() -> None:
    watched = Watched()
    watched.report("a", 1, 100)
    watched.ledger.on_step = None
    watched.report("b", 1, 60)
    assert not watched.told
    message = snapshot("delta", 1, step=2, step_s=0.5, power_w=300.0, waiting=2)
    watched.tell("a", 110, message)
    watched.ledger.on_step = watched.told.append
    message = snapshot("delta", 1, step=2, step_s=0.5)
    watched.tell("b", 70, structs.replace(message, preemptions_total=5))
    parts = {"a": StepPart(110, 11, 2, 300.0), "b": StepPart(70, 7, 0, None)}
    assert watched.told == [ClosedStep(2, 0.5, parts, True, None, 5)]
