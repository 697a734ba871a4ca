"""Admission on top of a scheduler that is not vLLM's."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.admission import read_admission
from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.entrance import Entrance
from engine_patches.plugin.gate import AdmissionGate
from engine_patches.plugin.settings import PlugInError
from router.core.types import ADMISSION_ENDED
from tests.support.gated import Gated
from tests.support.plugin_engine import (
    Coordinator,
    FakeScheduler,
    FullAttentionManager,
    LoRARequest,
    Request,
    SlidingWindowManager,
    Status,
)

pytestmark = pytest.mark.usefixtures("vllm")


def test_requests_enter_below_the_headroom_and_as_memory_comes_free() -> None:
    gated = Gated(policy="headroom", headroom=0.1, adaptive=False)
    for id_ in "abc":
        gated.add(id_, 36)
    assert gated.gate.admissible_blocks == 25
    assert gated.step() == ["a", "b"]
    assert gated.gate.admissible_blocks == 2
    assert gated.step("a") == ["a", "b"]
    assert gated.step() == ["b", "c"]
    assert gated.scheduler.max_num_running_reqs == 8


def test_prompts_in_chunks_have_their_whole_memory() -> None:
    gated = Gated(policy="headroom", headroom=0.1, adaptive=False)
    gated.scheduler.chunk = 8
    gated.add("a", 80)
    gated.add("b", 12)
    assert gated.step() == ["a"]
    assert [gated.step() for _ in range(11)] == [["a"]] * 11
    assert gated.step("a") == ["a"]
    assert gated.step() == ["b"]


def test_the_shortest_go_first_by_what_clients_say() -> None:
    gated = Gated(slots=1, policy="memory_checked", ageing=0)
    for id_, hint in (("long", 30), ("short", 3), ("unknown", None), ("odd", -1)):
        gated.add(id_, 10, hint)
    order = [gated.step(id_) for id_ in ("short", "long", "unknown", "odd")]
    assert order == [["short"], ["long"], ["unknown"], ["odd"]]


@pytest.mark.parametrize(
    ("step_tokens", "prompt_chunk", "budget", "entering"),
    [(8192, 0, 0, 2), (40, 0, 0, 1), (8192, 22, 0, 1), (8192, 0, 22, 1), (8192, 30, 8000, 1)],
)
def test_a_prompt_that_takes_several_steps_ends_later(
    step_tokens: int, prompt_chunk: int, budget: int, entering: int
) -> None:
    gated = Gated(
        policy="memory_checked", ageing=0, step_tokens=step_tokens, prompt_chunk=prompt_chunk
    )
    gated.add("a", 44, 13)
    gated.add("b", 28, 14)
    gated.gate.open(budget)
    assert len(gated.scheduler.waiting) == entering


def test_who_lost_memory_comes_back_and_who_left_is_forgotten() -> None:
    gated = Gated(policy="headroom")
    for id_ in "ab":
        gated.add(id_, 20)
    assert gated.step() == ["a", "b"]
    assert gated.step(preempt=("b",)) == ["a"]
    gated.scheduler.finish_requests(["a"])
    gated.scheduler.finished_req_ids.add("never heard of")
    assert gated.step() == ["b"]
    assert gated.step("b") == ["b"]
    assert gated.step() == []
    assert not gated.gate.failed
    assert gated.gate.admissible_blocks == 25


def test_what_vllm_lets_in_by_itself() -> None:
    gated = Gated(policy="off")
    for id_ in "abcd":
        gated.add(id_, 36)
    assert gated.step() == ["a", "b", "c", "d"]


def test_a_closed_gate_pauses_until_the_hold_is_over() -> None:
    gated = Gated(policy="wait", thresholds=[2], hold_s=0.5)
    gated.add("a", 10)
    assert gated.step() == []
    gated.now_s = 0.499
    assert gated.step() == []
    assert gated.slept == [pytest.approx(0.002), pytest.approx(0.001)]
    gated.now_s = 0.5
    assert gated.step() == ["a"]
    gated.add("b", 10)
    assert gated.step() == ["a"]
    assert len(gated.slept) == 2, "it never pauses while somebody runs"


def test_a_rank_of_a_group_never_sleeps() -> None:
    gated = Gated(policy="wait", thresholds=[2], hold_s=0.5)
    gated.gate._engine.lockstep = True
    gated.add("a", 10)
    assert gated.step() == []
    assert not gated.slept


def test_sessions_and_transfers_that_wait_beside_the_queue_may_run() -> None:
    gated = Gated(policy="headroom")
    scheduler: Any = gated.scheduler
    for id_ in "abc":
        gated.add(id_, 10)
    assert gated.step() == ["a", "b", "c"]
    beside = scheduler.kv_holding_waiting
    beside.extend(scheduler.running)
    scheduler.running.clear()
    beside[0].status = beside[1].status = Status.WAITING_FOR_STREAMING_REQ
    beside[2].status = Status.WAITING_FOR_REMOTE_KVS
    scheduler.num_waiting_for_streaming_input = 2
    gated.add("d", 10)
    gated.gate.open()
    assert [one.request_id for one in scheduler.waiting] == ["d"]
    assert [one.request_id for one in beside] == ["a", "b", "c"]
    gated.gate.close()


def test_a_transfer_holds_memory_once_and_enters_without_asking() -> None:
    gated = Gated(policy="headroom", headroom=0.1, adaptive=False)
    scheduler: Any = gated.scheduler
    gated.add("a", 20)
    assert gated.step() == ["a"]
    fetched = gated.add("b", 60)
    scheduler.waiting.remove(fetched)
    scheduler.kv_holding_waiting.append(fetched)
    fetched.status, fetched.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, 60
    assert gated.step() == ["a"]
    assert gated.gate.admissible_blocks == 1
    gated.add("c", 8)
    gated.gate.open()
    assert [*scheduler.kv_holding_waiting] == [fetched], "the one that holds memory"
    assert not scheduler.waiting
    gated.gate.close()
    scheduler.kv_holding_waiting.remove(fetched)
    scheduler.waiting.insert(0, fetched)
    fetched.status, fetched.cached_tokens = Status.RUNNING, 59
    rest, scheduler.waiting[1:] = scheduler.waiting[1:], []
    gated.gate.scheduled(scheduler.schedule())
    scheduler.waiting.extend(rest)
    assert [one.request_id for one in scheduler.running] == ["a", "b"]
    ledger = gated.gate._ledger
    assert [ledger.size_tokens(one) for one in ledger.running.values()] == [23, 61]


def test_whose_kv_failed_to_come_is_not_kept_out() -> None:
    gated = Gated(policy="headroom", headroom=0.1, adaptive=False)
    scheduler: Any = gated.scheduler
    failed = gated.add("a", 20)
    scheduler.waiting.remove(failed)
    scheduler.kv_holding_waiting.append(failed)
    failed.status, failed.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, 20
    gated.step()
    failed.status, failed.num_computed_tokens = Status.RUNNING, 0
    gated.add("b", 96)
    gated.gate.open()
    assert [*scheduler.kv_holding_waiting] == [failed]
    assert not scheduler.waiting
    gated.gate.close()


def test_whose_kv_failed_to_come_waits_in_the_queue_before_all_others() -> None:
    gated = Gated(policy="headroom", headroom=0.1, adaptive=False)
    scheduler: Any = gated.scheduler
    gated.entrance.remote = True
    failed = gated.add("a", 20)
    scheduler.waiting.remove(failed)
    scheduler.kv_holding_waiting.append(failed)
    failed.status, failed.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, 20
    gated.step()
    gated.add("b", 8)
    scheduler.kv_holding_waiting.remove(failed)
    scheduler.waiting.append(failed)
    failed.status, failed.num_computed_tokens = Status.RUNNING, 0
    gated.gate.open()
    assert [one.request_id for one in scheduler.waiting] == ["a", "b"]
    gated.gate.close()


def test_a_sessions_next_input_enters_with_its_own_size() -> None:
    gated = Gated(policy="headroom")
    scheduler: Any = gated.scheduler
    session = gated.add("a", 10)
    assert gated.step() == ["a"]
    scheduler.running.remove(session)
    scheduler.kv_holding_waiting.append(session)
    session.status = Status.WAITING_FOR_STREAMING_REQ
    scheduler.num_waiting_for_streaming_input = 1
    gated.step()
    session.num_prompt_tokens, session.num_output_tokens = 40, 0
    gated.gate.arrived(session)
    scheduler.num_waiting_for_streaming_input = 0
    scheduler.kv_holding_waiting.remove(session)
    scheduler.waiting.append(session)
    session.status, session.cached_tokens = Status.RUNNING, 10
    output = scheduler.schedule()
    gated.gate.scheduled(output)
    assert not gated.gate.failed
    ledger = gated.gate._ledger
    assert ledger.size_tokens(ledger.running["a"]) == 41


def test_an_idle_engine_is_offered_the_head_whatever_the_memory_says() -> None:
    """Its watermark is not kept then, and a hybrid model's groups hold less than a prompt."""
    for policy in ("headroom", "wait", "memory_checked"):
        gated = Gated(policy=policy)
        gated.scheduler.kv_cache_manager.watermark_blocks = 10
        gate = AdmissionGate(
            EngineView(gated.scheduler), gated.entrance, read_admission({"policy": policy})
        )
        gated.gate = gate
        gated.add("a", 80)
        gated.add("b", 8)
        assert gated.step() == ["a"], policy


