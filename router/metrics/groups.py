"""Table of the metrics of groups: name, help text and reading function.

``metrics.workers`` has the metrics of workers and of the sources of their states.
"""

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from router.core.energy.levels import STATES
from router.core.forecast.look_ahead import LookAhead
from router.core.rounds.decider import Decider
from router.core.state.barrier import StepTotals
from router.core.state.group import Group
from router.core.targets import Verdict
from router.core.types import ADMISSION_ENDED, Outcome, StateSource
from router.metrics.prefixes import PREFIX_ROWS
from router.metrics.rows import HistogramRow, Row, Table
from router.metrics.step_cost import STEP_COST_ROWS


def _sources(group: Group) -> dict[str, float]:
    counts = Counter(worker.source for worker in group.live_workers())
    return {source.value: counts[source] for source in StateSource}


def _admissions(group: Group) -> dict[str, float]:
    feeds = [worker.feed for worker in group.live_workers() if worker.feed is not None]
    counts = Counter(feed.last.admission or "engine" for feed in feeds)
    return {
        admission: counts[admission] for admission in sorted({*counts, ADMISSION_ENDED, "engine"})
    }


def _prompt_budgets(group: Group) -> dict[str, float]:
    feeds = [worker.feed for worker in group.live_workers() if worker.feed is not None]
    kept = [feed.last.prompt_budget for feed in feeds if feed.last.prompt_budget is not None]
    told = group.prompt_budget.tokens if group.prompt_budget and kept else None
    found = {"router": told, "engines": min(kept, default=None)}
    return {by: tokens for by, tokens in found.items() if tokens is not None}


def _fitted_watts(group: Group) -> dict[str, float]:
    found = group.energy.level_fit.fitted()
    return {} if found is None else dict(zip(STATES, found, strict=True))


DECIDER_ROWS: Table[Decider] = {
    "evenstep_requests_total": Row(
        "Requests by how they ended: completed; aborted by the client; failed in the engine; "
        "expired in the queue; rejected as it was full, displaced from it by a key with fewer; "
        "refused, as late for a target; unserved, as no worker was up.",
        lambda decider: {
            **{outcome.value: decider.stats.outcomes.get(outcome, 0) for outcome in Outcome},
            "rejected": decider.stats.rejected,
            "refused": decider.stats.verdicts["refused"],
            "unserved": decider.stats.unserved,
        },
        "outcome",
    ),
    "evenstep_targets_total": Row(
        "Requests with targets by whether they met them, or why not: refused at once, as late; "
        "queue, late for the wait in the router, or turned away there; prompt, the way from the "
        "worker to the first token; tokens, the time for each further one; failed, an error.",
        lambda decider: {each: decider.stats.verdicts[each] for each in get_args(Verdict)},
        "verdict",
    ),
    "evenstep_pool_requests": Row(
        "Requests that wait for a free slot; a common queue counts at one group that is up.",
        lambda decider: decider.waiting,
    ),
    "evenstep_pool_tokens": Row(
        "Prompt tokens of evenstep_pool_requests; an estimate where the prompt is text.",
        lambda decider: sum(r.prompt_tokens for r in decider.pool) if decider.waiting else 0,
    ),
    "evenstep_pool_limit_requests": Row(
        "Requests that may wait in the router (--pool-size); further ones are rejected.",
        lambda decider: decider.pool.pool_size,
    ),
    "evenstep_requests_assigned_total": Row(
        "Times that a request was given to a worker, repeated attempts included.",
        lambda decider: decider.stats.assigned,
    ),
    "evenstep_requests_beside_total": Row(
        "Times that a request beside the pool (embeddings, scores, audio, tokenizing) was sent to "
        "a worker.",
        lambda decider: decider.stats.beside,
    ),
    "evenstep_requests_returned_total": Row(
        "Times that a request came back from a failing worker before its first byte.",
        lambda decider: decider.stats.returned,
    ),
    "evenstep_requests_unreturned_total": Row(
        "Errors of workers, and times that they were too slow, that clients were told though "
        "another worker could have been asked: more than --retry-budget allows.",
        lambda decider: decider.stats.unreturned,
    ),
    "evenstep_worker_ejections_total": Row(
        "Times that a worker was given nothing for a while, since it had failed requests.",
        lambda decider: decider.group.ejections,
    ),
    "evenstep_requests_estimated_total": Row(
        "Times that a request was given to a worker though no engine had counted its prompt yet.",
        lambda decider: decider.stats.estimated,
    ),
    "evenstep_rounds_total": Row(
        "Rounds in which the policy assigned waiting requests to workers.",
        lambda decider: decider.stats.rounds,
    ),
    "evenstep_rounds_held_total": Row(
        "Rounds whose requests waited for more: their prompts make all workers wait.",
        lambda decider: decider.stats.held_rounds,
    ),
    "evenstep_policy_errors_total": Row(
        "Rounds in which the policy failed and a simpler one stood in.",
        lambda decider: decider.stats.policy_errors,
    ),
    "evenstep_bytes_per_token": Row(
        "Bytes of prompt text that are taken for a token, learned from what engines have counted.",
        lambda decider: decider.group.token_rate.bytes_per_token,
    ),
    "evenstep_overcommit_requests": Row(
        "Requests that may queue in an engine before a slot is free there.",
        lambda decider: decider.overcommit.requests,
    ),
    "evenstep_slot_bubble_steps": Row(
        "Steps from a slot's becoming free to its next request's first step while others waited, "
        "on average over the last few hundred steps.",
        lambda decider: decider.overcommit.bubble_steps,
    ),
}

