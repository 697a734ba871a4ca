"""Admission inside vLLM's own schedulers, without a model; a task of ``real_schedulers``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.support.real_schedulers import Driver, Schedulers

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "off": {"policy": "off"},
    "headroom": {"policy": "headroom"},
    "wait": {"policy": "wait", "thresholds": [2]},
    "hold": {"policy": "wait", "thresholds": [3], "hold_s": 0.005},
    "memory_checked": {"policy": "memory_checked"},
}
REQUESTS = 150
SLOTS = 24


def admission(make: Schedulers, flavour: str, ahead: int) -> dict[str, dict[str, int]]:
    """Each policy under the same overload."""
    return {
        name: Overload(make, flavour, ahead, settings).run() for name, settings in POLICIES.items()
    }


class Overload:
    """Requests that need several times the memory; their clients say how long they get.

    What the policy's ledger has is compared with the scheduler after every step.
    """

    def __init__(
        self, make: Schedulers, flavour: str, ahead: int, settings: Mapping[str, Any]
    ) -> None:
        self.scheduler = make.make(
            flavour, slots=SLOTS, blocks=49, step_tokens=128, admission=settings
        )
        self.driver = Driver(self.scheduler, ahead)
        self.gate = self.scheduler._gate
        self.rng = random.Random(1)
        self.seen = {"steps": 0, "preempted": 0, "aborted": 0, "most_waiting": 0, "ended": 0}

    def run(self) -> dict[str, int]:
        for number in range(REQUESTS):
            output = self.rng.choice([10, 40, 120, 250])
            prompt = [self.rng.randrange(10, 200)] * self.rng.randrange(5, 300)
            self.driver.submit(prompt, output, predicted=output)
            if number % 3 == 0:
                self._step()
            if self.rng.random() < 0.05:
                self.driver.abort(self.rng.choice(list(self.scheduler.requests)))
                self.seen["aborted"] += 1
        while self.scheduler.requests:
            self._step()
            assert self.seen["steps"] < 20_000, "nobody gets in any more"
        list(self.driver.drain())
        self._step()
        assert not self.gate.failed
        assert not self.gate._ledger.running
        assert not self.gate._ledger.waiting
        self.scheduler.shutdown()
        return self.seen

    def _step(self) -> None:
        before = set(self.scheduler.requests)
        self.driver.step()
        scheduler, ledger = self.scheduler, self.gate._ledger
        assert not self.gate.failed
        assert scheduler.max_num_running_reqs == SLOTS
        assert getattr(scheduler, "max_num_active_reqs", SLOTS) == SLOTS
        alive = {id_ for id_ in ledger.running if id_ in scheduler.requests}
        assert alive == {one.request_id for one in scheduler.running}
        for id_ in alive:
            one = scheduler.requests[id_]
            size = one.num_prompt_tokens + one.num_output_tokens + one.num_output_placeholders
            assert ledger.size_tokens(ledger.running[id_]) == size, (id_, size)
        waiting = {ticket.id for ticket in ledger.waiting} & scheduler.requests.keys()
        assert waiting == scheduler.requests.keys() - alive
        self.seen["steps"] += 1
        self.seen["ended"] += len(before - scheduler.requests.keys())
        self.seen["preempted"] = ledger.preempted_total
        self.seen["most_waiting"] = max(self.seen["most_waiting"], len(waiting))
