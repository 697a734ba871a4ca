"""Slots and places for adapters, as admission counts them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gated import Gated
from tests.support.plugin_engine import LoRARequest, Status

pytestmark = pytest.mark.usefixtures("vllm")


class Looked(list[Any]):
    """Requests, and how often somebody looked through them."""

    times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return super().__iter__()


def test_adapters_are_looked_up_once_however_many_wait_for_a_place() -> None:
    times = []
    for many in (1, 20):
        gated = Gated(slots=30, policy="headroom", max_loras=1)
        gated.add("a", 2).lora_request = LoRARequest("x", 1)
        assert gated.step() == ["a"]
        gated.scheduler.unready = {f"{number}" for number in range(many)}
        for id_ in gated.scheduler.unready:
            gated.add(id_, 2).lora_request = LoRARequest("y", 2)
        assert gated.step() == ["a"]
        running = gated.scheduler.running = Looked(gated.scheduler.running)
        gated.gate.open()
        assert len(gated.gate._ledger.postponed) == many
        assert not gated.gate.failed
        times.append(running.times)
    assert times == [times[0]] * 2


def test_whose_kv_is_on_its_way_takes_no_slot_until_it_has_come() -> None:
    gated = Gated(slots=2, policy="headroom")
    scheduler: Any = gated.scheduler
    gated.entrance.remote = True
    gated.add("a", 8)
    fetched = gated.add("b", 8)
    scheduler.waiting.remove(fetched)
    scheduler.kv_holding_waiting.append(fetched)
    fetched.status, fetched.num_computed_tokens = Status.WAITING_FOR_REMOTE_KVS, 8
    assert gated.step() == ["a"]
    gated.add("c", 8)
    for status, shown in ((Status.WAITING_FOR_REMOTE_KVS, ["c"]), (Status.RUNNING, [])):
        fetched.status = status
        gated.gate.open()
        assert [one.request_id for one in scheduler.waiting] == shown
        gated.gate.close()
    assert not gated.gate.failed


def test_vllm_does_not_count_as_passed_over_whom_it_does_not_see() -> None:
    """It bounds how long it defers prompts: not while others wait than those it passed over."""
    gated = Gated(slots=8, policy="headroom")
    requests = [gated.add(id_, 8) for id_ in "abc"]
    scheduler: Any = gated.scheduler
    scheduler.deferred_waiting = {*requests[1:]}
    gated.entrance.admit(["a", "b"], ())
    assert scheduler.deferred_waiting == {requests[1]}
    scheduler.deferred_waiting.add(requests[0])
    gated.entrance.admit_all()
    assert scheduler.deferred_waiting == {*requests}