def test_who_lost_memory_and_was_withdrawn_at_once() -> None:
    gated = Gated(policy="headroom")
    for id_ in "ab":
        gated.add(id_, 10)
    assert gated.step() == ["a", "b"]
    gated.scheduler._preempt(gated.scheduler.running[1])  # the prefix cache is reset
    gated.scheduler.finish_requests(["b"])
    assert gated.step() == ["a"]
    assert not gated.gate.failed


def test_sizes_are_measured_where_steps_give_several_tokens() -> None:
    gated = Gated(policy="memory_checked")
    gated.scheduler.num_spec_tokens = 3
    gated.entrance = Entrance(gated.scheduler)
    gated.gate = AdmissionGate(
        EngineView(gated.scheduler), gated.entrance, read_admission({"policy": "memory_checked"})
    )
    one = gated.add("a", 10, 30)
    gated.step()
    one.num_output_tokens += 3
    one.num_computed_tokens += 3
    gated.step()
    ledger = gated.gate._ledger
    assert ledger.size_tokens(ledger.running["a"]) == one.num_tokens == 15
    gated.scheduler._preempt(one)
    gated.step()
    assert ledger.size_tokens(ledger.running["a"]) == one.num_tokens


def test_who_cannot_run_yet_is_chosen_once_and_keeps_its_place() -> None:
    gated = Gated(policy="headroom", headroom=0.1, adaptive=False)
    gated.add("a", 40)
    other = gated.add("b", 20)
    assert gated.step() == ["a", "b"]
    assert gated.step(preempt=("b",)) == ["a"]
    gated.add("c", 60)
    gated.add("d", 20)
    other.stale = 1
    assert gated.step() == ["a"], "vLLM passes it over; the others were not chosen"
    assert gated.step() == ["a"], "what waits behind it is too long"
    other.stale = 0
    assert gated.step() == ["a", "b"]
    assert gated.step("a", "b") == ["a", "b"]
    assert gated.step() == ["c", "d"]


