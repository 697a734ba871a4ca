"""Step time against resident KV tokens and batch, the plug-in's cost, power against load.

    PYTHONPATH=. python tests/gpu/step_time.py --out tests/data/gpu/step_time.json
    PYTHONPATH=. python tests/gpu/step_time.py --cpu --shape tiny --batches 1,4,8 \\
        --contexts 64,1024 --steps 60 --rounds 3 --out /tmp/step_time.json

For every batch and context, so many requests of that many prompt tokens decode together; the
engine's own snapshots tell load and length of every step in which all of them do. C, t_l and t_r
are fitted to the points' medians. Then an engine with the plug-in and one without take turns with
the same batch. ``evenstep simulate decode --step-time FILE`` reads the result.

It has not run on a GPU yet; the second command is how the script itself is tested.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.gpu.fit import Point, fit
from tests.gpu.serving import (
    Engine,
    Machine,
    conditions,
    engine,
    machine,
    machine_options,
    write,
)
from tests.support.rank_steps import RankStep, SnapshotLog, reading

IDLE_S = 5.0
# Of the KV memory that admission would give: the rest is for tokens still to come.
FILL = 0.9
CHUNK_TOKENS = 8192
# Steps of a burst with and without the plug-in, in those of a point.
BURST = 4


def main() -> None:
    """Measure, and write one JSON file."""
    given = options().parse_args()
    with tempfile.TemporaryDirectory(prefix="evenstep-gpu-") as folder:
        result = measure(machine(given, folder), given)
    write(given.out, result)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = machine_options(__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=whole_numbers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=whole_numbers, default=[128, 1024, 4096, 8192])
    parser.add_argument("--steps", type=int, default=100, help="decoded at each point")
    parser.add_argument("--rounds", type=int, default=10, help="of plug-in on and off")
    parser.add_argument("--hook-batch", type=int, default=32, help="requests of such a round")
    return parser


def whole_numbers(text: str) -> list[int]:
    """Numbers above 0, separated by commas."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def measure(where: Machine, given: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    flags = ("--max-num-seqs", str(max(*given.batches, given.hook_batch)))
    longest = 2 * max(given.contexts) + (1 + BURST) * given.steps + max(given.batches)
    length = ("--max-model-len", str(longest))
    batched = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
    share = () if where.cpu else ("--gpu-memory-utilization", "0.85")
    with engine(where, *flags, *length, *batched, *share) as plugged:
        assert plugged.endpoint is not None
        with reading([plugged.endpoint]) as log:
            points = grid(plugged, log, given)
            idle_w = idle_power(log)
        about = conditions(where, plugged.server)
    hook = plug_in_cost(where, given, (*flags, *length, *batched))
    return {
        **fit(points),
        **about,
        "idle_power_w": idle_w,
        "plug_in": hook,
        "points": [asdict(point) for point in points],
    }


# --- step time and power --------------------------------------------------------------------------


def grid(plugged: Engine, log: SnapshotLog, given: argparse.Namespace) -> list[Point]:
    """Every batch with every context that the KV memory holds."""
    plugged.decode_together(1, 16, 16)  # the first steps of an engine are slow
    points, ended = [], 1
    for context in given.contexts:
        for batch in given.batches:
            answer = output_tokens(batch, context, given.steps)
            room = log.snapshots[0][-1].admissible_kv_tokens or math.inf
            if batch * (context + answer) > FILL * room:
                continue
            log.rest(ended)
            seen = set(log.ranks()[0])
            plugged.decode_together(batch, context, answer)
            ended += batch
            log.rest(ended)
            steps = [step for number, step in log.ranks()[0].items() if number not in seen]
            points.append(point(batch, steps))
            sys.stderr.write(f"{points[-1]}\n")
    return points


def output_tokens(batch: int, context: int, steps: int) -> int:
    """So many that all decode together for ``steps``, the last prompt computed last."""
    return steps + math.ceil(batch * context / CHUNK_TOKENS) + batch


def point(batch: int, steps: Sequence[RankStep]) -> Point:
    """Of the steps in which the whole batch decoded, none entered and none had just begun.

    Raises:
        ValueError: there was none.
    """
    whole = [step for step in steps if step.running == step.tokens == batch and not step.entered]
    if not whole:
        raise ValueError(f"{batch} requests never decoded all at once; raise --steps")
    watts = [step.power_w for step in whole if step.power_w is not None]
    return Point(
        batch,
        statistics.median(step.load_tokens for step in whole),
        statistics.median(step.step_s for step in whole),
        len(whole),
        statistics.fmean(watts) if watts else None,
    )


def idle_power(log: SnapshotLog) -> float | None:
    """Mean of some heartbeats of a resting engine."""
    first = len(log.snapshots[0])
    time.sleep(IDLE_S)
    watts = [one.power_w for one in log.snapshots[0][first:] if one.power_w is not None]
    return statistics.fmean(watts) if watts else None


# --- the plug-in's cost ---------------------------------------------------------------------------


def plug_in_cost(
    where: Machine, given: argparse.Namespace, flags: tuple[str, ...]
) -> dict[str, Any]:
    """The same batch on an engine with the plug-in and on one without, in turns.

    Both engines are on the same device, and only one has work at a time. A burst's time less that
    of its prompts alone, by its steps, is the time of one.
    """
    share = () if where.cpu else ("--gpu-memory-utilization", "0.42")
    rounds: dict[bool, list[float]] = {True: [], False: []}
    with (
        engine(where, *flags, *share) as plugged,
        engine(where, *flags, *share, plug_in=False) as plain,
    ):
        for number in range(given.rounds + 1):
            for one in (plugged, plain) if number % 2 else (plain, plugged):
                step_s = burst_step_s(one, given.hook_batch, BURST * given.steps)
                if number:  # the first round warms up
                    rounds[one is plugged].append(step_s)
    ratios = [on / off for on, off in zip(rounds[True], rounds[False], strict=True)]
    return {
        "requests": given.hook_batch,
        "rounds": given.rounds,
        "on_step_s": statistics.median(rounds[True]),
        "off_step_s": statistics.median(rounds[False]),
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
    }


def burst_step_s(one: Engine, batch: int, steps: int) -> float:
    """Wall time of a decode step, seen from outside."""
    ends = []
    for tokens in (1, 1 + steps):
        began_s = time.perf_counter()
        one.decode_together(batch, 64, tokens)
        ends.append(time.perf_counter() - began_s)
    return (ends[1] - ends[0]) / steps


if __name__ == "__main__":
    main()
