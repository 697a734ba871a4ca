"""Quality of a group's inputs, in words: measured, substituted or missing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from router.core.forecast.look_ahead import LookAhead
from router.core.rounds.decider import Decider
from router.core.state.group import Group
from router.core.state.worker import Worker
from router.core.step_fit import NUMBERS
from router.core.step_time import StepBudget, StepTime
from router.core.types import StateSource

_SIGNALS = {
    "auto": "learned lengths, or the engines' own probabilities where these foretell more",
    "cap": "each request's max_tokens",
    "survival": "the lengths learned from requests before",
}

# A full share, up to rounding.
_ALL = 0.999

Standing = Literal["good", "fallback", "problem", "unknown"]
Told = tuple[Standing, str]


class Fact(msgspec.Struct, frozen=True, gc=False):
    """One input of a group's decisions and figures, its quality, and how to improve it."""

    topic: str
    standing: Standing
    text: str


@dataclass(frozen=True, slots=True)
class Footing:
    """Facts common to all groups; ``policy`` is None if nothing is routed."""

    policy: str | None = None
    lookahead: str = "auto"
    compiled: bool = True
    calibrated: bool = False
    replica: str | None = None  # who decides; None: there are no replicas


def facts(
    group: Group, prefills: Group | None, decider: Decider | None, powered: int, footing: Footing
) -> list[Fact]:
    """All facts of one group."""
    live = group.live_workers()
    found = {"Workers": _workers(group, live, routed=decider is not None)}
    if live:
        found["Loads"] = _loads(live)
    if group.serves is None:
        found |= {"Idle share": _waiting(group), "Cost of a step": _cost(group)}
    if group.prompt_budget is not None:
        found["Prompt budget"] = _prompt_budget(live, group.prompt_budget)
    found["Prefix caches"] = _prefixes(group)
    found["Power"] = _power(len(live), powered, footing)
    if decider is not None:
        found |= _of_decisions(decider, prefills, footing)
    return [Fact(topic, *told) for topic, told in found.items()]


def _of_decisions(decider: Decider, prefills: Group | None, footing: Footing) -> dict[str, Told]:
    found = {"Policy": _policy(decider)}
    if decider.look_ahead is not None:
        found["Look-ahead"] = _look_ahead(decider.look_ahead, footing)
    if decider.policy.solves:
        slower = "Not compiled, so it searches less in its time: pip install 'evenstep[fast]'."
        found["Solver"] = ("good", "Compiled.") if footing.compiled else ("fallback", slower)
    found["Prompt sizes"] = _sizes(decider)
    if prefills is not None:
        found["Prompts"] = _prompts(prefills, decider)
    return found


def _workers(group: Group, live: Sequence[Worker], *, routed: bool) -> Told:
    down = len(group.workers) - len(live)
    draining = sum(worker.draining for worker in live)
    if draining == len(live):
        what = f"{_count(draining)} draining, no other up" if draining else "No worker is up"
        rest = ": requests are turned away" if routed else ""
        return "problem", f"{what}{rest}."
    if draining:
        text = f"{_count(draining)} draining, {down} down; {len(live) - draining} left."
        return "problem" if down else "fallback", text
    if down == 0:
        return "good", f"{_count(len(live))} up, none down."
    rest = f"; {len(live)} left for all requests" if routed else f", {len(live)} up"
    return "problem", f"{_count(down)} down{rest}."


def _loads(live: Sequence[Worker]) -> Told:
    sources = Counter(worker.source for worker in live)
    if sources[StateSource.SNAPSHOTS] == len(live):
        return "good", "Every engine tells its state after each step, so loads are exact."
    told, read, own = (sources[source] for source in StateSource)
    parts = [
        (told, "by snapshots after each step"),
        (read, "by the engine's own metrics, a second or more late"),
        (own, "only by what this router has sent there"),
    ]
    text = "; ".join(f"{_count(number)} known {how}" for number, how in parts if number)
    return "fallback", f"{text}. The vLLM plug-in makes them exact."


def _waiting(group: Group) -> Told:
    totals = group.totals.values()
    if not any(each.steps for each in totals):
        text = "No engine tells its steps, so imbalance is of the loads as the router counts them."
        if any(each.source is StateSource.SNAPSHOTS for each in group.live_workers()):
            text = "Not known yet: nothing has run since the start."
        return "unknown", text
    if group.barrier is False:
        text = (
            "None: workers do not step together, so none waits for another. Uneven loads cost no "
            "throughput, only latency on the fuller worker."
        )
        return "good", text
    timed_s = sum(each.timed_s for each in totals)
    if not timed_s:
        text = "Not known yet: workers must step together, at loads that differ, for a while."
        return "unknown", text
    measured = sum(each.measured_s for each in totals) / timed_s
    if measured > _ALL:
        return "good", "Every engine times how long it waits for the others."
    of_it = f"{measured:.0%} timed by the engines, the rest modelled" if measured else "Modelled"
    return "fallback", f"{of_it}: by how much less work each worker had in a step than the slowest."


