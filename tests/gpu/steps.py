"""Steps of an engine under loads that are chosen: decoding alone, prompts alone, both together.

The engine's own snapshots tell what each step held and how long it took.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.gpu.fit import Point
from tests.gpu.serving import CHUNK_TOKENS, Engine
from tests.support.rank_steps import RankStep, SnapshotLog
from tests.support.server import wait_until

# Of the KV memory that admission would give: the rest is for tokens still to come.
FILL = 0.9
# A batch decodes for so many steps before the first prompt comes beside it, and for each of them.
AHEAD, EACH = 100, 30
WAIT_S = 120


class NeverSeenError(Exception):
    """No step was of the kind that was wanted."""


def decoding(
    engine: Engine, log: SnapshotLog, batch: int, context: int, steps: int
) -> Point | None:
    """So many requests of one length that decode at once; None if the KV memory is too small.

    Raises:
        NeverSeenError: they never did so all together, with none that had just begun.
    """
    answer = output_tokens(batch, context, steps)
    if _too_much(log, batch * (context + answer)):
        return None
    log.drop()
    ended = log.ended
    engine.decode_together(batch, context, answer)
    log.rest(ended + batch)
    return point(log, lambda step: step.running == step.tokens == batch and not step.prompt_tokens)


def prompts(
    engine: Engine, log: SnapshotLog, tokens: int, batch: int, context: int, repeats: int
) -> Point | None:
    """Prompts of one length, one after another, alone or beside a batch that decodes.

    Args:
        engine: has the plug-in.
        log: of its snapshots.
        tokens: of a prompt.
        batch: requests that decode meanwhile; 0: none.
        context: their prompt tokens.
        repeats: how many prompts.

    Raises:
        NeverSeenError: no step computed a whole prompt, beside the whole batch.
    """
    answer = output_tokens(batch, context, AHEAD + EACH * repeats)
    if _too_much(log, batch * (context + answer) + tokens):
        return None
    log.drop()
    ended = log.ended
    # An error here ends the engine, and with it the requests that the pool waits for.
    pool = ThreadPoolExecutor(1)
    if batch:
        running = pool.submit(engine.decode_together, batch, context, answer)
        wait_until(lambda: _have_all_decoded(log, batch), WAIT_S, f"{batch} requests decode")
    for _ in range(repeats):
        engine.decode_together(1, tokens, 1)
    if batch:
        running.result()
    pool.shutdown()
    log.rest(ended + batch + repeats)
    return point(log, lambda step: is_whole(step, tokens, batch))


def is_whole(step: RankStep, tokens: int, batch: int) -> bool:
    """Whether it computes a prompt of so many tokens, and decodes all of a batch beside it."""
    # There is room for so much beside the batch.
    whole = min(tokens, CHUNK_TOKENS - batch)
    return (
        step.prompt_tokens == whole and step.tokens == whole + batch and step.running == batch + 1
    )


def idle_power(log: SnapshotLog, seconds: float) -> float | None:
    """Mean of the later half of a resting engine's heartbeats."""
    log.drop()
    time.sleep(seconds)
    watts = [one.power_w for one in log.snapshots[0] if one.power_w is not None]
    return statistics.fmean(watts[len(watts) // 2 :]) if watts else None


def output_tokens(batch: int, context: int, steps: int) -> int:
    """So many that all decode together for ``steps``, the last prompt computed last."""
    return steps + math.ceil(batch * context / CHUNK_TOKENS) + batch


def point(log: SnapshotLog, wanted: Callable[[RankStep], bool]) -> Point:
    """Medians of the steps that are wanted."""
    return summary([step for step in log.ranks()[0].values() if wanted(step)])


def summary(steps: Sequence[RankStep]) -> Point:
    """Their medians, and the mean power of the later half: a GPU's own is a mean over a second.

    Raises:
        NeverSeenError: there is none.
    """
    if not steps:
        raise NeverSeenError
    watts = [step.power_w for step in steps[len(steps) // 2 :] if step.power_w is not None]
    return Point(
        steps[0].running,
        statistics.median(step.load_tokens for step in steps),
        statistics.median(step.step_s for step in steps),
        len(steps),
        statistics.fmean(watts) if watts else None,
        steps[0].prompt_tokens,
    )


def _too_much(log: SnapshotLog, tokens: int) -> bool:
    return tokens > FILL * (log.snapshots[0][-1].admissible_kv_tokens or math.inf)


def _have_all_decoded(log: SnapshotLog, batch: int) -> bool:
    return any(
        told.scheduled_decode_tokens == batch and not told.scheduled_prefill_tokens
        for told in log.snapshots[0]
    )
