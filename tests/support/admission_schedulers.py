"""Admission inside vLLM's own schedulers, without a model; a task of ``real_schedulers``."""

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
    "remote": {"policy": "headroom"},
    "remote, shortest first": {"policy": "memory_checked"},
    "sessions": {"policy": "headroom"},
    "sessions, shortest first": {"policy": "memory_checked"},
}
REQUESTS = 150
SLOTS = 24


def admission(make: Schedulers, flavour: str, ahead: int) -> dict[str, dict[str, int]]:
    """Each policy under the same overload."""
    return {
        name: Overload(make, flavour, ahead, settings, name.split(",")[0]).run()
        for name, settings in POLICIES.items()
    }


class Overload:
    """Requests that need several times the memory; their clients say how long they get.

    Of ``sessions`` some get another input when they have their output; of ``remote`` ones prompts'
    KV is fetched from elsewhere. What the policy's ledger has is compared with the scheduler after
    every step.
    """

    def __init__(
        self,
        make: Schedulers,
        flavour: str,
        ahead: int,
        settings: Mapping[str, Any],
        kind: str,
    ) -> None:
        self.scheduler = make.make(
            flavour,
            slots=SLOTS,
            blocks=49,
            step_tokens=128,
            remote=kind == "remote",
            admission=settings,
        )
        # Where KV failed to come, a step gave no token; it is noticed when the next one begins.
        self.tolerated = 1 + ahead if kind == "remote" else 0
        self.has_sessions = kind == "sessions"
        self.aborted: set[str] = set()
        self.driver = Driver(self.scheduler, ahead)
        self.sessions: dict[str, int] = {}
        self.gate = self.scheduler._gate
        self.rng = random.Random(1)
        self.seen = {"steps": 0, "preempted": 0, "aborted": 0, "most_waiting": 0, "ended": 0}
        self.seen |= {"turns": 0}

    def run(self) -> dict[str, int]:
        for number in range(REQUESTS):
            output = self.rng.choice([10, 40, 120, 250])
            prompt = [self.rng.randrange(10, 200)] * self.rng.randrange(5, 300)
            session = self.has_sessions and number % 25 == 0
            id_ = self.driver.submit(prompt, output, predicted=output, session=session)
            if session:
                self.sessions[id_] = 2
            if number % 3 == 0:
                self._step()
            if self.rng.random() < 0.05:
                self._abort()
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

    def _abort(self) -> None:
        alive = [id_ for id_, one in self.scheduler.requests.items() if not one.is_finished()]
        if alive:
            self.aborted.add(id_ := self.rng.choice(alive))
            self.driver.abort(id_)
            self.seen["aborted"] += 1

    def _step(self) -> None:
        before = set(self.scheduler.requests)
        self.driver.step()
        self._continue_sessions()
        scheduler, ledger = self.scheduler, self.gate._ledger
        assert not self.gate.failed
        assert scheduler.max_num_running_reqs == SLOTS
        assert getattr(scheduler, "max_num_active_reqs", SLOTS) == SLOTS
        finished = {id_ for id_, one in scheduler.requests.items() if one.is_finished()}
        alive = ledger.running.keys() & scheduler.requests.keys() - finished
        running = {one.request_id for one in scheduler.running}
        beside = {one.request_id for one in self.gate._entrance.holders}
        assert running <= alive <= running | beside, (running, beside, alive)
        for id_ in running:
            one = scheduler.requests[id_]
            size = one.num_prompt_tokens + one.num_output_tokens + one.num_output_placeholders
            wrong = abs(ledger.size_tokens(ledger.running[id_]) - size)
            assert wrong <= self.tolerated, (id_, size, wrong)
        waiting = {ticket.id for ticket in ledger.waiting} & scheduler.requests.keys() - finished
        assert waiting == scheduler.requests.keys() - alive - finished
        self.seen["steps"] += 1
        self.seen["ended"] += len(before - scheduler.requests.keys() - self.aborted)
        self.seen["preempted"] = ledger.preempted_total
        self.seen["most_waiting"] = max(self.seen["most_waiting"], len(waiting))

    def _continue_sessions(self) -> None:
        """Those that have their output get an input, or the word that there will be none."""
        for id_ in list(self.sessions):
            one = self.scheduler.requests.get(id_)
            if one is None:
                del self.sessions[id_]
            elif one.status.name == "WAITING_FOR_STREAMING_REQ" and self.rng.random() < 0.2:
                self.sessions[id_] -= 1
                self.driver.extend(id_, [9] * 20, 30, session=self.sessions[id_] > 0)
                self.seen["turns"] += 1
