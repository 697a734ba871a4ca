"""Measures one GPU in ten minutes: step times, power, the plug-in's cost, what a router does.

    make gpu                            # see also: python -m tests.gpu pair --help, group --help
    python -m tests.gpu --out FOLDER --limit-s 560
    python -m tests.gpu --dry-run --out /tmp/dry

Parts, each with its share of the time; the next part gets what one leaves over:

    decode   C, t_l and t_r: so many requests of one length decode together, for many batches and
             lengths; the power of each
    prompts  t_p: prompts of several lengths, alone and beside a batch that decodes
    idle     the power of a resting engine
    plug-in  an engine with the plug-in and one without it take turns with the same batch
    budget   TTFT and TPOT with long prompts among decoding requests, through a router without and
             with ``--prompt-budget auto``, in turns
    prefixes prompt tokens of conversations that the router foretells to be cached, beside those
             that the engine finds

FOLDER/step_time.json holds every point as soon as it is measured, the fits with their residuals,
the machine, and date, commit and command of every call; the engines' logs are beside it. The same
command measures what is missing, and ends with status 3 while something is.
``evenstep simulate decode --step-time FOLDER/step_time.json`` reads the fit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from tests.gpu.fit import Point, fit_decode, fit_power, fit_prompts
from tests.gpu.needed import OF_A_ROUTER, missing
from tests.gpu.parts import Budget, Parts, Values, measure_with, options, say
from tests.gpu.routed import SMALL as SMALL_TRAFFIC
from tests.gpu.routed import TALKS, Traffic, budget_figures, prefix_hits, prompt_budgets
from tests.gpu.routed import names as budget_names
from tests.gpu.serving import CHUNK_TOKENS, Engine, Machine, engine, machine_facts
from tests.gpu.steps import NeverSeenError, decoding, idle_power, prompts
from tests.support.rank_steps import SnapshotLog, reading

FILE = "step_time.json"
# What the parts of the file are called, in their order, with their shares of the time; the first
# engine starts in the first one's, the second in that of the plug-in.
SHARES = {
    "decode": 0.47,
    "prompts": 0.1,
    "idle": 0.02,
    "plug-in": 0.24,
    "budget": 0.12,
    "prefixes": 0.05,
}
DECODE, PROMPTS, IDLE, ROUNDS, BUDGETS, PREFIXES = SHARES
ROUTED = {BUDGETS: prompt_budgets, PREFIXES: prefix_hits}
COSTS = ("base_s", "per_token_s", "per_request_s")
# Parts of a GPU's memory: while the second engine is there, the first one rests or takes turns.
PLUGGED_SHARE, PLAIN_SHARE = "0.6", "0.3"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        batches, contexts: of the decoding points.
        steps: decoded at each of them.
        prompts: tokens of a prompt.
        mixed: batch and context beside which prompts are computed.
        repeats: prompts of each length.
        rounds: of plug-in on and off.
        hook_batch, hook_steps: requests and steps of such a round.
        idle_s: how long an engine rests.
        traffic: through a router.
    """

    batches: Sequence[int] = (1, 8, 32, 64, 128, 256)
    contexts: Sequence[int] = (128, 1024, 4096, 8192)
    steps: int = 150
    prompts: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192)
    mixed: tuple[int, int] = (32, 1024)
    repeats: int = 6
    rounds: int = 8
    hook_batch: int = 32
    hook_steps: int = 300
    idle_s: float = 8.0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def slots(self) -> int:
        """Requests at once."""
        return max(*self.batches, self.hook_batch, self.mixed[0] + 1, self.traffic.clients)

    @property
    def longest(self) -> int:
        """Tokens of a request."""
        answers = max(self.batches) + 2 * self.steps + self.hook_steps
        return 2 * max(*self.contexts, *self.prompts) + answers


SMALL = Sizes(
    batches=(1, 4, 8),
    contexts=(64, 1024),
    steps=30,
    prompts=(64, 256, 1024),
    mixed=(4, 64),
    repeats=3,
    rounds=2,
    hook_batch=4,
    hook_steps=40,
    idle_s=1.0,
    traffic=SMALL_TRAFFIC,
)


def main() -> None:
    """Measure as the command line says."""
    parser = options(__doc__)
    parser.add_argument("--parts", type=known_parts, default=tuple(SHARES), metavar="PART,...")
    measure_with(parser, measure)


def known_parts(text: str) -> tuple[str, ...]:
    """Those that are named, in their own order."""
    named = text.split(",")
    if unknown := set(named) - set(SHARES):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(SHARES)}")
    return tuple(part for part in SHARES if part in named)


def measure(where: Machine, given: argparse.Namespace) -> list[str]:
    """All that is asked for and missing, as far as the time goes; what is missing still."""
    sizes = SMALL if where.cpu else Sizes()
    parts = Parts(given.out / FILE, {**where.settings, **asdict(sizes)}, figures)
    budget = Budget(given.limit_s, SHARES)
    wanted = {part: names(part, sizes) for part in given.parts}
    left = {part: parts.missing(part, wanted[part]) for part in wanted}
    if IDLE in wanted and not where.cpu:  # a GPU that could not be read may be readable by now
        left[IDLE] = parts.unknown(IDLE, wanted[IDLE])
    if not any(left.values()):
        return []
    flags = (
        *("--max-num-seqs", str(sizes.slots), "--max-model-len", str(sizes.longest)),
        *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    )
    with plugged_engine(where, parts, flags) as (plugged, log):
        for part in wanted:
            if not left[part] or budget.left_s(part) <= 0:
                continue
            within = budget.within(part, left[part])
            if part == ROUNDS:
                plug_in_cost(where, parts, plugged, sizes, flags, budget)
            elif part in ROUTED:
                through_a_router(where, parts, part, plugged, log, sizes.traffic, within)
            else:
                for name in within:
                    with contextlib.suppress(NeverSeenError):
                        parts.keep(part, name, one(part, name, plugged, log, sizes))
    return [f"{part}: {name}" for part in wanted for name in parts.missing(part, wanted[part])]


