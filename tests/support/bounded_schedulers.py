"""vLLM's own schedulers under prompt budgets that change at each step; see ``real_schedulers``."""

import random
import time
from typing import Any

from engine_patches.plugin.compat_prompts import decode_tokens
from router.core.wire import BudgetMessage
from tests.support.real_schedulers import Driver, Schedulers


def bounded(
    make: Schedulers, flavour: str, ahead: int, steps: int, drafts: int = 0, **settings: Any
) -> dict[str, int]:
    """Random requests and budgets under memory pressure; each step is checked."""
    rng = random.Random(1)
    sizes: dict[str, Any] = {"slots": 8, "blocks": 31, "step_tokens": 256, "drafts": drafts}
    scheduler = make.make(flavour, **sizes, **settings)
    driver = Driver(scheduler, ahead, kept=lambda: rng.randint(0, drafts))
    schedule, own = scheduler.schedule, scheduler.max_num_scheduled_tokens
    piece = scheduler.scheduler_config.long_prefill_token_threshold
    counts = "steps", "at_the_bound", "mixed", "free", "held", "preempted", "tokens"
    seen = dict.fromkeys((*counts, "several") if piece else counts, 0)

    def checked() -> Any:
        budget = rng.choice((0, 1, 7, 40, 100))
        # The clock goes on between two messages; none is sent where none is to hold.
        scheduler._prompts.leases._held = {}
        if budget:
            told = BudgetMessage("r", "", time.time(), budget, rng.choice((1, 1, 2, 3)))
            scheduler._prompts.leases.take(told, time.time())
        decoding = {one.request_id for one in scheduler.running if decode_tokens(one)}
        begun = max(1, sum(one.is_prefill_chunk for one in scheduler.running))
        output = schedule()
        assert scheduler.max_num_scheduled_tokens == own
        assert scheduler.scheduler_config.long_prefill_token_threshold == piece
        scheduled, lost = output.num_scheduled_tokens, output.preempted_req_ids or set()
        assert decoding <= scheduled.keys() | lost
        prompts = sum(tokens for id_, tokens in scheduled.items() if id_ not in decoding)
        held = scheduler._prompts.holds
        bound = 0 if held else max(budget, begun * (1 + drafts)) if budget else own
        assert prompts <= bound, (prompts, budget)
        seen["steps"] += 1
        if piece:
            seen["several"] += begun > 1
        seen["at_the_bound"] += prompts == bound > 0
        waits = scheduler.waiting or len(scheduled) < len(scheduler.running)
        seen["held"] += bool(held and decoding and waits)
        seen["mixed"] += bool(prompts and decoding)
        seen["free"] += budget == 0 and prompts > (piece or 100)
        seen["preempted"] += len(lost)
        seen["tokens"] += sum(scheduled.values())
        return output

    scheduler.schedule = checked
    for _ in range(steps):
        if rng.random() < 0.1 and len(scheduler.requests) < 12:
            driver.submit([rng.randrange(10, 200) for _ in range(rng.randrange(1, 400))], 60)
        driver.step()
    list(driver.drain())
    for _ in range(3000):
        if not scheduler.has_requests():
            break
        driver.step()
    list(driver.drain())
    assert not scheduler.has_unfinished_requests()
    assert not scheduler._prompts.failed
    assert scheduler._gate is None or not scheduler._gate.failed
    scheduler.shutdown()
    return seen
