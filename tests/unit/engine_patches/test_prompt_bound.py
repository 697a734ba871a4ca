"""The prompt budget of one engine, on top of a scheduler that is not vLLM's."""

from typing import Any

import pytest

from engine_patches.plugin.compat_prompts import PromptTokens, watch_group_steps
from engine_patches.plugin.prompt_bound import PromptBound
from engine_patches.plugin.settings import PlugInError
from engine_patches.stream.prompt_leases import packed
from router.core.step_time import StepBudget
from router.core.wire import BUDGET_LEASE_S, BudgetMessage
from tests.support import plugin_engine
from tests.support.plugin_engine import FakeScheduler, Request

pytestmark = pytest.mark.usefixtures("vllm")


class Bounded:
    def __init__(self, lockstep: bool = False) -> None:
        self.scheduler = FakeScheduler()
        self.now_s = 100.0
        steps = PromptTokens(self.scheduler)
        self.bound = PromptBound(steps, lockstep=lockstep, clock=lambda: self.now_s)

    def begin(self, *prompts: int) -> None:
        """Schedule a first step of requests with so many prompt tokens each."""
        for at, tokens in enumerate(prompts):
            self.scheduler.add_request(Request(f"{at}", tokens))
        self.scheduler.schedule()

    def told(self, tokens: int, router: str = "r", late_s: float = 0.0, every: int = 1) -> None:
        told = BudgetMessage(router, "e", self.now_s - late_s, tokens, every)
        self.bound.leases.take(told, self.now_s)

    def step(self) -> tuple[int, int]:
        """What vLLM may compute in the next step: all tokens, and one request's."""
        self.bound.open()
        config = self.scheduler.scheduler_config
        assert not (self.bound.holds and self.scheduler.prefill_capacity_bound)
        bounds = self.scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold
        self.bound.close()
        assert self.scheduler.max_num_scheduled_tokens == 8192
        assert config.long_prefill_token_threshold == 0
        return bounds


def test_an_engine_alone_keeps_the_least_budget_until_its_lease_ends() -> None:
    engine = Bounded()
    assert engine.step() == (8192, 0)
    engine.told(70)
    assert (engine.step(), engine.bound.tokens) == ((70, 70), 70)
    engine.told(50, "other")
    assert engine.step() == (50, 50)
    engine.now_s += BUDGET_LEASE_S / 2
    engine.told(90)
    assert engine.step() == (50, 50)
    engine.now_s += BUDGET_LEASE_S / 2
    assert engine.step() == (90, 90)
    engine.now_s += BUDGET_LEASE_S / 2
    assert (engine.step(), engine.bound.tokens) == ((8192, 0), 0)


def test_of_two_routers_the_one_with_fewer_tokens_a_step_counts() -> None:
    engine = Bounded()
    engine.told(100)
    engine.told(1000, "other", every=20)
    made = [engine.step() for _ in range(40)]
    assert made.count((1000, 1000)) == 2
    assert made.count((0, 0)) == 38
    engine.told(40, "third")
    assert engine.step() == (40, 40)


def test_what_comes_late_or_again_is_not_held() -> None:
    engine = Bounded()
    engine.told(70, late_s=BUDGET_LEASE_S)
    assert engine.step() == (8192, 0)
    engine.told(70, late_s=-1.0)
    assert engine.step() == (8192, 0), "from the future: the clock was set back"
    engine.told(50)
    engine.told(60, late_s=1.0)
    engine.told(70)
    assert engine.step() == (50, 50)


def test_requests_in_decode_keep_their_tokens() -> None:
    engine = Bounded()
    engine.begin(3, 30, 2)
    engine.told(70)
    assert engine.step() == (72, 70), "two decode, the prompt of one is computed still"
    engine.scheduler.running[0].max_tokens = 1
    assert engine.step() == (71, 70), "its last token is under way"


def test_prompts_that_are_partly_computed_leave_those_in_decode_their_tokens() -> None:
    engine = Bounded()
    engine.begin(30, 30, 2)
    engine.told(70)
    assert engine.step() == (71, 35), "two prompts ahead of one in decode"
    engine.told(1, "other")
    assert engine.step() == (3, 1)


def test_a_request_that_waits_for_its_pipeline_stage_takes_no_tokens() -> None:
    engine = Bounded()
    engine.begin(2, 2)
    engine.scheduler.current_step = 4
    engine.scheduler.running[0].next_decode_eligible_step = 6
    engine.told(70)
    assert engine.step() == (71, 70)


