"""Step time against resident KV tokens and batch, the plug-in's cost, power against load.

    PYTHONPATH=. python tests/gpu/step_time.py --out tests/data/gpu/step_time.json
    PYTHONPATH=. python tests/gpu/step_time.py --cpu --shape tiny --batches 1,4,8 \\
        --contexts 64,1024 --steps 60 --rounds 3 --out /tmp/step_time.json

For every batch and context, so many requests of that many prompt tokens decode together; the
engine's own snapshots tell load and length of every step in which all of them do. C, t_l and t_r
are fitted to the points' medians. Then an engine with the plug-in and one without take turns with
the same batch. ``evenstep simulate decode --step-time FILE`` reads the result. Each point and each
turn is kept at once; the same command measures what is missing.

It has not run on a GPU yet; the second command is how the script itself is tested.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.gpu.fit import Point, fit
from tests.gpu.parts import Parts, Values, measure_with, options
from tests.gpu.serving import Engine, Machine, engine, machine_facts
from tests.support.rank_steps import RankStep, SnapshotLog, reading

IDLE_S = 5.0
# Of the KV memory that admission would give: the rest is for tokens still to come.
FILL = 0.9
CHUNK_TOKENS = 8192
# Steps of a burst with and without the plug-in, in those of a point.
BURST = 4
# What the parts of the file are called.
POINTS, IDLE, ROUNDS = "points", "idle", "rounds"
COSTS = ("base_s", "per_token_s", "per_request_s")


class NeverTogetherError(Exception):
    """The requests of a batch never decoded all at once."""


def command_line() -> argparse.ArgumentParser:
    """All of it."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("grid", "plug-in"), help="a part of it; default: both")
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


def measure(where: Machine, given: argparse.Namespace) -> None:
    """All that is asked for and missing."""
    slots = max(*given.batches, given.hook_batch)
    longest = 2 * max(given.contexts) + (1 + BURST) * given.steps + max(given.batches)
    settings = {
        "slots": slots,
        "max_model_len": longest,
        "chunk_tokens": CHUNK_TOKENS,
        "steps": given.steps,
        "hook_batch": given.hook_batch,
    }
    parts = Parts(given.out, {**where.settings, **settings}, figures)
    flags = (
        *("--max-num-seqs", str(slots), "--max-model-len", str(longest)),
        *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
    )
    if given.only != "plug-in":
        grid(where, parts, given, flags)
    if given.only != "grid":
        plug_in_cost(where, parts, given, flags)


def figures(parts: Mapping[str, Values]) -> tuple[Values, Values]:
    """The costs that the simulator reads, and what else there is to find."""
    points = [Point(**each) for each in parts.get(POINTS, {}).values() if each is not None]
    rounds = parts.get(ROUNDS, {}).values()
    fitted = fit(points) if len(points) > 2 else {}
    head = {key: fitted[key] for key in COSTS if fitted}
    return head, {
        "fit": {key: value for key, value in fitted.items() if key not in COSTS},
        "plug_in": plug_in_figures(list(rounds)) if rounds else None,
    }


# --- step time and power --------------------------------------------------------------------------


def grid(where: Machine, parts: Parts, given: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """Every batch with every context, and a resting engine."""
    sizes = {f"{batch} x {c}": (batch, c) for c in given.contexts for batch in given.batches}
    missing = parts.missing(POINTS, sizes)
    if not missing and not parts.missing(IDLE, ["power_w"]):
        return
    share = () if where.cpu else ("--gpu-memory-utilization", "0.85")
    with engine(where, *flags, *share) as plugged:
        assert plugged.endpoint is not None
        parts.begin(machine_facts(where, plugged.server))
        with reading([plugged.endpoint]) as log:
            plugged.decode_together(1, 16, 16)  # the first steps of an engine are slow
            log.rest(1)
            for name in missing:
                with contextlib.suppress(NeverTogetherError):
                    found = decoding(plugged, log, *sizes[name], given.steps)
                    parts.keep(POINTS, name, found and asdict(found))
            parts.keep(IDLE, "power_w", idle_power(log))
    if missing := parts.missing(POINTS, sizes):
        raise SystemExit(f"at {', '.join(missing)} never all decoded at once; raise --steps")


def decoding(
    plugged: Engine, log: SnapshotLog, batch: int, context: int, steps: int
) -> Point | None:
    """So many requests of one length at once; None if the KV memory does not hold them."""
    answer = output_tokens(batch, context, steps)
    room = log.snapshots[0][-1].admissible_kv_tokens or math.inf
    if batch * (context + answer) > FILL * room:
        return None
    seen = set(log.ranks()[0])
    ended = log.ended
    plugged.decode_together(batch, context, answer)
    log.rest(ended + batch)
    return point(batch, [step for number, step in log.ranks()[0].items() if number not in seen])


def output_tokens(batch: int, context: int, steps: int) -> int:
    """So many that all decode together for ``steps``, the last prompt computed last."""
    return steps + math.ceil(batch * context / CHUNK_TOKENS) + batch


def point(batch: int, steps: Sequence[RankStep]) -> Point:
    """Of the steps in which the whole batch decoded, none entered and none had just begun.

    Raises:
        NeverTogetherError: there was none.
    """
    whole = [step for step in steps if step.running == step.tokens == batch and not step.entered]
    if not whole:
        raise NeverTogetherError
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
    where: Machine, parts: Parts, given: argparse.Namespace, flags: tuple[str, ...]
) -> None:
    """The same batch on an engine with the plug-in and on one without, in turns.

    Both engines are on the same device, and only one has work at a time. A burst's time less that
    of its prompts alone, by its steps, is the time of one.
    """
    missing = parts.missing(ROUNDS, map(str, range(1, given.rounds + 1)))
    if not missing:
        return
    share = () if where.cpu else ("--gpu-memory-utilization", "0.42")
    with (
        engine(where, *flags, *share) as plugged,
        engine(where, *flags, *share, plug_in=False) as plain,
    ):
        parts.begin(machine_facts(where, plugged.server))
        for name in ("warm-up", *missing):
            took = {}
            for one in (plugged, plain) if name in missing[::2] else (plain, plugged):
                took[one] = burst_step_s(one, given.hook_batch, BURST * given.steps)
            if name in missing:
                parts.keep(ROUNDS, name, {"on_step_s": took[plugged], "off_step_s": took[plain]})


def plug_in_figures(rounds: Sequence[Values]) -> dict[str, Any]:
    """Medians, and every round's ratio."""
    ratios = sorted(each["on_step_s"] / each["off_step_s"] for each in rounds)
    return {
        "rounds": len(rounds),
        "on_step_s": statistics.median(each["on_step_s"] for each in rounds),
        "off_step_s": statistics.median(each["off_step_s"] for each in rounds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
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
    measure_with(command_line(), measure)