class Grammar:
    """Of a request; ``grammar`` is None until it is compiled."""

    grammar: object | None = None


def test_a_grammar_and_an_adapter_hold_nobody_up() -> None:
    gated = Gated(policy="headroom", headroom=0.1, adaptive=False, max_loras=1)
    adapted, adapted_too, same = (gated.add(id_, 8) for id_ in ("a", "a2", "a3"))
    adapted.lora_request, same.lora_request = LoRARequest("x", 1), LoRARequest("x", 1)
    adapted_too.lora_request = LoRARequest("y", 2)
    structured = gated.add("g", 56)
    structured.status, structured.structured_output_request = (
        Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        Grammar(),
    )
    gated.add("z", 12)
    gated.scheduler.unready = {"a2", "g"}
    assert gated.step() == ["a", "a3"], "g has no room left for z"
    ledger = gated.gate._ledger
    assert [*ledger.postponed] == ["a2", "g"]
    assert gated.step("a", "a3") == ["a", "a3", "z"]
    structured.structured_output_request.grammar = "{}"
    gated.scheduler.finish_requests(["a2"])
    gated.scheduler.unready = set()
    assert gated.step("z") == ["z", "g"]
    assert not ledger.postponed
    assert not gated.gate.failed


def test_only_who_enters_is_shown_where_memory_can_be_had_without_a_slot() -> None:
    for policy in ("headroom", "memory_checked"):
        gated = Gated(policy=policy)
        scheduler: Any = gated.scheduler
        scheduler.connector = object()
        for id_, tokens in (("a", 40), ("b", 40), ("c", 40), ("d", 8)):
            gated.add(id_, tokens, 1)
        queue = [one.request_id for one in scheduler.waiting]
        gated.gate.open()
        shown = [one.request_id for one in scheduler.waiting]
        assert 0 < len(shown) < 4
        gated.gate.close()
        assert sorted(one.request_id for one in scheduler.waiting) == queue
        assert [one.request_id for one in scheduler.waiting][: len(shown)] == shown
        assert gated.step() == shown


