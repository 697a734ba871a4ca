"""Power of the ranks of one barrier: at rest, waiting for one of them, and all at work.

A rank without requests runs a dummy batch in every step of the others, and waits in its collectives
for the slowest. Short and long contexts on one rank give the others the same work in each step; the
longer step of the long ones is waiting. So what a waiting GPU draws is

    (P_long * t_long - P_short * t_short) / (t_long - t_short)

with P the mean power of the ranks without requests, and t the time of a step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from router.core.types import Snapshot
from tests.gpu.serving import Engine
from tests.gpu.steps import FILL, NeverSeenError, output_tokens
from tests.support.rank_steps import SnapshotLog

REST, SHORT, LONG, ALL = (
    "at rest",
    "short contexts on one rank",
    "long contexts on one rank",
    "long contexts on all ranks",
)
LOADS = (REST, SHORT, LONG, ALL)
SHORT_TOKENS = 16
# Below it, what a step is longer by is not told from chance.
LONGER = 1.05
_PROBE_STEPS = 24


@dataclass(frozen=True, slots=True)
class Holding:
    """How a load is held.

    Attributes:
        batch: requests of a rank.
        context: prompt tokens of a long one, where the KV memory holds them.
        seconds: for so long; with long contexts for as many steps as with short ones.
    """

    batch: int
    context: int
    seconds: float


def hold(group: Engine, log: SnapshotLog, load: str, how: Holding) -> dict[str, Any]:
    """Power of each rank under a load, and the median step of the first one.

    Raises:
        NeverSeenError: there was no step in which the whole batch decoded.
    """
    if load == REST:
        return _rest(log, how.seconds)
    probe_s = _decode(group, log, how.batch, SHORT_TOKENS, _PROBE_STEPS, (0,))["step_s"]
    steps = max(_PROBE_STEPS, math.ceil(how.seconds / probe_s))
    answer = output_tokens(how.batch, how.context, steps)
    context = SHORT_TOKENS if load == SHORT else _held(log, how, answer)
    ranks = range(group.ranks) if load == ALL else (0,)
    return _decode(group, log, how.batch, context, steps, ranks)


def _decode(
    group: Engine,
    log: SnapshotLog,
    batch: int,
    context: int,
    steps: int,
    ranks: Sequence[int],
) -> dict[str, Any]:
    """A batch of one length on each of some ranks; power of the later half of its steps."""
    answer = output_tokens(batch, context, steps)
    log.drop()
    ended = log.ended
    with ThreadPoolExecutor(len(ranks)) as pool:
        sent = [pool.submit(group.decode_together, batch, context, answer, rank) for rank in ranks]
        for each in sent:
            each.result()
    log.rest(ended + batch * len(ranks))
    found = [
        step
        for step in log.ranks()[0].values()
        if step.running == step.tokens == batch and not step.prompt_tokens
    ]
    if not found:
        raise NeverSeenError
    return {
        "requests_of_a_rank": batch,
        "context_tokens": context,
        "steps": len(found),
        "step_s": statistics.median(step.step_s for step in found),
        "power_w": _watts(log, found[len(found) // 2].time_s, found[-1].time_s),
    }


def _rest(log: SnapshotLog, seconds: float) -> dict[str, Any]:
    log.drop()
    time.sleep(seconds)
    end_s = max(told[-1].time_s for told in log.snapshots)
    return {"power_w": _watts(log, end_s - seconds / 2, end_s)}


def _held(log: SnapshotLog, how: Holding, answer: int) -> int:
    """So long a context that the KV memory of every rank holds the batch."""
    least = min(told[-1].admissible_kv_tokens or math.inf for told in log.snapshots)
    if least == math.inf:
        return how.context
    return max(SHORT_TOKENS, min(how.context, int(FILL * least / how.batch) - answer))


def _watts(log: SnapshotLog, begin_s: float, end_s: float) -> list[float | None]:
    """Of each rank, the mean of what it told within these times."""
    return [_mean_power(told, begin_s, end_s) for told in log.snapshots]


def _mean_power(told: Sequence[Snapshot], begin_s: float, end_s: float) -> float | None:
    watts = [
        one.power_w for one in told if one.power_w is not None and begin_s <= one.time_s <= end_s
    ]
    return statistics.fmean(watts) if watts else None


# --- figures --------------------------------------------------------------------------------------


def power_figures(loads: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """What a GPU draws: means of ranks; None where it is unknown, or was not measured."""
    rest, short, long, all_ = ([*loads.get(load, {}).get("power_w", ())] for load in LOADS)
    waits, work = _mean(long[1:]), _mean(long[:1])
    return {
        "idle_w": _mean(rest),
        "beside_short_w": _mean(short[1:]),
        "beside_long_w": waits,
        "busy_alone_w": work,
        "busy_together_w": _mean(all_),
        "waiting_w": _waiting_w(loads, _mean(short[1:]), waits),
        "step_longer_by": _longer(loads),
    }


def _waiting_w(
    loads: Mapping[str, Mapping[str, Any]], short_w: float | None, long_w: float | None
) -> float | None:
    longer = _longer(loads)
    if longer is None or longer < LONGER or short_w is None or long_w is None:
        return None
    return (long_w * longer - short_w) / (longer - 1)


def _longer(loads: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The step with long contexts on one rank, by that with short ones."""
    if SHORT not in loads or LONG not in loads:
        return None
    return float(loads[LONG]["step_s"] / loads[SHORT]["step_s"])


def _mean(watts: Sequence[float | None]) -> float | None:
    known = [each for each in watts if each is not None]
    return statistics.fmean(known) if known and len(known) == len(watts) else None
