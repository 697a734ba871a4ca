"""A group's prompt budget, from its workers' messages."""

from __future__ import annotations

import pytest
from msgspec import structs

from router.core.events import (
    Arrived,
    Dispatched,
    Ended,
    SnapshotReceived,
    WorkerDown,
    WorkerUp,
)
from router.core.forecast.forecast import WorkProfile
from router.core.prompt_budget import PromptBudget, StepSeen
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.state.group_budget import GroupBudget
from router.core.state.wanted import Wanted
from router.core.step_fit import FittedStepTime
from router.core.step_time import StepBudget, StepTime
from router.core.targets import Targets
from router.core.types import Outcome, Request, Snapshot, WorkerSpec
from tests.support.core import running, snapshot

COST = StepTime(10e-3, 1e-6, 1e-4, 1e-4)


@pytest.fixture(autouse=True)
def behind_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "barrier", True)


class Witness(PromptBudget):
    def __init__(self) -> None:
        super().__init__(Targets())
        self.seen: list[StepSeen] = []

    def after(self, seen: StepSeen, cost: StepTime | None) -> StepBudget | None:
        self.seen.append(seen)
        return super().after(seen, cost)


def cluster(cost: StepTime | None) -> Cluster:
    made = Cluster([WorkerSpec(each, f"http://{each}") for each in "ab"], step_time=cost)
    for each in "ab":
        made.apply(WorkerUp(each))
    show(made, "a", snapshot("full", 1, running("x", 900, 0, 400)))
    show(made, "b", snapshot("full", 1, running("y", 200, 5)))
    return made


def show(made: Cluster, worker: str, told: Snapshot) -> None:
    """From an engine that takes budgets."""
    made.apply(SnapshotReceived(worker, structs.replace(told, prompt_budget=0), 0.0))


def test_what_a_budget_sees() -> None:
    made, budget = cluster(COST), Witness()
    group = made.groups["default"]
    made.apply(Arrived(Request("es-1", "default", 100)))
    assert GroupBudget(group, budget).step_ended()
    (seen,) = budget.seen
    assert seen.unstarted == 2, "one in the pool, one whose prompt is computed"
    assert seen.rest_s == pytest.approx(10e-3 + 500e-6 + 1e-4), "prompt tokens to come hold no KV"
    tokens = int(3 * seen.rest_s / 1e-4)
    assert group.prompt_budget == (tokens, 1)
    assert group.profile(WorkProfile()).prefill_chunk == tokens


def test_without_a_barrier_each_engine_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    group = cluster(COST).groups["default"]
    budget = GroupBudget(group, PromptBudget(Targets(tpot_s=1.0)))
    budget.step_ended()
    assert budget.of("a") == budget.of("b") == group.prompt_budget
    monkeypatch.setattr(Group, "barrier", False)
    budget.step_ended()
    rests_s = {"a": 10e-3 + 500e-6 + 1e-4, "b": 10e-3 + 205e-6 + 1e-4}
    for worker, rest_s in rests_s.items():
        assert budget.of(worker) == (int(3 * rest_s / 1e-4), 1)
    assert group.prompt_budget == budget.of("a") == budget.of("c, untold")
    unpriced = cluster(FittedStepTime(10e-3, 1e-6)).groups["default"]
    budget = GroupBudget(unpriced, PromptBudget(Targets(tpot_s=1.0)))
    budget.step_ended()
    assert budget.of("a") == unpriced.prompt_budget == (512, 1), "what prompts cost is not known"
    constant = GroupBudget(group, 77)
    assert not constant.step_ended()
    assert constant.of("a") == constant.of("b") == (77, 1)