def test_a_sessions_next_input_is_no_new_request() -> None:
    gated = Gated(policy="headroom")
    gated.gate.arrived(gated.add("a", 10))
    assert gated.step() == ["a"]


def test_an_engine_that_schedules_ahead_frees_memory_a_step_later() -> None:
    hinted = [Gated(policy="memory_checked", ahead=ahead) for ahead in (0, 1)]
    for gated in hinted:
        gated.add("a", 36, 13)
        gated.add("b", 36, 14)
    assert [gated.step() for gated in hinted] == [["a", "b"], ["a"]]


def test_a_fault_ends_admission_and_not_the_engine() -> None:
    gated = Gated(policy="headroom", headroom=0.5, headroom_max=0.5)
    for id_ in "abcd":
        gated.add(id_, 36)
    assert gated.gate.admission == "headroom"
    gated.gate.policy = SimpleNamespace(admit=None)
    assert gated.step() == ["a", "b", "c", "d"]
    assert gated.gate.failed
    assert gated.gate.admission == ADMISSION_ENDED
    gated.add("e", 36)
    assert gated.step("a") == ["a", "b", "c", "d", "e"]


def test_a_fault_in_what_is_told_ends_admission_too() -> None:
    gated = Gated(policy="headroom")
    gated.gate.policy = SimpleNamespace(admissible_blocks=None)
    assert gated.gate.admissible_blocks is None
    assert gated.gate.failed


def test_who_chooses_needs_a_queue_in_order_of_arrival() -> None:
    scheduler = FakeScheduler()
    scheduler.policy = SimpleNamespace(value="priority")
    entrance = Entrance(scheduler)
    with pytest.raises(PlugInError, match="start it with --scheduling-policy fcfs"):
        AdmissionGate(EngineView(scheduler), entrance, read_admission({"policy": "wait"}))
    gate = AdmissionGate(EngineView(scheduler), entrance, read_admission({"policy": "headroom"}))
    scheduler.add_request(request := Request("a", 10))
    gate.arrived(request)
    gate.open()
    assert [*scheduler.waiting] == [request]


def test_names_that_are_missing_are_said() -> None:
    scheduler: Any = FakeScheduler()
    del scheduler.policy
    with pytest.raises(PlugInError, match=r"admission cannot work .* no Scheduler.policy.value"):
        EngineView(scheduler).require("admission")
    scheduler = FakeScheduler()
    del scheduler.kv_holding_waiting
    with pytest.raises(PlugInError, match=r"no Scheduler.kv_holding_waiting or skipped_waiting"):
        EngineView(scheduler).require("admission")


def test_hybrid_models_count_in_blocks_of_all_groups() -> None:
    gated = Gated(policy="headroom")
    window = SlidingWindowManager(12, most=2, sliding_window=12)
    gated.scheduler.kv_cache_manager.coordinator = Coordinator(FullAttentionManager(4), window)
    view = EngineView(gated.scheduler)
    gate = AdmissionGate(view, gated.entrance, read_admission({}))
    assert gate.admissible_blocks == 25
    assert view.memory.kv.tokens(25) == (25 - 2) * 4
