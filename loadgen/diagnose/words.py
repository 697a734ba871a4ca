"""A diagnosis in words: an operator's questions and their answers."""

from collections.abc import Iterator

from loadgen.diagnose.analysis.findings import Barrier, Caches, Findings, Memory, Waiting
from loadgen.diagnose.analysis.prospects import Prospects
from loadgen.diagnose.analysis.verdict import Word, memory_short, too_little, unsteady
from loadgen.diagnose.diagnosis import EXTRAPOLATED, Diagnosis
from loadgen.diagnose.energy_per_day import JOULES_PER_KWH, Energy

HEADLINES = {
    Word.BALANCING_PAYS: "Balancing pays here.",
    Word.ALREADY_EVEN: "Balancing would win nothing more here: loads are as even as they get.",
    Word.CHEAP_ATTENTION: "Balancing does not matter here: a step costs the same for any load.",
    Word.NO_BARRIER: "Balancing does not matter here: there is no barrier.",
    Word.KV_STARVED: "KV memory is what is short here, not balance.",
    Word.TOO_LITTLE_LOAD: "Balancing does not matter here: there is too little load.",
    Word.ONE_WORKER: "Balancing does not matter here: there is one worker.",
    Word.TOO_SHORT: "Too little was recorded to tell.",
}


# Below this share of the tokens, what caches would find is not worth a word.
_HARDLY = 0.03

_UNKNOWN_POWER = (
    "Unknown: too few workers tell their power, and modelling it takes --power-levels of the "
    "router and a known idle share. The plug-in tells it on GPUs; without the plug-in evenstep "
    "agent does."
)