@contextlib.contextmanager
def plugged_engine(
    where: Machine, parts: Parts, flags: tuple[str, ...]
) -> Iterator[tuple[Engine, SnapshotLog]]:
    """The engine with the plug-in, its first slow steps behind it, and what it tells."""
    share = () if where.cpu else ("--gpu-memory-utilization", PLUGGED_SHARE)
    with engine(where, "plug-in", *flags, *share) as plugged:
        assert plugged.endpoint is not None
        parts.begin(machine_facts(where, plugged.server), where.commit)
        with reading([plugged.endpoint]) as log:
            plugged.decode_together(1, 16, 16)
            log.rest(1)
            yield plugged, log


def names(part: str, sizes: Sizes) -> list[str]:
    """What a part consists of."""
    if part == DECODE:
        return [f"{batch} x {context}" for context in sizes.contexts for batch in sizes.batches]
    if part == PROMPTS:
        return [
            f"{tokens} beside {batch}" for batch in (0, sizes.mixed[0]) for tokens in sizes.prompts
        ]
    if part == ROUNDS:
        return [str(number + 1) for number in range(sizes.rounds)]
    if part == BUDGETS:
        return budget_names(sizes.traffic)
    return ["power_w"] if part == IDLE else [TALKS]


def one(part: str, name: str, plugged: Engine, log: SnapshotLog, sizes: Sizes) -> object:
    """A point, by its name; None if the KV memory does not hold it."""
    if part == IDLE:
        return idle_power(log, sizes.idle_s)
    first, second = (int(word) for word in name.split() if word.isdecimal())
    found = (
        decoding(plugged, log, first, second, sizes.steps)
        if part == DECODE
        else prompts(plugged, log, first, second, sizes.mixed[1], sizes.repeats)
    )
    return found and asdict(found)


def plug_in_cost(
    where: Machine,
    parts: Parts,
    plugged: Engine,
    sizes: Sizes,
    flags: tuple[str, ...],
    budget: Budget,
) -> None:
    """The same batch on an engine with the plug-in and on one without, in turns.

    Both engines are on the same device, and only one has work at a time. A burst's time less that
    of its prompts alone, by its steps, is the time of one.
    """
    share = () if where.cpu else ("--gpu-memory-utilization", PLAIN_SHARE)
    every = names(ROUNDS, sizes)
    left, odd = parts.missing(ROUNDS, every), every[::2]
    with engine(where, "plain", *flags, *share, plug_in=False) as plain:
        # Whether there is time for a round is asked before each.
        for name in chain(("warm-up",), budget.within(ROUNDS, left)):
            took = {}
            for each in (plugged, plain) if name in odd else (plain, plugged):
                took[each] = burst_step_s(each, sizes.hook_batch, sizes.hook_steps)
            if name in left:
                parts.keep(ROUNDS, name, {"on_step_s": took[plugged], "off_step_s": took[plain]})


def through_a_router(
    where: Machine,
    parts: Parts,
    part: str,
    plugged: Engine,
    log: SnapshotLog,
    traffic: Traffic,
    within: Iterator[str],
) -> None:
    """What is missing of a part that takes a router; why, where it cannot be measured."""
    if absent := missing(OF_A_ROUTER):
        say(f"{part}: no router without {', '.join(absent)}")
        return
    try:
        for name, found in ROUTED[part](where, plugged, log, traffic, within):
            parts.keep(part, name, found)
    except NeverSeenError as error:
        say(f"{part}: {error}")


def burst_step_s(one: Engine, batch: int, steps: int) -> float:
    """Wall time of a decode step, seen from outside."""
    ends = []
    for tokens in (1, 1 + steps):
        began_s = time.perf_counter()
        one.decode_together(batch, 64, tokens)
        ends.append(time.perf_counter() - began_s)
    return (ends[1] - ends[0]) / steps


# --- figures --------------------------------------------------------------------------------------


def figures(parts: Mapping[str, Values]) -> tuple[Values, Values]:
    """The costs that the simulator reads, and every fit with its residuals."""
    decode, chunks = points(parts, DECODE), points(parts, PROMPTS)
    fits: dict[str, Any] = {}
    head: dict[str, float] = {}
    if len(decode) > 2:
        fits[DECODE] = fit_decode(decode)
        head = {key: fits[DECODE][key] for key in COSTS}
        if chunks:
            fits[PROMPTS] = fit_prompts(chunks, head)
            head["per_prompt_token_s"] = fits[PROMPTS]["per_prompt_token_s"]
    idle_w = parts.get(IDLE, {}).get("power_w")
    fits["power"] = None if idle_w is None else fit_power(decode, idle_w)
    fits["plug_in"] = plug_in_figures(list(parts.get(ROUNDS, {}).values()))
    fits["prompt_budget"] = budget_figures(parts.get(BUDGETS, {}))
    return head, {"fits": fits}


def points(parts: Mapping[str, Values], part: str) -> dict[str, Point]:
    """Those that the KV memory has held."""
    return {n: Point(**each) for n, each in parts.get(part, {}).items() if each is not None}


def plug_in_figures(rounds: Sequence[Values]) -> dict[str, Any] | None:
    """Medians, and every round's ratio."""
    if not rounds:
        return None
    ratios = sorted(each["on_step_s"] / each["off_step_s"] for each in rounds)
    return {
        "rounds": len(rounds),
        "on_step_s": statistics.median(each["on_step_s"] for each in rounds),
        "off_step_s": statistics.median(each["off_step_s"] for each in rounds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