@pytest.mark.parametrize("barrier", [True, False])
def test_windows_are_for_requests_that_decode(
    barrier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any prompts add 5 ms to 10, and the target leaves 3."""
    best = (10e-3, 0.0, 0.0, 2**-17, 0.0, 5e-3, 0.0)
    made = cluster(FittedStepTime(10e-3, per_prompt_token_s=2**-17, predicting=best))
    group = made.groups["default"]
    monkeypatch.setattr(Group, "barrier", barrier)
    budget = GroupBudget(group, PromptBudget(Targets(tpot_s=13e-3)))
    budget.step_ended()
    tokens = int(25e-3 / 2**-17)
    of = {worker: budget.of(worker) for worker in "ab"}
    assert of == {"a": (tokens, 20 if barrier else 1), "b": (tokens, 20)}
    assert group.prompt_budget == (tokens, 20)
    show(made, "b", snapshot("delta", 2, finished=("y",)))
    budget.step_ended()
    assert budget.of("a") == group.prompt_budget == (tokens, 1)


def test_where_no_engine_tells_of_its_steps_there_is_none() -> None:
    """A step of nothing would leave prompts one token."""
    made = Cluster([WorkerSpec("a", "http://a")], step_time=COST)
    made.apply(WorkerUp("a"))
    group = made.groups["default"]
    GroupBudget(group, PromptBudget(Targets())).step_ended()
    assert group.prompt_budget is None


def test_a_request_has_its_first_token_once_its_prompt_is_computed() -> None:
    made, budget = cluster(COST), Witness()
    group = made.groups["default"]
    bound = GroupBudget(group, budget)
    bound.step_ended()
    show(made, "a", snapshot("delta", 2, running("x", 900, 1)))
    bound.step_ended()
    assert [(each.unstarted, each.firsts) for each in budget.seen] == [(1, 0), (0, 1)]


def test_until_the_cost_is_known_there_is_a_usual_budget() -> None:
    group = cluster(None).groups["default"]
    GroupBudget(group, PromptBudget(Targets())).step_ended()
    assert group.prompt_budget == (512, 1)


@pytest.mark.parametrize("why", ["free", "unknown", "takes none", "tells nothing", "alone"])
def test_engines_that_gain_nothing_or_take_none_have_none_unless_somebody_asks_for_it(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster(COST)
    group = made.groups["default"]
    if why in ("free", "unknown"):
        monkeypatch.setattr(Group, "barrier", False if why == "free" else None)
    elif why == "takes none":
        made.apply(SnapshotReceived("b", snapshot("full", 2, running("y", 200, 5)), 0.0))
    elif why == "tells nothing":
        made.join(WorkerSpec("c", "http://c"))
        made.apply(WorkerUp("c"))
    else:
        made.apply(WorkerDown("a", "gone"))
    unasked = GroupBudget(group, PromptBudget(Targets()))
    assert not unasked.step_ended()
    assert group.prompt_budget is None
    GroupBudget(group, PromptBudget(Targets(tpot_s=1.0))).step_ended()
    assert group.prompt_budget is not None
    made.apply(Arrived(one := asking(1, None, 1.0)))
    made.apply(Dispatched(one.id, "b"))
    assert unasked.step_ended()
    assert group.prompt_budget is not None
    made.apply(Ended(one.id, Outcome.COMPLETED))
    assert unasked.step_ended(), "the engines' own bound holds again"
    assert group.prompt_budget is None


def test_workers_that_only_compute_prompts_have_none_unless_somebody_asks_for_it() -> None:
    specs = WorkerSpec("a", "http://a"), WorkerSpec("p", "http://p", role="prefill")
    made = Cluster(specs, step_time=COST)
    made.apply(WorkerUp("p"))
    show(made, "p", snapshot("full", 1, running("x", 900, 0, 400)))
    group = next(each for each in made.groups.values() if each.serves)
    assert not GroupBudget(group, PromptBudget(Targets())).step_ended()
    assert GroupBudget(group, PromptBudget(Targets(1.0))).step_ended()


def test_a_budget_that_hardly_moves_leaves_the_forecast_as_it_is() -> None:
    group = cluster(COST).groups["default"]
    group.prompt_budget = StepBudget(400)
    before = group.profile(WorkProfile())
    group.prompt_budget = StepBudget(410)
    assert group.profile(before).prefill_chunk == 400
    group.prompt_budget = StepBudget(500)
    assert group.profile(before).prefill_chunk == 500


def asking(number: int, ttft_s: float | None, tpot_s: float | None) -> Request:
    return Request(f"es-{number}", "default", 100, targets=Targets(ttft_s, tpot_s))


def test_a_budget_without_targets_follows_those_of_the_requests_that_run() -> None:
    made = cluster(COST)
    group = made.groups["default"]
    budget = GroupBudget(group, PromptBudget(Targets()))
    budget.step_ended()
    unasked = group.prompt_budget
    every = [asking(1, 1.0, 12e-3), asking(2, 0.5, 40e-3), asking(3, 0.2, None)]
    for one in every:
        made.apply(Arrived(one))
    budget.step_ended()
    assert group.prompt_budget == unasked, "they wait"
    for one in every:
        made.apply(Dispatched(one.id, "b"))
    assert group.wanted.tpot_s(0.0) == 12e-3
    budget.step_ended()
    told = PromptBudget(Targets(tpot_s=0.95 * 12e-3))
    GroupBudget(other := cluster(COST).groups["default"], told).step_ended()
    assert group.prompt_budget == other.prompt_budget != unasked
    made.apply(Ended("es-1", Outcome.COMPLETED))
    assert group.wanted.tpot_s(0.0) == 40e-3
    made.apply(Ended("es-2", Outcome.COMPLETED))
    budget.step_ended()
    assert group.prompt_budget == unasked


def test_without_a_rule_engines_keep_their_own() -> None:
    made = cluster(COST)
    made.apply(Arrived(one := asking(1, None, 20e-3)))
    made.apply(Dispatched(one.id, "b"))
    assert not GroupBudget(made.groups["default"], None).step_ended()
    assert made.groups["default"].prompt_budget is None


def test_a_budget_that_was_told_does_not_follow_requests() -> None:
    made = cluster(COST)
    group = made.groups["default"]
    constant = GroupBudget(group, 77)
    made.apply(Arrived(one := asking(1, None, 20e-3)))
    made.apply(Dispatched(one.id, "b"))
    assert not constant.step_ended()
    assert group.prompt_budget == (77, 1)


def test_few_requests_with_tight_targets_do_not_slow_all_others_down() -> None:
    wanted = Wanted()
    assert not wanted
    wanted.add(None)
    wanted.add(Targets(0.1, None))
    assert not wanted, "nobody wants a time of each token"
    for _ in range(18):
        wanted.add(Targets(1.0, 40e-3))
    wanted.add(Targets(0.1, 1e-3))
    assert wanted
    assert wanted.tpot_s(0.0) == 40e-3
    wanted.add(Targets(None, 2e-3))
    assert wanted.tpot_s(0.0) == 40e-3
    wanted.add(Targets(None, 2e-3))
    assert wanted.tpot_s(0.0) == 2e-3
    assert wanted.tpot_s(2e-3) == 40e-3, "no budget keeps it"
    for targets in (None, *[Targets(1.0, 40e-3)] * 18):
        wanted.remove(targets)
    assert wanted.tpot_s(2e-3) is None


def test_a_target_that_no_budget_keeps_does_not_bound_prompts() -> None:
    made = cluster(COST)
    group = made.groups["default"]
    budget = GroupBudget(group, PromptBudget(Targets()))
    made.apply(Arrived(one := asking(1, None, 1e-3)))
    made.apply(Dispatched(one.id, "b"))
    assert budget.step_ended()
    GroupBudget(other := cluster(COST).groups["default"], PromptBudget(Targets())).step_ended()
    assert group.prompt_budget == other.prompt_budget


def budgets(cost: StepTime | None, budget: PromptBudget, steps: int) -> list[int | None]:
    """Of steps in which two ranks compute 1,000 prompt tokens each, or as many as a budget bounds.

    What a budget does not let them compute is there for the next one.
    """
    made = cluster(cost)
    group = made.groups["default"]
    chooser = GroupBudget(group, budget)
    made.apply(Arrived(one := asking(1, None, 40e-3)))
    made.apply(Dispatched(one.id, "b"))
    chosen: list[int | None] = []
    for step in range(2, 2 + steps):
        bound = (chosen and chosen[-1]) or 1000
        computed = 1000 if bound == 1 << 20 else bound
        for each in "ab":
            said = snapshot("delta", step)
            show(made, each, structs.replace(said, scheduled_prefill_tokens=computed))
        chooser.step_ended()
        chosen.append(group.prompt_budget and group.prompt_budget.tokens)
    return chosen[1:]  # a step is known to be over once the next one is reported


def test_where_no_budget_seems_to_keep_a_target_smaller_ones_are_tried_now_and_then() -> None:
    """By the cost, nothing depends on prompt tokens: full steps do not tell what they cost."""
    useless = StepTime(0.1, 0.0, 0.0, 1e-9)
    chosen = budgets(useless, PromptBudget(Targets()), 2304)
    parts = [*[500] * 16, *[250] * 16, *[500] * 16, *[2000] * 16]
    assert chosen == [*(2 * parts)[2:], *[1 << 20] * 1920, *(2 * parts), *[1 << 20] * 129]


def test_a_cost_that_stays_unknown_is_looked_for_while_a_target_is_wanted() -> None:
    wanted = budgets(None, PromptBudget(Targets(tpot_s=0.04)), 300)
    assert wanted[:255] == [512] * 255
    assert set(wanted[255:]) == {128, 256}
    assert set(budgets(None, PromptBudget(Targets(1.0)), 300)) == {512}


def test_steps_before_a_budget_do_not_count() -> None:
    made, budget = cluster(COST), Witness()
    for step in range(2, 9):
        for each in "ab":
            show(made, each, snapshot("delta", step, step_s=1.0))
    assert made.groups["default"].every_step.step_s > 1
    GroupBudget(made.groups["default"], budget).step_ended()
    assert budget.seen[0].step_s == 0
