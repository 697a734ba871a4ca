"""Who waits and who runs."""

from operator import attrgetter

import pytest

from engine_patches.admission.ledger import Ledger, Memory, Ticket
from router.core.kv_blocks import KvBlocks
from tests.support.admission import end_step


def ticket(id_: str = "a", prompt: int = 10, cap: int = 5, kind: int = 0) -> Ticket:
    return Ticket(id_, prompt, cap, kind=kind)


def test_a_prompt_budget_is_one_more_bound() -> None:
    bounds = attrgetter("step_tokens", "prompt_tokens_left", "prompt_chunk")
    unlimited = Memory(10, 0, 8)
    assert bounds(unlimited.under(30, 5, 12)) == (35, 18, 30)
    assert bounds(unlimited.under(30, 5, 40)) == (35, 0, 30)
    limited = Memory(10, 0, 8, step_tokens=32, prompt_tokens_left=7, prompt_chunk=20)
    assert bounds(limited.under(30, 5, 12)) == (32, 7, 20)
    assert bounds(limited.under(9, 5, 4)) == (14, 5, 9)


def test_who_cannot_run_yet_is_not_seen_and_keeps_its_place() -> None:
    ledger = Ledger()
    for id_ in "abc":
        ledger.arrived(ticket(id_))
    ledger.postpone("a")
    ledger.postpone("b")
    assert [one.id for one in ledger.waiting] == ["c"]
    assert ledger.waiting_kinds == {0: 1}
    ledger.resume("a")
    assert [one.id for one in ledger.waiting] == ["a", "c"]
    assert ledger.left("b", by_itself=False).id == "b"
    assert not ledger.postponed
    assert ledger.ended == {}


def test_a_request_that_runs_grows_by_a_token_a_step() -> None:
    ledger = Ledger()
    ledger.arrived(ticket())
    ledger.stepped()

    ledger.entered("a")
    (one,) = ledger.running.values()
    sizes = []
    for _ in range(5):
        sizes.append(ledger.size_tokens(one))
        assert ledger.steps <= end_step(one)
        ledger.stepped()

    assert sizes == [10, 11, 12, 13, 14]
    assert ledger.steps == end_step(one) + 1
    assert ledger.left("a").generated_tokens == 5
    assert (ledger.entered_total, ledger.ended) == (1, {0: 1})
    assert not ledger.running


def test_one_that_goes_on_beyond_its_cap_is_taken_to_end_next() -> None:
    ledger = Ledger()
    ledger.arrived(ticket(cap=2))
    ledger.entered("a")
    for _ in range(3):
        ledger.stepped()

    ledger.predict_again(ledger.running["a"])

    assert end_step(ledger.running["a"]) == ledger.steps


def test_one_whose_prompt_is_still_computed_does_not_grow() -> None:
    ledger = Ledger()
    for id_ in ("a", "b"):
        ledger.arrived(ticket(id_))
        ledger.entered(id_)

    ledger.stepped(still=["a"])

    assert [ledger.size_tokens(one) for one in ledger.running.values()] == [10, 11]


def test_who_lost_its_slot_has_its_place_back() -> None:
    ledger = Ledger()
    for id_ in ("a", "b", "c"):
        ledger.arrived(ticket(id_))
    ledger.entered("a")
    ledger.entered("b")
    ledger.stepped()

    ledger.preempted("b")
    ledger.preempted("a", keeps_tokens=False)

    assert [(one.id, one.entry_tokens) for one in ledger.waiting] == [
        ("a", 10),
        ("b", 11),
        ("c", 10),
    ]
    assert ledger.preempted_total == 2
    ledger.entered("b")
    assert ledger.size_tokens(ledger.running["b"]) == 11


def test_the_order_is_the_keys_and_who_is_withdrawn_is_gone() -> None:
    ledger = Ledger(lambda one: (one.prompt_tokens,))
    for id_, prompt in (("a", 3), ("b", 1), ("c", 2), ("d", 1)):
        ledger.arrived(ticket(id_, prompt, kind=prompt % 2))

    assert ledger.waiting_kinds == {0: 1, 1: 3}
    assert ledger.left("c", by_itself=False).id == "c"

    assert [one.id for one in ledger.waiting] == ["b", "d", "a"]
    assert ledger.arrivals == {0: 1, 1: 3}
    assert ledger.waiting_kinds == {1: 3}


def test_a_request_comes_once() -> None:
    ledger = Ledger()
    ledger.arrived(ticket())
    with pytest.raises(AssertionError, match="waits already"):
        ledger.arrived(ticket())
    ledger.entered("a")
    with pytest.raises(AssertionError, match="runs already"):
        ledger.arrived(ticket())


def test_memory_is_taken_in_blocks() -> None:
    memory = Memory(6, 3, slots_free=1, kv=KvBlocks.plain(16))

    assert [memory.need(Ticket("", tokens, 9)) for tokens in (1, 16, 17)] == [1, 1, 2]
    assert [memory.room(limit) for limit in (None, 6, 60, 4, 0)] == [3, 3, 3, 1, 0]
    assert (memory.capacity_tokens, memory.used_tokens) == (96, 48)


def test_blocks_that_running_requests_hold_are_not_needed() -> None:
    memory = Memory(6, 3, 1, KvBlocks.plain(16), found=lambda ticket: ticket.priority)

    assert [memory.need(Ticket("", 40, 9, priority=found)) for found in (0, 2, 9)] == [3, 1, 0]
