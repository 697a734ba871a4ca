"""Does a request fit? By the router's and the gate's arithmetic, and by vLLM; without a model.

A task of ``real_schedulers``.
"""

from __future__ import annotations

import random
from itertools import count
from typing import Any

from engine_patches.admission.ledger import Ledger, Memory
from engine_patches.admission.policies.headroom import Headroom, Reserve
from engine_patches.admission.policies.off import Off
from engine_patches.admission.protocol import Verdict
from router.core.types import Request, WorkerView
from tests.support.kv_models import MODELS, KvModel
from tests.support.real_schedulers import Driver, Reader, Schedulers

FLAVOURS = (("EvenstepScheduler", 0), ("EvenstepAsyncScheduler", 1))
STEP_TOKENS = 16_384
SLOTS = 64


def capacity(make: Schedulers, states: int) -> dict[str, Any]:
    """Each model in so many states, half of them with steps scheduled ahead."""
    return {
        name: {
            flavour: Compared(make, model, flavour, ahead).run(states // 2)
            for flavour, ahead in FLAVOURS
        }
        for name, model in MODELS.items()
    }


class Gate(Off):
    """Leaves the choice to vLLM, and notes what no headroom at all would let in."""

    def __init__(self) -> None:
        self.entering: set[str] = set()
        self._policy = Headroom(Reserve(0.0, 0.0))

    def admit(self, ledger: Ledger, memory: Memory, now_s: float) -> Verdict:
        verdict = self._policy.admit(ledger, memory, now_s)
        self.entering = {ticket.id for ticket in verdict.admit or ()}
        return Verdict(None)


class Compared:
    """An engine under load that always has one request waiting, of a size near what fits."""

    def __init__(self, make: Schedulers, model: KvModel, flavour: str, ahead: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.model = model
        self.prompts = count()
        self.scheduler = make.make(
            flavour,
            slots=SLOTS,
            blocks=model.blocks,
            step_tokens=STEP_TOKENS,
            caching=model.states == "align",
            watermark=0.01,
            model=model,
            admission={"policy": "off"},
        )
        self.gate = self.scheduler._gate
        self.gate.policy = self.policy = Gate()
        self.hasher = None
        if self.scheduler.kv_cache_manager.enable_caching:
            init_none_hash(sha256)
            pool = self.scheduler.kv_cache_manager.block_pool
            self.hasher = get_request_block_hasher(pool.hash_block_size, sha256)
        self.driver = Driver(self.scheduler, ahead, self.hasher)
        self.reader = Reader(self.scheduler.evenstep.endpoint)
        self.rng = random.Random(1)
        self.ends: dict[str, int] = {}
        self.seen = {"states": 0, "fits": 0, "gate": 0, "router": 0, "alone": 0, "tokens": 0}

    def run(self, states: int) -> dict[str, int]:
        feed = self.reader.feed
        self.seen["tokens"] = feed.kv_tokens
        while self.seen["states"] < states:
            self.reader.until(self.scheduler.evenstep._publisher.sequence)
            self._ask()
            head = self._head()
            tokens = self.scheduler.requests[head].num_tokens
            view = WorkerView(
                "", 0, 1, 1, admissible_blocks=feed.last.admissible_blocks, kv=feed.kv
            )
            assert view.room is not None
            routed = view.need(Request("", "", tokens)) <= view.room
            settled, fresh = self._settled(), not self.scheduler.requests[head].num_preemptions
            self.driver.step()
            running = {one.request_id for one in self.scheduler.running}
            if settled:
                entered = head in running
                self.seen["states"] += 1
                self.seen["fits"] += entered
                self.seen["gate"] += entered != (head in self.policy.entering)
                # The router sends new requests only.
                self.seen["router"] += fresh and entered != routed
            if head not in running and self.rng.random() < 0.8:
                self.driver.abort(head)
            if self.rng.random() < 0.1:
                self.driver.abort(self.rng.choice(list(self.scheduler.requests)))
                self.driver.step()  # only then do snapshots show it
        self.scheduler.shutdown()
        self.reader.close()
        assert not self.scheduler.evenstep.failed
        assert not self.gate.failed
        return self.seen

    def _settled(self) -> bool:
        """No prompt is being computed, a slot is free, and somebody runs."""
        running = self.scheduler.running
        whole = all(one.num_computed_tokens >= one.num_tokens - 1 for one in running)
        return whole and 0 < len(running) < SLOTS and not self.gate._prefilling

    def _head(self) -> str:
        waiting = list(self.scheduler.waiting)
        return waiting[0].request_id if waiting else self._submit()

    def _submit(self) -> str:
        rng, feed = self.rng, self.reader.feed
        tokens = int(rng.lognormvariate(7.5, 1.5))
        if rng.random() < 0.6:
            assert feed.kv is not None
            fits = feed.kv.tokens(feed.last.admissible_blocks or 0)
            size = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size
            tokens = fits + rng.randrange(-2 * size, 2 * size)
        output = rng.randrange(2, 400)
        tokens = max(1, min(tokens, self.model.longest - output - 1))
        return self.driver.submit(self._prompt(tokens), output)

    def _prompt(self, tokens: int) -> list[int]:
        """Unlike all others from its first token on."""
        return [next(self.prompts), *[7] * (tokens - 1)]

    def _ask(self) -> None:
        """A request of its own, which vLLM gives memory in this very state, or not."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as EngineRequest

        memory = self.scheduler.evenstep._engine.memory
        room = memory.blocks_free - memory.watermark
        tokens = max(1, memory.kv.tokens(room) + self.rng.randrange(-40, 40))
        tokens = min(tokens, self.model.longest - 2)
        prompt, parameters = self._prompt(tokens), SamplingParams(max_tokens=1)
        asked = EngineRequest("asked", prompt, parameters, None, block_hasher=self.hasher)
        manager = self.scheduler.kv_cache_manager
        blocks = manager.allocate_slots(
            asked, min(tokens, STEP_TOKENS), full_sequence_must_fit=True, has_scheduled_reqs=True
        )
        if blocks is not None:
            manager.free(asked)
        self.seen["alone"] += (blocks is not None) != (memory.kv.entering(tokens) <= room)


def agents(make: Schedulers, flavour: str, ahead: int) -> dict[str, int]:
    """40 requests of one prompt of 20,000 tokens, in memory for 120,000."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    model = KvModel(lambda: MODELS["Llama 3.1 8B"].layers()[:1], 7501)
    scheduler = make.make(
        flavour,
        blocks=model.blocks,
        slots=SLOTS,
        caching=True,
        model=model,
        admission={"policy": "memory_checked", "ageing": 0},
    )
    driver = Driver(scheduler, ahead, get_request_block_hasher(16, sha256))
    prompt = [number % 5000 + 10 for number in range(20_000)]
    for number in range(40):
        driver.submit([*prompt, *[number] * 40], 200, predicted=200)
    seen = {"together": 0, "preempted": 0, "ended": 0, "steps": 0}
    while scheduler.requests:
        before = set(scheduler.requests)
        driver.step()
        seen["steps"] += 1
        seen["together"] = max(seen["together"], len(scheduler.running))
        seen["ended"] += len(before - scheduler.requests.keys())
    seen["preempted"] = scheduler._gate._ledger.preempted_total
    assert not scheduler._gate.failed
    scheduler.shutdown()
    return seen