GROUP_ROWS: Table[Group] = {
    "evenstep_workers": Row(
        "Workers that may be given requests, by where their state is known from: their snapshots, "
        "else their engine's own metrics, else this router's counts alone.",
        _sources,
        "source",
    ),
    "evenstep_admission_workers": Row(
        "Workers whose snapshots tell who decides on admission there: a policy of the plug-in; "
        "engine: their engine alone; ended: since a fault of the plug-in's policy, its engine "
        "alone.",
        _admissions,
        "admission",
    ),
    "evenstep_prompt_budget_tokens": Row(
        "Most prompt tokens of a step (--prompt-budget): what the router tells engines that take "
        "it, and the least that engines kept to in their last steps, 0 where one had no bound.",
        _prompt_budgets,
        "by",
    ),
    "evenstep_prompt_window_steps": Row(
        "Steps of which the router lets one compute prompts; 1: each may.",
        lambda group: group.prompt_budget.every if group.prompt_budget else 1,
    ),
    "evenstep_workers_draining": Row(
        "Workers that are given no more requests since their operator drains or removes them.",
        lambda group: sum(worker.draining for worker in group.workers.values()),
    ),
    "evenstep_snapshot_gaps_total": Row(
        "State messages of workers that were lost on the way.",
        lambda group: group.gaps,
    ),
    "evenstep_preemptions_total": Row(
        "Times that engines took a running request's KV away, as memory was full, and computed it "
        "again later; of workers that tell snapshots.",
        lambda group: group.preemptions,
    ),
    **STEP_COST_ROWS,
    **PREFIX_ROWS,
    "evenstep_useful_energy_joules_total": Row(
        "Energy that workers spent on computing, by the calibrated --power-levels.",
        lambda group: group.energy.joules.useful_j,
    ),
    "evenstep_waiting_energy_joules_total": Row(
        "Energy that workers spent on waiting in steps for the slowest of them, by the calibrated "
        "--power-levels and the step's cost: what balancing can save.",
        lambda group: group.energy.joules.waiting_j,
    ),
    "evenstep_idle_energy_joules_total": Row(
        "Energy that workers spent between steps, with nothing to run.",
        lambda group: group.energy.joules.idle_j,
    ),
    "evenstep_undivided_energy_joules_total": Row(
        "Energy of steps that is known only as a whole: no --power-levels, or not known how long "
        "workers waited; and what a worker used while nothing was heard of it. With the other "
        "three it is all that the workers' meters have counted.",
        lambda group: group.energy.joules.unknown_j,
    ),
    "evenstep_metered_seconds_total": Row(
        "What metered workers have done, summed over workers: idle between steps, waiting in steps "
        "for the fullest, computing; unknown of steps of which it is not known how long they "
        "waited.",
        lambda group: {
            **dict(zip(STATES, group.energy.level_fit.seconds, strict=True)),
            "unknown": group.energy.level_fit.unknown_s,
        },
        "state",
    ),
    "evenstep_fitted_power_watts": Row(
        "Power of a worker's GPUs in each of these states, fitted to what the meters have counted; "
        "evenstep calibrate makes --power-levels of it. No value while the meters do not tell.",
        _fitted_watts,
        "state",
    ),
}