def _cost(group: Group) -> Told:
    found, used = group.fitted, group.step_time
    if used is None:
        text = "No engine tells its steps. The vLLM plug-in does."
        if any(each.source is StateSource.SNAPSHOTS for each in group.live_workers()):
            text = "Not known yet: steps of different loads tell it."
        return "unknown", text
    text = f"{used.formula} of the slowest worker"
    if found is None or used is not found:
        return "fallback", f"{text}, as --step-time says."
    known = (
        both if name in found.known else (0.0, 0.0)
        for name, both in zip(NUMBERS, found.intervals, strict=True)
    )
    low, high = (StepTime(*side) for side in zip(*known, strict=True))
    text = f"{text}, which explains {found.explained:.0%} of how steps vary."
    if found.known:
        text = f"{text} With 95 % certainty from {low.formula} to {high.formula}."
    return "good", text


def _prompt_budget(live: Sequence[Worker], told: StepBudget) -> Told:
    every = f" of every {told.every} steps, none in the others" if told.every > 1 else ""
    text = f"At most {told.tokens:,} prompt tokens in a step{every}."
    kept = [worker.feed and worker.feed.last.prompt_budget for worker in live]
    if all(tokens is None for tokens in kept):
        text = "No worker takes prompt budgets: set prompt_budget in the plug-in's settings."
        return "fallback", text
    if all(kept):
        return "good", text
    lost = f"{_count(len(kept) - sum(map(bool, kept)))} had no bound in the last step"
    return "fallback", f"{text} But {lost}: the plug-in's prompt_budget bounds it."


def _prefixes(group: Group) -> Told:
    told = sum(group.prefixes.tells(worker.spec.id) for worker in group.live_workers())
    if not told and (guessed := group.prefixes.guessed):
        text = (
            f"Guessed of {_count(guessed)} by what was sent there. The vLLM plug-in tells what is "
            "cached."
        )
        return "fallback", text
    if not told:
        text = (
            "No engine tells what it has cached of prompts. With prefix caching on, the vLLM "
            "plug-in tells it."
        )
        return "unknown", text
    missing = len(group.live_workers()) - told
    text = f"Told by {_count(told)}{f', not by {missing}' if missing else ''}."
    totals = group.hit_totals
    if totals.prompt_tokens:
        share = totals.found_tokens / totals.prompt_tokens
        right = totals.right / totals.requests
        text = (
            f"{text} Engines had {share:.0%} of the prompt tokens sent to them cached; foretold "
            f"exactly in {right:.0%} of {totals.requests:,} requests."
        )
    return "fallback" if missing else "good", text


def _power(live: int, powered: int, footing: Footing) -> Told:
    if powered == 0:
        text = (
            "No worker tells its power. The vLLM plug-in tells it, or the engine's log says why "
            "not; without the plug-in evenstep agent tells it."
        )
        return "unknown", text
    missing = f" of {live}; the others are not in the sum" if powered < live else ""
    levels = "" if footing.calibrated else " Without --power-levels, what for is not known."
    standing: Standing = "good" if footing.calibrated and not missing else "fallback"
    return standing, f"Told by {_count(powered)}{missing}.{levels}"


def _policy(decider: Decider) -> Told:
    errors, rounds = decider.stats.policy_errors, decider.stats.rounds
    if errors:
        text = (
            f"Failed in {errors:,} of {rounds:,} rounds, where least_tokens stood in; see the log."
        )
        return "problem", text
    if not rounds:
        return "unknown", "It has had nothing to decide yet."
    return "good", f"Decided all {rounds:,} rounds itself."


def _look_ahead(ahead: LookAhead, footing: Footing) -> Told:
    if footing.lookahead == "none":
        return "good", "Off, as asked: loads count as they are."
    signal, horizon = _SIGNALS[footing.lookahead], ahead.parameters.horizon
    if horizon:
        return "good", f"{horizon} steps ahead, by {signal}."
    why = "which have told nothing yet" if ahead.skill is None else "which foretell too little"
    return "fallback", f"None now. It would go by {signal}, {why}: loads count as they are."


def _sizes(decider: Decider) -> Told:
    stats = decider.stats
    if not stats.assigned:
        return "unknown", "No request has been assigned yet."
    if not stats.estimated:
        return "good", "Every prompt had been counted when it was assigned."
    rate = decider.group.token_rate.bytes_per_token
    of_all = f"{stats.estimated:,} of {stats.assigned:,}"
    text = f"{of_all} estimated when assigned, at {rate:.1f} bytes per token, learned here."
    return "fallback", text


def _prompts(prefills: Group, decider: Decider) -> Told:
    live, fallbacks = len(prefills.live_workers()), decider.stats.fallbacks
    if not live:
        return "problem", f"{prefills.name} is down: the decode workers compute prompts themselves."
    text = f"Computed by {_count(live)} of {prefills.name}"
    if fallbacks:
        return "fallback", f"{text}; {fallbacks:,} by the decode workers instead."
    return "good", f"{text}."


def shortcoming(worker: Worker) -> str | None:
    """What its engine's plug-in cannot read, in words."""
    lacking = ", ".join(worker.unreported)
    return f"its engine's plug-in cannot read {lacking}" if lacking else None


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"
