"""What is read of vLLM's KV groups, and how a gate counts with it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.admission import read_admission
from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.compat_memory import KvMemory
from engine_patches.plugin.entrance import Entrance
from engine_patches.plugin.gate import AdmissionGate
from router.core.types import KvGroup
from tests.support.plugin_engine import (
    ChunkedLocalAttentionManager,
    Coordinator,
    FakeScheduler,
    FullAttentionManager,
    MambaManager,
    Request,
    SlidingWindowManager,
)

pytestmark = pytest.mark.usefixtures("vllm")


def read(*managers: FullAttentionManager, **changes: Any) -> KvMemory:
    scheduler: Any = FakeScheduler(blocks=100)
    scheduler.kv_cache_manager.coordinator = Coordinator(*managers)
    scheduler.vllm_config.max_concurrent_batches = changes.pop("batches", 1)
    vars(scheduler).update(changes)
    return KvMemory(scheduler)


@pytest.mark.parametrize(
    ("manager", "group"),
    [
        (FullAttentionManager(16), KvGroup(16, 0, 100)),
        (
            SlidingWindowManager(16, most=30, sliding_window=100),
            KvGroup(16, 0, 100, "sliding", 100, 0, 30, 8),
        ),
        (
            SlidingWindowManager(16, most=30, sliding_window=100, extra_retained_tokens=12),
            KvGroup(16, 0, 100, "sliding", 112, 0, 30, 8),
        ),
        (
            ChunkedLocalAttentionManager(16, most=40, attention_chunk_size=128),
            KvGroup(16, 0, 100, "chunked", 128, 0, 40, 9),
        ),
        (MambaManager(4096), KvGroup(4096, 0, 100, "mamba", 2, 0, 0, 2)),
        (MambaManager(64, most=4, state=3), KvGroup(64, 0, 100, "mamba", 2, 192, 4, 5)),
    ],
)
def test_groups_are_as_their_managers_count(manager: FullAttentionManager, group: KvGroup) -> None:
    memory = read(manager)
    assert memory.groups == (group,)
    assert memory.used(7)[0].blocks_used == 7
    assert not manager.req_to_blocks
    for tokens in (1, 16, 17, 500, 4096):
        asked = manager.get_num_blocks_to_allocate("", tokens, (), 0, 0, tokens)
        assert memory.kv.entering(tokens) == asked


def test_speculation_and_steps_ahead_take_more() -> None:
    window = SlidingWindowManager(16, most=30, sliding_window=100)
    mamba = MambaManager(64, most=1)
    memory = read(
        window,
        FullAttentionManager(16),
        mamba,
        batches=2,
        num_lookahead_tokens=4,
        num_spec_tokens=3,
    )
    assert memory.in_flight == 4
    assert [group.ahead_tokens for group in memory.groups] == [4, 4, 0]
    assert memory.groups[0].most_held == -(-(100 + 4 + 4 + 15) // 16)


def test_a_group_that_counts_otherwise_keeps_every_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(FullAttentionManager):
        """Takes more in the middle."""

        def get_num_blocks_to_allocate(
            self, request_id: str, num_tokens: int, *_: Any, **__: Any
        ) -> int:
            return 0

    with caplog.at_level(logging.WARNING, logger="vllm.evenstep"):
        memory = read(Odd(16))
    assert memory.groups == (KvGroup(16, 0, 100, "other"),)
    assert "Odd counts KV blocks in a way that is not known here" in caplog.text
    assert memory.kv.entering(33) == 3


def test_what_running_requests_hold_of_a_prompt() -> None:
    scheduler: Any = FakeScheduler(blocks=100)
    memory = KvMemory(scheduler)
    request = Request("a", 40)
    request.block_hashes = ["x", "y"]
    before = memory.prefix(request)
    request.block_hashes.append("of its answer")
    assert (before, request.block_hashes.pop()) == (("x", "y"), "of its answer")
    scheduler.kv_cache_manager.coordinator.held = [True, True, False]
    assert memory.blocks_found(request) == 2
    request.skip_reading_prefix_cache = True
    assert memory.prefix(request) == ()
    # Mamba's manager asks for all blocks where it cannot go on from a state yet.
    scheduler.kv_cache_manager.coordinator.get_num_blocks_to_allocate = lambda *_, **__: 101
    assert memory.blocks_found(request) == 0


def test_what_a_request_frees_behind_its_window() -> None:
    window = SlidingWindowManager(4, sliding_window=6)
    mamba = MambaManager(4, last_state_block_idx={"a": 2})
    memory = read(window, mamba)
    held = [SimpleNamespace(is_null=null) for null in (True, False, False, False, False)]
    window.req_to_blocks["a"] = mamba.req_to_blocks["a"] = held
    request = Request("a", 20)
    request.num_computed_tokens = 20
    # Blocks 1 and 2 of the window, the state before the last one's, and a new block of each.
    assert memory.growth_of(request) == 2 - 2 - 1
    request.num_in_flight_tokens = 9
    assert memory.growth_of(request) == 2


def gated(*managers: FullAttentionManager, **settings: Any) -> tuple[AdmissionGate, Any]:
    scheduler: Any = FakeScheduler(8, chunk=40, blocks=25)
    scheduler.kv_cache_manager.coordinator = Coordinator(*managers)
    return (
        AdmissionGate(EngineView(scheduler), Entrance(scheduler), read_admission(settings)),
        scheduler,
    )


def step(gate: AdmissionGate, scheduler: Any) -> list[str]:
    gate.open()
    output = scheduler.schedule()
    gate.close()
    gate.scheduled(output)
    scheduler.update_from_output(output)
    return [one.request_id for one in scheduler.running]


def add(gate: AdmissionGate, scheduler: Any, id_: str, *hashes: str) -> Request:
    request = Request(id_, 40)
    request.block_hashes = list(hashes)
    scheduler.add_request(request)
    gate.arrived(request)
    return request


@pytest.mark.parametrize(("first", "entering"), [("x", ["a", "b", "c"]), ("y", ["a", "b"])])
def test_what_running_requests_hold_is_not_needed_again(first: str, entering: list[str]) -> None:
    gate, scheduler = gated(FullAttentionManager(4), policy="headroom", headroom=0.0)
    for id_ in "ab":
        add(gate, scheduler, id_, "x")
    assert step(gate, scheduler) == ["a", "b"]
    add(gate, scheduler, "c", first)
    scheduler.kv_cache_manager.coordinator.held = [True] * 9
    assert step(gate, scheduler) == entering
    assert not gate.failed


def test_where_states_are_cached_vllm_is_always_asked() -> None:
    gate, scheduler = gated(FullAttentionManager(4), MambaManager(64, most=1), policy="headroom")
    add(gate, scheduler, "a", "x")
    add(gate, scheduler, "b", "y")
    gate.open()
    assert len(scheduler.waiting) == 2
    scheduler.kv_cache_manager.coordinator.held = [True] * 9
    asked = gate._memory().found(gate._ledger.waiting[0])
    assert asked == 18


def test_a_prompt_just_computed_frees_what_is_behind_its_window() -> None:
    window = SlidingWindowManager(4, most=10, sliding_window=4)
    gate, scheduler = gated(FullAttentionManager(4), window, policy="headroom")
    add(gate, scheduler, "a")
    step(gate, scheduler)
    assert gate._begun == {"a": gate._ledger.steps}
    held = [SimpleNamespace(is_null=False) for _ in range(10)]
    window.req_to_blocks["a"] = held
    scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks["a"] = held
    assert gate._memory().used_blocks == 10 + 2 - 9
    step(gate, scheduler)
    gate._memory()
    assert gate._begun == {}
    assert not gate.failed


def test_a_request_whose_last_token_is_under_way_takes_no_block() -> None:
    used = []
    for most in (5, 6):
        scheduler: Any = FakeScheduler(8, chunk=40, blocks=25)
        settings = read_admission({"policy": "headroom"})
        gate = AdmissionGate(EngineView(scheduler), Entrance(scheduler), settings, ahead=1)
        request = Request("a", 12)
        request.max_tokens = most
        scheduler.add_request(request)
        gate.arrived(request)
        for _ in range(5):
            step(gate, scheduler)
        assert request.num_output_tokens == 5
        used.append(gate._memory().used_blocks)
    # Its 16 tokens have four blocks; a seventeenth would take another.
    assert used == [4, 5]