PREFILL_ROWS: Table[Decider] = {
    "evenstep_prefills_passed_total": Row(
        "Prompts that decode workers computed, since that was sooner than at a prefill worker.",
        lambda decider: decider.stats.passed,
    ),
    "evenstep_prefill_fallbacks_total": Row(
        "Requests that decode workers did whole, since no prefill worker computed their prompts.",
        lambda decider: decider.stats.fallbacks,
    ),
    "evenstep_prefills_repeated_total": Row(
        "Prompts that were computed again, since their KV was gone or could not be fetched.",
        lambda decider: decider.stats.repeated_prefills,
    ),
    "evenstep_prefills_lost_total": Row(
        "Prompts that are computed twice: a prefill engine did not say where their KV lies.",
        lambda decider: decider.stats.lost_prefills,
    ),
    "evenstep_kv_expired_tokens_total": Row(
        "KV tokens that prefill workers kept until they expired, since nobody fetched them.",
        lambda decider: decider.stats.expired_kv_tokens,
    ),
    "evenstep_kv_kept_tokens": Row(
        "KV tokens that prefill workers keep, since nobody has fetched them yet.",
        lambda decider: sum(worker.kept_tokens for worker in decider.group.prefill_workers),
    ),
}

LOOK_AHEAD_ROWS: Table[LookAhead] = {
    "evenstep_horizon_steps": Row(
        "Steps that bfio looks ahead beyond the coming one.",
        lambda look_ahead: look_ahead.parameters.horizon,
    ),
    "evenstep_discount": Row(
        "Weight of a step of the look-ahead against the one before it.",
        lambda look_ahead: look_ahead.parameters.discount,
    ),
    "evenstep_tie_weight": Row(
        "Weight of bfio's quadratic term, per token.",
        lambda look_ahead: look_ahead.parameters.tie_weight,
    ),
    "evenstep_lead_tokens": Row(
        "How far below the others bfio leaves a worker that it can fill.",
        lambda look_ahead: look_ahead.parameters.lead_tokens,
    ),
    "evenstep_forecast_skill": Row(
        "Brier skill of what is known of coming ends: 1 for certainty, 0 for no better than their "
        "base rate.",
        lambda look_ahead: look_ahead.skill,
    ),
}

HISTOGRAMS: Mapping[str, HistogramRow] = {
    "evenstep_decision_seconds": HistogramRow(
        "How long a round takes to assign requests, the look-ahead included.",
        lambda stats: stats.decision_s,
    ),
    "evenstep_decision_candidates": HistogramRow(
        "Requests that waited when a round began.",
        lambda stats: stats.decision_candidates,
    ),
    "evenstep_decision_admitted": HistogramRow(
        "Requests that a round assigned.",
        lambda stats: stats.decision_admitted,
    ),
    "evenstep_decision_objective_tokens": HistogramRow(
        "What bfio's objective came to, in KV tokens, the weighted sum over its look-ahead.",
        lambda stats: stats.decision_objective,
    ),
    "evenstep_decision_moves": HistogramRow(
        "Changes whose cost bfio's search worked out in a round, of its budget (--solver-ms).",
        lambda stats: stats.decision_moves,
    ),
    "evenstep_pool_wait_seconds": HistogramRow(
        "How long a request waits in the router before it is given to a worker.",
        lambda stats: stats.pool_wait_s,
    ),
    "evenstep_service_seconds": HistogramRow(
        "From a request's being given to a worker to the first byte of its answer, or to the end "
        "of its prefill where another worker decodes.",
        lambda stats: stats.service_s,
    ),
    "evenstep_time_to_first_token_seconds": HistogramRow(
        "From a request's arrival at the router to the first byte of its answer.",
        lambda stats: stats.ttft_s,
    ),
    "evenstep_inter_token_latency_seconds": HistogramRow(
        "Between two tokens of a streamed answer, as they are passed on; tokens that come together "
        "count as one, and requests for several answers (n) do not count.",
        lambda stats: stats.tokens.itl_s,
    ),
    "evenstep_time_per_output_token_seconds": HistogramRow(
        "From a streamed answer's first token to its last, by the tokens after the first, one an "
        "event.",
        lambda stats: stats.tokens.tpot_s,
    ),
}

