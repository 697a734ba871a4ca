"""Verdict whether balancing matters on this cluster, with the reasons."""

from dataclasses import dataclass
from enum import Enum

from loadgen.diagnose.analysis.findings import Findings, Load, Memory
from loadgen.diagnose.analysis.prospects import Prospects

# Fits over fewer steps and averages over fewer requests are too noisy.
LEAST_STEPS = 200
LEAST_REQUESTS = 50
# A cluster that steps this seldom over this long is not busy.
LEAST_SECONDS = 20.0
SELDOM_STEPPING = 0.5
# A preempted request is computed again; with enough memory there are no preemptions.
PREEMPTIONS_PER_REQUEST = 0.02
# Share of slots that memory keeps empty, beyond the step or two that a refill takes.
HELD_SLOTS = 0.05
# Predictions assume a steady load; chance changes the halves of a minute by less than this.
STEADY = 0.8
# With half of the slots free and no request waiting, any worker takes any request.
FREE_SLOTS = 0.5
SELDOM = 0.05
# The idle share bounds the gain of perfect balance; a smaller one is within a minute's noise.
IDLE_EVEN = 0.02
# Attention's share of a step: below this, twice the load costs about 5 % of a step.
ATTENTION_CHEAP = 0.1
# A simulator this far off for the policy in force predicts nothing for the others.
FAR_OFF = 0.3
# Least gain in tokens/s that is worth a switch; less is within a minute's noise.
WORTH_A_SWITCH = 0.02