def test_in_a_window_only_one_step_computes_prompts() -> None:
    engine = Bounded(lockstep=True)
    engine.begin(3, 30)
    engine.scheduler.prefill_capacity_bound = True
    engine.told(70, every=4)
    made = []
    for number in range(1, 10):
        engine.bound.stepped(number, lambda own: own)
        made.append((engine.bound.holds, engine.step()))
    # Of a closed step vLLM defers the prompts itself; KV from elsewhere may come in it.
    closed, open_ = (True, (8192, 0)), (False, (71, 70))
    assert made == [closed, closed, closed, open_] * 2 + [closed]
    assert engine.bound.tokens == 70
    engine.bound.stepped(0, lambda own: own)
    assert not engine.bound.holds, "the first step after a pause"


def test_an_engine_alone_counts_its_own_steps() -> None:
    engine = Bounded()
    engine.told(70, every=2)
    made = [(engine.step(), engine.bound.holds) for _ in range(4)]
    assert made == [((0, 0), True), ((70, 70), False)] * 2


def test_a_budget_leaves_room_for_a_draft_and_is_none_above_the_engines_own() -> None:
    scheduler = FakeScheduler(drafts=3)
    scheduler.scheduler_config.long_prefill_token_threshold = 512
    steps = PromptTokens(scheduler)
    steps.bound(1)
    assert scheduler.max_num_scheduled_tokens == 4
    steps.bound(9000)
    assert scheduler.max_num_scheduled_tokens == 8192
    assert scheduler.scheduler_config.long_prefill_token_threshold == 512


@pytest.mark.parametrize(
    ("owner", "name", "value", "told"),
    [
        ("scheduler_config", "enable_chunked_prefill", False, "--no-enable-chunked-prefill"),
        ("scheduler_config", "disable_chunked_mm_input", True, "--disable-chunked-mm-input"),
        ("", "need_mamba_block_aligned_split", True, "the Mamba cache mode align"),
    ],
)
def test_an_engine_whose_prompts_have_no_pieces_does_not_start(
    owner: str, name: str, value: bool, told: str
) -> None:
    scheduler = FakeScheduler()
    setattr(getattr(scheduler, owner, scheduler), name, value)
    with pytest.raises(PlugInError, match=told):
        PromptTokens(scheduler)


def test_ranks_take_the_least_after_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Bounded(lockstep=True)
    core: Any = plugin_engine.DPEngineCoreProc
    monkeypatch.setattr(core, "_has_global_unfinished_reqs", core._has_global_unfinished_reqs)
    watch_group_steps(engine.bound.stepped)
    rank = core(*(packed(StepBudget(tokens)) for tokens in (60, 90)))
    engine.told(70)
    assert engine.step() == (8192, 0), "nothing is agreed on yet"
    assert rank._has_global_unfinished_reqs(True) is True
    assert engine.step() == (60, 60)
    rank.dp_group = (1, packed(StepBudget(90)))
    for _ in range(7):
        rank._has_global_unfinished_reqs(True)
        assert engine.step() == (60, 60)
    assert rank._has_global_unfinished_reqs(False) is False
    assert engine.step() == (8192, 0), "another rank was told nothing"


def test_without_one_rank_there_is_no_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Bounded(lockstep=True)
    core: Any = plugin_engine.DPEngineCoreProc
    monkeypatch.setattr(core, "_has_global_unfinished_reqs", core._has_global_unfinished_reqs)
    watch_group_steps(engine.bound.stepped)
    rank = core(60)
    engine.told(70)
    for _ in range(9):
        assert rank._has_global_unfinished_reqs(True) is True
    assert engine.step() == (8192, 0)
    late, came_late = core(60), Bounded(lockstep=True)
    late.dp_store, late.dp_rank = rank.dp_store, 2
    watch_group_steps(came_late.bound.stepped)
    came_late.told(70)
    late._has_global_unfinished_reqs(True)
    assert came_late.step() == (8192, 0), "all are there now, and it has been decided"
    assert [one.getMessage() for one in caplog.records] == [
        "evenstep: no prompt budget here: not all ranks of the group take one"
    ] * 2


def test_where_the_group_has_no_store_there_is_no_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Bounded(lockstep=True)
    core: Any = plugin_engine.DPEngineCoreProc
    monkeypatch.setattr(core, "_has_global_unfinished_reqs", core._has_global_unfinished_reqs)
    watch_group_steps(engine.bound.stepped)
    rank = core(60, 90)
    del rank.dp_store
    engine.told(70)
    assert rank._has_global_unfinished_reqs(True) is True
    assert engine.step() == (8192, 0)
    assert "no prompt budget here" in caplog.text


def test_a_rank_that_failed_agrees_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = Bounded(lockstep=True), []

    def least(own: int) -> int:
        given.append(own)
        return own

    engine.told(70)
    engine.bound.stepped(1, least)
    monkeypatch.delattr(engine.scheduler, "running")
    engine.bound.open()
    assert (engine.bound.failed, engine.bound.tokens) == (True, 0)
    engine.bound.stepped(9, least)
    assert given == [packed(StepBudget(70)), 1]