STEP_ROWS: Table[StepTotals] = {
    "evenstep_barrier_steps_total": Row(
        "Decode steps of the group; of workers that do not step together, those of the furthest.",
        lambda totals: totals.steps,
    ),
    "evenstep_contested_steps_total": Row(
        "Of evenstep_barrier_steps_total, those in which two workers or more had something to run.",
        lambda totals: totals.contested_steps,
    ),
    "evenstep_together_steps_total": Row(
        "Of evenstep_contested_steps_total, those that all of these made together. Where they are "
        "less than 90 % of them there is no barrier: no worker waits for another.",
        lambda totals: totals.together_steps,
    ),
    "evenstep_imbalance_tokens_total": Row(
        "Sum over steps of workers x highest load - sum of loads: KV tokens' worth of waiting at "
        "the barrier; divide by evenstep_barrier_steps_total for the average imbalance.",
        lambda totals: totals.imbalance_tokens,
    ),
    "evenstep_max_load_tokens_total": Row(
        "Sum over steps of the most loaded worker's resident KV tokens.",
        lambda totals: totals.max_load_tokens,
    ),
    "evenstep_load_tokens_total": Row(
        "Sum over steps and workers of resident KV tokens.",
        lambda totals: totals.load_tokens,
    ),
    "evenstep_worker_steps_total": Row(
        "Sum over steps of the number of workers that took part.",
        lambda totals: totals.worker_steps,
    ),
    "evenstep_step_seconds_total": Row(
        "Time that steps took, the slowest worker's where they differ.",
        lambda totals: totals.step_s,
    ),
    "evenstep_energy_joules_total": Row(
        "Energy in steps, of workers whose power is known: those with evenstep_worker_power_watts.",
        lambda totals: totals.energy_j,
    ),
    "evenstep_output_tokens_total": Row(
        "Tokens that workers decoded; a first token that comes with its prefill is not among them.",
        lambda totals: totals.output_tokens,
    ),
    "evenstep_prompt_tokens_total": Row(
        "Prompt tokens that workers computed in steps.",
        lambda totals: totals.prompt_tokens,
    ),
    "evenstep_prompt_seconds_total": Row(
        "Time that computing prompts has added to steps at a barrier: in each step the prompt "
        "tokens of the worker with the most of them, by the cost of a step. Nothing is added "
        "while that is not known.",
        lambda totals: totals.prompt_s,
    ),
    "evenstep_free_slot_steps_total": Row(
        "Sum over steps and workers of slots in which nothing ran.",
        lambda totals: totals.free_slots,
    ),
    "evenstep_entered_requests_total": Row(
        "Engine requests that had their first step.",
        lambda totals: totals.entered,
    ),
    "evenstep_waiting_seconds_total": Row(
        "Time that workers waited in steps for the slowest of them, summed over workers: as "
        "engines have timed it, else modelled by what each had in the step and the step's cost. "
        "Divide by evenstep_timed_worker_seconds_total for the idle share.",
        lambda totals: totals.waiting_s,
    ),
    "evenstep_timed_worker_seconds_total": Row(
        "Time of steps, summed over workers, of which it is known how long workers waited in them.",
        lambda totals: totals.timed_s,
    ),
    "evenstep_measured_worker_seconds_total": Row(
        "Of evenstep_timed_worker_seconds_total, where engines have timed themselves how long they "
        "waited; the rest is modelled.",
        lambda totals: totals.measured_s,
    ),
}