def answers(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Questions with their answers; empty without steps."""
    found = diagnosis.found
    if not found.steps:
        return
    yield "Is there a barrier?", _barrier(found.barrier)
    yield "How much is waiting?", _waiting(found.waiting, found.barrier)
    yield "Is KV memory short?", _memory(found.memory)
    yield "Is there load enough?", _load(found)
    if found.caches.cached_share is not None:
        yield "Prefix caches?", _caches(diagnosis, found.caches, found.caches.cached_share)
    if diagnosis.prospects is not None:
        yield "What is simulated?", _simulation(diagnosis, diagnosis.prospects)
    if diagnosis.extra_tok_s is not None:
        yield "What would it win?", _extra(diagnosis, diagnosis.extra_tok_s)
    if diagnosis.energy is not None:
        yield "Joules and money?", energy_words(diagnosis.energy)


def _barrier(barrier: Barrier) -> str:
    together, fitted = barrier.together_share, barrier.fitted
    if together is None:
        return "Not known: no two workers had something to run at once."
    said = f"{together:.0%} of the steps were made together by all that were busy."
    if not barrier.there:
        return f"No: {said}"
    said = f"Yes: {said}"
    if fitted is None:
        return f"{said} The time of a step does not follow the load of the fullest worker."
    return (
        f"{said} A step takes {fitted.formula} of the slowest worker, which explains "
        f"{fitted.explained:.0%} of how it varies."
    )


def _waiting(waiting: Waiting, barrier: Barrier) -> str:
    loads = (
        f"Imbalance {waiting.imbalance_tokens:,.0f} tokens; a worker holds "
        f"{waiting.mean_load_tokens:,.0f} on average, the fullest {waiting.max_load_tokens:,.0f}."
    )
    if waiting.idle_share is None:
        return f"{'Not known.' if barrier.there else 'None waits for another.'} {loads}"
    parts = ""
    if waiting.decode_share is not None and waiting.prompt_share:
        parts = (
            f" Uneven tokens and requests alone would cost {waiting.decode_share:.1%}; prompts, "
            f"which some workers compute while the others wait, add {waiting.prompt_share:.1%}."
        )
    return (
        f"{waiting.idle_share:.1%} of the workers' time ({waiting.idle_share_is}).{parts} {loads}"
    )


def _memory(memory: Memory) -> str:
    used = "Its size is not known."
    if memory.used_mean is not None:
        used = f"{memory.used_mean:.0%} of it is used on average, {memory.used_max:.0%} at most."
    held = ""
    if memory.held_share is not None:
        held = f" {memory.held_share:.1%} of the slots are held empty while requests wait."
    short = "Yes" if memory_short(memory) else "No"
    return f"{short}. {used} {memory.preemptions:,} preemptions.{held}"


def _load(found: Findings) -> str:
    load = found.load
    used = "How many slots are used is not known"
    if load.slots_used is not None:
        used = f"{load.slots_used:.0%} of the slots are used"
    steady = ""
    if unsteady(load):
        steady = (
            f" The load was not steady, {load.second_half:.0%} as many tokens in the second half "
            "as in the first: what is predicted is for one that is."
        )
    enough = "No" if too_little(found) else "Yes"
    return (
        f"{enough}. {used}; requests waited at {load.waiting_share:.0%} of the steps, "
        f"{load.waiting:,.1f} on average. {load.completed:,} got their answer, {load.failed:,} did "
        f"not.{steady}"
    )


def _caches(diagnosis: Diagnosis, caches: Caches, cached_share: float) -> str:
    said = f"{cached_share:.1%} of the prompts' tokens were found (recorded)."
    if caches.block_tokens is None:
        why = "the blocks of most prompts were not recorded."
        if not caches.told:
            why = "no worker tells its cache. vLLM's prefix caching and the plug-in do that."
        if diagnosis.window.source == "observe":
            why = "only evenstep serve records which prompts begin alike."
        return f"{said} What another policy would find is not known: {why}"
    seen = diagnosis.prospects
    found = {row: row.caching for row in (seen.all if seen else ()) if row.caching is not None}
    if not found:
        return f"{said} What another policy would find was not simulated."
    most = max(caching.cached_share for caching in found.values())
    if most < _HARDLY:
        return f"{said} Prompts share too little: no policy would find more than {most:.1%}."
    soonest = min(found, key=lambda row: found[row].ttft_s)
    told = [row for row in found if row.current or row in (diagnosis.advice, soonest)]
    simulated = "; ".join(
        f"{row.name}{' (in force)' * row.current} {found[row].cached_share:.1%}, TTFT "
        f"{found[row].ttft_s:.3g} s"
        for row in told
    )
    return f"{said} Simulated: {simulated}."


def _simulation(diagnosis: Diagnosis, seen: Prospects) -> str:
    how = "kept as full as it was" if seen.mode == "full" else "each arriving when it did"
    said = f"The {seen.requests:,} recorded requests in a circle, {how}, in {seen.steps:,} steps."
    error = diagnosis.simulation_error
    if error is None:
        return f"{said} Who balanced is not known: the baseline is what was measured."
    shares = (("idle share", "idle_share"), ("imbalance", "imbalance_tokens"))
    off = ", ".join(f"{text} {error[key]:+.1%}" for text, key in shares if key in error)
    return (
        f"{said} Of the policy in force it is off by: {off}, tokens/s "
        f"{error['throughput_tok_s']:+.1%}. Predicted is what was measured, times the ratio of the "
        "simulated."
    )


def _extra(diagnosis: Diagnosis, extra_tok_s: float) -> str:
    assert diagnosis.advice is not None
    seen = diagnosis.prospects
    said = f"{extra_tok_s:+,.0f} tokens/s with {diagnosis.advice.name}"
    if seen is not None and seen.mode == "full":
        return f"{said}."
    return f"{said}, if more requests came; those that come get their tokens that much sooner."


def energy_words(used: Energy) -> str:
    """Energy per day, and the share that a switch would save."""
    if used.power_w is None or used.per_day_j is None:
        parts = [_UNKNOWN_POWER]
    else:
        how = "modelled by --power-levels" if used.power_is == "modelled" else used.power_is
        parts = [
            f"{used.power_w:,.0f} W ({how}), {_amount(used, used.per_day_j)} a day: {EXTRAPOLATED}."
        ]
        if used.waiting_per_day_j is None:
            parts.append(
                "What waiting takes of it is unknown without --power-levels of the router."
            )
        else:
            parts.append(f"Waiting takes {_amount(used, used.waiting_per_day_j)} of it.")
    if used.saved_share is not None:
        less = "less" if used.saved_share >= 0 else "more"
        amount = f"{abs(used.saved_share):.1%}"
        if used.saved_per_day_j is not None:
            amount = _amount(used, abs(used.saved_per_day_j))
        parts.append(f"The same tokens would take {amount} {less} (modelled).")
    if used.price_per_kwh is None and used.power_w is not None:
        parts.append("Money is unknown without --price.")
    return " ".join(parts)


def _amount(used: Energy, joules: float) -> str:
    amount = f"{joules / JOULES_PER_KWH:,.1f} kWh"
    money = used.money(joules)
    return amount if money is None else f"{amount} (cost {money:,.2f})"
