"""Who enters vLLM's own schedulers beside whom admission chose; a task of ``real_schedulers``.

Requests that vLLM passes over, for each of its reasons: a grammar that is being compiled, no place
for a LoRA adapter, a token from before a preemption that is still to come, a KV connector that does
not know yet, an encoder's output under way, and no room for an encoder's input.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from tests.support.real_schedulers import Driver, Schedulers

CASES: Mapping[str, Mapping[str, Any]] = {
    "headroom": {"admission": {"policy": "headroom", "headroom": 0.0, "adaptive": False}},
    "wait": {"admission": {"policy": "wait", "thresholds": [2]}},
    "memory_checked": {"admission": {"policy": "memory_checked"}},
    "remote": {"admission": {"policy": "headroom"}, "remote": True},
    "priority": {"admission": {"policy": "headroom"}, "scheduling_policy": "priority"},
}
REASONS = ("grammar", "lora", "stale", "connector", "coming", "encoder")
SLOTS = 8
ADAPTERS = 3
PLACES = 1


def decided(
    make: Schedulers, flavour: str, ahead: int, schedules: int
) -> dict[str, dict[str, int]]:
    """What was seen, by case; each makes so many schedules."""
    return {
        name: Passed(make, flavour, ahead, number, settings).run(schedules)
        for number, (name, settings) in enumerate(CASES.items())
    }


def compiled() -> Any:
    """A grammar that accepts anything."""
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    def accept(*_: object) -> bool:
        return True

    def never(_: object) -> bool:
        return False

    anything: dict[str, Any] = dict.fromkeys(StructuredOutputGrammar.__abstractmethods__, accept)
    anything["is_terminated"] = never
    return type("Anything", (StructuredOutputGrammar,), anything)()


class Passed:
    """Random requests, under memory pressure; who enters is compared after each schedule."""

    def __init__(
        self, make: Schedulers, flavour: str, ahead: int, seed: int, settings: Mapping[str, Any]
    ) -> None:
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

        sizes: dict[str, Any] = {"slots": SLOTS, "blocks": 33, "step_tokens": 160}
        self.scheduler = make.make(flavour, ahead=ahead, **sizes, **settings)
        self.scheduler.lora_config = SimpleNamespace(max_loras=PLACES)
        self.scheduler._gate._engine.max_loras = PLACES
        self.scheduler.max_num_encoder_input_tokens = 40
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=80)
        self.rng = random.Random(seed)
        self.driver = Driver(self.scheduler, ahead)
        self.compiling: list[Future[Any]] = []
        # Requests whose encoder's output is under way; a version before 0.28 does not wait for it.
        self.coming: set[str] = set()
        if hasattr(self.scheduler, "_ec_transfer_pending"):
            self.scheduler._ec_transfer_pending = lambda one, _: one.request_id in self.coming
        self.unknown: set[str] = set()
        self.preempted = False
        self._watch_connector()
        self.chosen: list[str] = []
        self._watch_choice()
        self.seen = dict.fromkeys(("schedules", "entered", "full", "preempted", *REASONS), 0)

    def _watch_choice(self) -> None:
        entrance = self.scheduler._gate._entrance
        admit = entrance.admit

        def noted(ids: list[str], inside: Any) -> None:
            self.chosen = list(ids)
            admit(ids, inside)

        entrance.admit = noted

    def _watch_connector(self) -> None:
        connector = self.scheduler.connector
        if connector is None:
            return
        ask = connector.get_num_new_matched_tokens

        def noted(one: Any, computed: int) -> tuple[int | None, bool]:
            tokens, later = ask(one, computed)
            if tokens is None:
                self.unknown.add(one.request_id)
            return tokens, later

        connector.get_num_new_matched_tokens = noted

    def run(self, schedules: int) -> dict[str, int]:
        while self.seen["schedules"] < schedules:
            if self.rng.random() < 0.3 and len(self.scheduler.requests) < 30:
                self._submit()
            self._step()
        for one in [*self.scheduler.requests]:
            self.driver.abort(one)
        list(self.driver.drain())
        self.scheduler.shutdown()
        return self.seen

    def _submit(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(10, 200)] * rng.randrange(5, 250)
        more: dict[str, Any] = {"priority": rng.randrange(3)}
        kind = rng.random()
        if kind < 0.25:
            more["lora"] = rng.randrange(ADAPTERS) + 1
        elif kind < 0.4:
            more["grammar"] = future = Future[Any]()
            self.compiling.append(future)
        elif kind < 0.55:
            more["image"] = min(len(prompt), 30)
        id_ = self.driver.submit(prompt, rng.randrange(1, 80), predicted=40, **more)
        if "image" in more and rng.random() < 0.5:
            self.coming.add(id_)

    def _step(self) -> None:
        for future in [one for one in self.compiling if self.rng.random() < 0.1]:
            self.compiling.remove(future)
            future.set_result(compiled())
        self.coming -= {one for one in sorted(self.coming) if self.rng.random() < 0.1}
        # Who was preempted is chosen at once if somebody else leaves.
        if self.scheduler.running and self.rng.random() < (0.5 if self.preempted else 0.02):
            self.driver.abort(self.rng.choice(self.scheduler.running).request_id)
        before = self._inside()
        beside = {one.request_id for one in getattr(self.scheduler, "skipped_waiting", ())}
        self.chosen = []
        self.unknown.clear()
        schedule = self.scheduler.schedule

        def scheduled(*args: Any) -> Any:
            output = schedule(*args)
            self._judge(before, beside, set(output.preempted_req_ids or ()))
            return output

        self.scheduler.schedule = scheduled
        try:
            self.driver.step()
        finally:
            self.scheduler.schedule = schedule
        self.seen["schedules"] += 1

    def _inside(self) -> set[str]:
        """Requests that run, or have memory."""
        entrance = self.scheduler._gate._entrance
        holders = [*self.scheduler.running, *entrance.holders]
        return {one.request_id for one in holders}

    def _judge(self, before: set[str], beside: set[str], preempted: set[str]) -> None:
        scheduler = self.scheduler
        assert not scheduler._gate.failed
        assert not scheduler.evenstep.failed
        entered = self._inside() - before
        assert entered <= {*self.chosen}, (entered, self.chosen)
        self.seen["entered"] += len(entered)
        self.preempted = bool(preempted)
        self.seen["preempted"] += len(preempted)
        stopped = self.preempted
        for id_ in self.chosen:
            reason = "" if id_ in entered else self._reason(scheduler.requests[id_])
            if reason:
                self.seen[reason] += 1
            elif id_ not in entered:
                stopped = True
                self.seen["full"] += 1
            elif not beside:  # from which vLLM 0.26 takes first
                assert not stopped, "vLLM took one behind another that it could have taken"
        places = [*scheduler.running, *scheduler.waiting, *self._beside()]
        alive = [one for one in scheduler.requests.values() if not one.is_finished()]
        assert sorted(one.request_id for one in places) == sorted(one.request_id for one in alive)

    def _beside(self) -> Iterator[Any]:
        yield from getattr(self.scheduler, self.scheduler._gate._entrance._beside)

    def _reason(self, one: Any) -> str:
        """Why vLLM passes it over; empty: it took no further one."""
        if one.status.name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR":
            return "grammar"
        if getattr(one, "num_stale_output_tokens", 0):
            return "stale"
        running = [other.lora_request for other in self.scheduler.running if other.lora_request]
        if one.lora_request and {one.lora_request.lora_int_id} != {
            other.lora_int_id for other in running or [one.lora_request]
        }:
            return "lora"
        if one.request_id in self.unknown:
            return "connector"
        if one.request_id in self.coming:
            return "coming"
        return "encoder" if one.has_encoder_inputs else ""