class Word(Enum):
    """Verdicts."""

    BALANCING_PAYS = "balancing_pays"
    ALREADY_EVEN = "already_even"
    CHEAP_ATTENTION = "cheap_attention"
    NO_BARRIER = "no_barrier"
    KV_STARVED = "kv_starved"
    TOO_LITTLE_LOAD = "too_little_load"
    ONE_WORKER = "one_worker"
    TOO_SHORT = "too_short"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One word, and the reason as sentences."""

    word: Word
    reasons: tuple[str, ...]


def _said(word: Word, *reasons: str) -> Verdict:
    return Verdict(word, reasons)


def first_verdict(found: Findings) -> Verdict | None:
    """The verdict that makes a simulation needless or impossible; None if policies may differ."""
    if not found.steps:
        return _no_steps(found)
    if found.load.workers <= 1:
        return _said(Word.ONE_WORKER, "One worker has nobody to wait for.")
    if found.steps < LEAST_STEPS:
        return _few_steps(found)
    if found.barrier.together_share is None:
        return _said(Word.TOO_LITTLE_LOAD, "No two workers ever had something to run at once.")
    if not found.barrier.there:
        return _said(
            Word.NO_BARRIER,
            f"Workers do not step together ({found.barrier.together_share:.0%} of the steps by all "
            "that were busy): none waits for another, so an uneven load costs no throughput, only "
            "latency on the fuller worker.",
        )
    if memory_short(found.memory):
        return _kv_starved(found)
    if too_little(found):
        reason = f"{found.load.slots_used:.0%} of the slots are used and nobody waits for one."
        return _said(Word.TOO_LITTLE_LOAD, reason)
    # Perfect balance would win almost nothing, and caches are not known.
    if found.idle_share_most < IDLE_EVEN and found.caches.block_tokens is None:
        return _even(found, found.idle_share_most)
    return _no_simulation(found)


def final_verdict(found: Findings, prospects: Prospects) -> Verdict:
    """Whether a switch to the best policy would pay, if the simulation can predict it."""
    off, current = 0.0, prospects.current
    if current is not None:
        off = current.simulated.throughput_tok_s / found.waiting.throughput_tok_s - 1
    if abs(off) > FAR_OFF:
        reason = (
            f"The simulator is {off:+.0%} off in the tokens/s of the policy in force, so it cannot "
            "tell what another would do: record longer, at a steady load, where engines and router "
            "have the CPU that they need."
        )
        return _said(Word.TOO_SHORT, reason)
    idle_share, best, now = found.waiting.idle_share, prospects.best, found.waiting
    assert idle_share is not None
    gain = best.predicted.throughput_tok_s / now.throughput_tok_s - 1
    waits = f"Workers wait for the fullest one {idle_share:.1%} of the time"
    if best.current:
        reason = f"{waits}, and no other policy would do better than {best.name}."
        return _said(Word.ALREADY_EVEN, reason)
    if gain < WORTH_A_SWITCH:
        reason = f"{waits}, and the best policy, {best.name}, would win {gain:+.1%} tokens/s."
        return _said(Word.ALREADY_EVEN, reason)
    reason = (
        f"{waits}; with {best.name} it would be {best.predicted.idle_share:.1%}, and "
        f"{gain:+.1%} tokens/s."
    )
    return _said(Word.BALANCING_PAYS, reason)


def _no_steps(found: Findings) -> Verdict:
    if found.load.completed or found.load.failed:
        reason = "No step was recorded: no worker sends snapshots (,snapshots= of --worker)."
        return _said(Word.TOO_SHORT, reason)
    if found.elapsed_s >= LEAST_SECONDS:
        reason = (
            f"Nothing ran in {found.elapsed_s:.0f} s. If something did, no worker sends snapshots "
            "(,snapshots= of --worker)."
        )
        return _said(Word.TOO_LITTLE_LOAD, reason)
    reason = "Nothing ran meanwhile: listen while there are requests, or longer."
    return _said(Word.TOO_SHORT, reason)


def _few_steps(found: Findings) -> Verdict:
    if found.elapsed_s >= LEAST_SECONDS and found.barrier.stepping_share < SELDOM_STEPPING:
        reason = f"{found.steps} steps in {found.elapsed_s:.0f} s: hardly any load."
        return _said(Word.TOO_LITTLE_LOAD, reason)
    return _said(Word.TOO_SHORT, f"{found.steps} steps were recorded; {LEAST_STEPS} are needed.")


def memory_short(memory: Memory) -> bool:
    """Whether KV memory, rather than slots, limits the requests."""
    held = memory.held_share is not None and memory.held_share >= HELD_SLOTS
    return held or memory.per_request >= PREEMPTIONS_PER_REQUEST


def too_little(found: Findings) -> bool:
    """Whether most slots are free, hardly any request waits, and hardly any worker for prompts."""
    used, prompts = found.load.slots_used, found.waiting.prompt_share or 0.0
    free = used is not None and used < 1 - FREE_SLOTS and found.load.waiting_share < SELDOM
    return free and prompts < IDLE_EVEN


def unsteady(load: Load) -> bool:
    """Whether the load grew or fell during the window."""
    return load.second_half is not None and not STEADY <= load.second_half <= 1 / STEADY


def _kv_starved(found: Findings) -> Verdict:
    memory, reasons = found.memory, []
    if memory.per_request >= PREEMPTIONS_PER_REQUEST:
        reasons.append(
            f"{memory.preemptions:,} preemptions for {found.load.completed:,} answers: KV memory "
            "is too small for what the engines let in."
        )
    if memory.held_share is not None and memory.held_share >= HELD_SLOTS:
        reasons.append(
            f"{memory.held_share:.0%} of the slots stand empty while requests wait: KV memory, or "
            "who may enter it, is what is short."
        )
    reasons.append("Admission is the problem to solve first (the plug-in's admission policies).")
    return _said(Word.KV_STARVED, *reasons)


def _even(found: Findings, idle_share: float) -> Verdict:
    cost = found.barrier.attention_share
    time = "of the time" + (" at the most" if found.waiting.idle_share is None else "")
    if found.waiting.even_share >= IDLE_EVEN and (cost is None or cost < ATTENTION_CHEAP):
        share = "too little to show" if cost is None else f"{cost:.1%} of a step"
        return _said(
            Word.CHEAP_ATTENTION,
            f"What the fullest worker's tokens cost is {share}, the rest is the same for any "
            f"load: that loads are uneven costs {idle_share:.1%} {time}.",
        )
    return _said(
        Word.ALREADY_EVEN,
        f"Loads are even already: workers wait for the fullest one {idle_share:.1%} {time}, which "
        "is all that balancing could win.",
    )


def _no_simulation(found: Findings) -> Verdict | None:
    if found.barrier.fitted is None:
        reason = (
            "What a token costs is not known: the times of the steps do not tell it. Record "
            "longer, or while the load changes."
        )
        return _said(Word.TOO_SHORT, reason)
    missing: list[str] = []
    if found.load.completed < LEAST_REQUESTS:
        missing.append(
            f"{found.load.completed} requests ended; a replay needs {LEAST_REQUESTS}: record "
            "longer."
        )
    if found.load.slots is None or found.load.slots_used is None:
        missing.append("How many slots the workers have is not known (,slots= of --worker).")
    return _said(Word.TOO_SHORT, *missing) if missing else None
