"""What an engine tells of itself after a step, to routers as to the simulators."""

from typing import Any

from loadgen.engine.engine import Engine
from loadgen.engine.schedule import Schedule

IDLE = Schedule((), (), 0, 0)


def state_of(engine: Engine, schedule: Schedule = IDLE) -> dict[str, Any]:
    """Fields of a snapshot and of a step's report, without its requests that run and ended."""
    admissible = engine.admissible_blocks
    return {
        "preempted": schedule.preempted,
        "waiting": engine.waiting,
        "waiting_tokens": engine.waiting_tokens,
        "waiting_routed": engine.waiting_routed,
        "slots": engine.slots,
        "kv_groups": engine.kv_groups,
        "admissible_kv_tokens": engine.kv.tokens(admissible),
        "admissible_blocks": admissible,
        "admission": engine.admission,
        "scheduled_prefill_tokens": schedule.prefill_tokens,
        "scheduled_decode_tokens": schedule.decode_tokens,
        "preemptions_total": engine.preemptions_total,
    }
