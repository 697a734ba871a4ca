"""Table of the metrics of groups: name, help text and reading function.

``metrics.workers`` has the metrics of workers and of the sources of their states.
"""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from router.core.energy.levels import STATES
from router.core.forecast.look_ahead import LookAhead
from router.core.rounds.decider import Decider
from router.core.state.barrier import StepTotals
from router.core.state.group import Group
from router.core.targets import Verdict
from router.core.types import ADMISSION_ENDED, Outcome, StateSource
from router.metrics.prefixes import PREFIX_ROWS
from router.metrics.rows import HistogramRow, Row
from router.metrics.step_cost import STEP_COST_ROWS


def _sources(group: Group) -> dict[str, float]:
    counts = Counter(worker.source for worker in group.live_workers())
    return {source.value: counts[source] for source in StateSource}


def _admissions(group: Group) -> dict[str, float]:
    feeds = [worker.feed for worker in group.live_workers() if worker.feed is not None]
    counts = Counter(feed.admission or "engine" for feed in feeds)
    return {
        admission: counts[admission] for admission in sorted({*counts, ADMISSION_ENDED, "engine"})
    }


def _prompt_budgets(group: Group) -> dict[str, float]:
    feeds = [worker.feed for worker in group.live_workers() if worker.feed is not None]
    kept = [feed.prompt_budget for feed in feeds if feed.prompt_budget is not None]
    told = group.prompt_budget.tokens if group.prompt_budget and kept else None
    found = {"router": told, "engines": min(kept, default=None)}
    return {by: tokens for by, tokens in found.items() if tokens is not None}


def _fitted_watts(group: Group) -> dict[str, float]:
    found = group.level_fit.fitted()
    return {} if found is None else dict(zip(STATES, found.watts, strict=False))


DECIDER_ROWS: Sequence[Row[Decider]] = (
    Row(
        "evenstep_requests_total",
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
    Row(
        "evenstep_targets_total",
        "Requests with targets by whether they met them, or why not: refused at once, as late; "
        "queue, late for the wait in the router, or turned away there; prompt, the way from the "
        "worker to the first token; tokens, the time for each further one; failed, an error.",
        lambda decider: {each: decider.stats.verdicts[each] for each in get_args(Verdict)},
        "verdict",
    ),
    Row(
        "evenstep_pool_requests",
        "Requests that wait for a free slot; a common queue counts at one group that is up.",
        lambda decider: decider.waiting,
    ),
    Row(
        "evenstep_pool_tokens",
        "Prompt tokens of evenstep_pool_requests; an estimate where the prompt is text.",
        lambda decider: sum(r.prompt_tokens for r in decider.pool) if decider.waiting else 0,
    ),
    Row(
        "evenstep_pool_limit_requests",
        "Requests that may wait in the router (--pool-size); further ones are rejected.",
        lambda decider: decider.pool.pool_size,
    ),
    Row(
        "evenstep_requests_assigned_total",
        "Times that a request was given to a worker, repeated attempts included.",
        lambda decider: decider.stats.assigned,
    ),
    Row(
        "evenstep_requests_beside_total",
        "Times that a request beside the pool (embeddings, scores, audio, tokenizing) was sent to "
        "a worker.",
        lambda decider: decider.stats.beside,
    ),
    Row(
        "evenstep_requests_returned_total",
        "Times that a request came back from a failing worker before its first byte.",
        lambda decider: decider.stats.returned,
    ),
    Row(
        "evenstep_requests_unreturned_total",
        "Errors of workers, and times that they were too slow, that clients were told though "
        "another worker could have been asked: more than --retry-budget allows.",
        lambda decider: decider.stats.unreturned,
    ),
    Row(
        "evenstep_worker_ejections_total",
        "Times that a worker was given nothing for a while, since it had failed requests.",
        lambda decider: decider.group.ejections,
    ),
    Row(
        "evenstep_requests_estimated_total",
        "Times that a request was given to a worker though no engine had counted its prompt yet.",
        lambda decider: decider.stats.estimated,
    ),
    Row(
        "evenstep_rounds_total",
        "Rounds in which the policy assigned waiting requests to workers.",
        lambda decider: decider.stats.rounds,
    ),
    Row(
        "evenstep_rounds_held_total",
        "Rounds whose requests waited for more: their prompts make all workers wait.",
        lambda decider: decider.stats.held_rounds,
    ),
    Row(
        "evenstep_policy_errors_total",
        "Rounds in which the policy failed and a simpler one stood in.",
        lambda decider: decider.stats.policy_errors,
    ),
    Row(
        "evenstep_bytes_per_token",
        "Bytes of prompt text that are taken for a token, learned from what engines have counted.",
        lambda decider: decider.group.token_rate.bytes_per_token,
    ),
    Row(
        "evenstep_overcommit_requests",
        "Requests that may queue in an engine before a slot is free there.",
        lambda decider: decider.overcommit.requests,
    ),
    Row(
        "evenstep_slot_bubble_steps",
        "Steps from a slot's becoming free to its next request's first step while others waited, "
        "on average over the last few hundred steps.",
        lambda decider: decider.overcommit.bubble_steps,
    ),
)

GROUP_ROWS: Sequence[Row[Group]] = (
    Row(
        "evenstep_workers",
        "Workers that may be given requests, by where their state is known from: their snapshots, "
        "else their engine's own metrics, else this router's counts alone.",
        _sources,
        "source",
    ),
    Row(
        "evenstep_admission_workers",
        "Workers whose snapshots tell who decides on admission there: a policy of the plug-in; "
        "engine: their engine alone; ended: since a fault of the plug-in's policy, its engine "
        "alone.",
        _admissions,
        "admission",
    ),
    Row(
        "evenstep_prompt_budget_tokens",
        "Most prompt tokens of a step (--prompt-budget): what the router tells engines that take "
        "it, and the least that engines kept to in their last steps, 0 where one had no bound.",
        _prompt_budgets,
        "by",
    ),
    Row(
        "evenstep_prompt_window_steps",
        "Steps of which the router lets one compute prompts; 1: each may.",
        lambda group: group.prompt_budget.every if group.prompt_budget else 1,
    ),
    Row(
        "evenstep_workers_draining",
        "Workers that are given no more requests since their operator drains or removes them.",
        lambda group: sum(worker.draining for worker in group.workers.values()),
    ),
    Row(
        "evenstep_snapshot_gaps_total",
        "State messages of workers that were lost on the way.",
        lambda group: group.gaps,
    ),
    Row(
        "evenstep_preemptions_total",
        "Times that engines took a running request's KV away, as memory was full, and computed it "
        "again later; of workers that tell snapshots.",
        lambda group: group.preemptions,
    ),
    *STEP_COST_ROWS,
    *PREFIX_ROWS,
    Row(
        "evenstep_useful_energy_joules_total",
        "Energy that workers spent on computing, by the calibrated --power-levels.",
        lambda group: group.joules.useful_j,
    ),
    Row(
        "evenstep_waiting_energy_joules_total",
        "Energy that workers spent on waiting in steps for the slowest of them, by the calibrated "
        "--power-levels and the step's cost: what balancing can save.",
        lambda group: group.joules.waiting_j,
    ),
    Row(
        "evenstep_idle_energy_joules_total",
        "Energy that workers spent between steps, with nothing to run.",
        lambda group: group.joules.idle_j,
    ),
    Row(
        "evenstep_undivided_energy_joules_total",
        "Energy of steps that is known only as a whole: no --power-levels, or not known how long "
        "workers waited; and what a worker used while nothing was heard of it. With the other "
        "three it is all that the workers' meters have counted.",
        lambda group: group.joules.unknown_j,
    ),
    Row(
        "evenstep_metered_seconds_total",
        "What metered workers have done, summed over workers: idle between steps, waiting in steps "
        "for the fullest, computing; unknown of steps of which it is not known how long they "
        "waited.",
        lambda group: {
            **dict(zip(STATES, group.level_fit.seconds, strict=True)),
            "unknown": group.level_fit.unknown_s,
        },
        "state",
    ),
    Row(
        "evenstep_fitted_power_watts",
        "Power of a worker's GPUs in each of these states, fitted to what the meters have counted; "
        "evenstep calibrate makes --power-levels of it. No value while the meters do not tell.",
        _fitted_watts,
        "state",
    ),
)

PREFILL_ROWS: Sequence[Row[Decider]] = (
    Row(
        "evenstep_prefills_passed_total",
        "Prompts that decode workers computed, since that was sooner than at a prefill worker.",
        lambda decider: decider.stats.passed,
    ),
    Row(
        "evenstep_prefill_fallbacks_total",
        "Requests that decode workers did whole, since no prefill worker computed their prompts.",
        lambda decider: decider.stats.fallbacks,
    ),
    Row(
        "evenstep_prefills_repeated_total",
        "Prompts that were computed again, since their KV was gone or could not be fetched.",
        lambda decider: decider.stats.repeated_prefills,
    ),
    Row(
        "evenstep_prefills_lost_total",
        "Prompts that are computed twice: a prefill engine did not say where their KV lies.",
        lambda decider: decider.stats.lost_prefills,
    ),
    Row(
        "evenstep_kv_expired_tokens_total",
        "KV tokens that prefill workers kept until they expired, since nobody fetched them.",
        lambda decider: decider.stats.expired_kv_tokens,
    ),
    Row(
        "evenstep_kv_kept_tokens",
        "KV tokens that prefill workers keep, since nobody has fetched them yet.",
        lambda decider: sum(worker.kept_tokens for worker in decider.group.prefill_workers),
    ),
)

LOOK_AHEAD_ROWS: Sequence[Row[LookAhead]] = (
    Row(
        "evenstep_horizon_steps",
        "Steps that bfio looks ahead beyond the coming one.",
        lambda look_ahead: look_ahead.parameters.horizon,
    ),
    Row(
        "evenstep_discount",
        "Weight of a step of the look-ahead against the one before it.",
        lambda look_ahead: look_ahead.parameters.discount,
    ),
    Row(
        "evenstep_tie_weight",
        "Weight of bfio's quadratic term, per token.",
        lambda look_ahead: look_ahead.parameters.tie_weight,
    ),
    Row(
        "evenstep_lead_tokens",
        "How far below the others bfio leaves a worker that it can fill.",
        lambda look_ahead: look_ahead.parameters.lead_tokens,
    ),
    Row(
        "evenstep_forecast_skill",
        "Brier skill of what is known of coming ends: 1 for certainty, 0 for no better than their "
        "base rate.",
        lambda look_ahead: look_ahead.skill,
    ),
)

HISTOGRAMS: Sequence[HistogramRow] = (
    HistogramRow(
        "evenstep_decision_seconds",
        "How long a round takes to assign requests, the look-ahead included.",
        lambda stats: stats.decision_s,
    ),
    HistogramRow(
        "evenstep_decision_candidates",
        "Requests that waited when a round began.",
        lambda stats: stats.decision_candidates,
    ),
    HistogramRow(
        "evenstep_decision_admitted",
        "Requests that a round assigned.",
        lambda stats: stats.decision_admitted,
    ),
    HistogramRow(
        "evenstep_decision_objective_tokens",
        "What bfio's objective came to, in KV tokens, the weighted sum over its look-ahead.",
        lambda stats: stats.decision_objective,
    ),
    HistogramRow(
        "evenstep_decision_moves",
        "Changes whose cost bfio's search worked out in a round, of its budget (--solver-ms).",
        lambda stats: stats.decision_moves,
    ),
    HistogramRow(
        "evenstep_pool_wait_seconds",
        "How long a request waits in the router before it is given to a worker.",
        lambda stats: stats.pool_wait_s,
    ),
    HistogramRow(
        "evenstep_service_seconds",
        "From a request's being given to a worker to the first byte of its answer, or to the end "
        "of its prefill where another worker decodes.",
        lambda stats: stats.service_s,
    ),
    HistogramRow(
        "evenstep_time_to_first_token_seconds",
        "From a request's arrival at the router to the first byte of its answer.",
        lambda stats: stats.ttft_s,
    ),
    HistogramRow(
        "evenstep_inter_token_latency_seconds",
        "Between two tokens of a streamed answer, as they are passed on; tokens that come together "
        "count as one, and requests for several answers (n) do not count.",
        lambda stats: stats.tokens.itl_s,
    ),
    HistogramRow(
        "evenstep_time_per_output_token_seconds",
        "From a streamed answer's first token to its last, by the tokens after the first, one an "
        "event.",
        lambda stats: stats.tokens.tpot_s,
    ),
)

STEP_ROWS: Sequence[Row[StepTotals]] = (
    Row(
        "evenstep_barrier_steps_total",
        "Decode steps of the group; of workers that do not step together, those of the furthest.",
        lambda totals: totals.steps,
    ),
    Row(
        "evenstep_contested_steps_total",
        "Of evenstep_barrier_steps_total, those in which two workers or more had something to run.",
        lambda totals: totals.contested_steps,
    ),
    Row(
        "evenstep_together_steps_total",
        "Of evenstep_contested_steps_total, those that all of these made together. Where they are "
        "less than 90 % of them there is no barrier: no worker waits for another.",
        lambda totals: totals.together_steps,
    ),
    Row(
        "evenstep_imbalance_tokens_total",
        "Sum over steps of workers x highest load - sum of loads: KV tokens' worth of waiting at "
        "the barrier; divide by evenstep_barrier_steps_total for the average imbalance.",
        lambda totals: totals.imbalance_tokens,
    ),
    Row(
        "evenstep_max_load_tokens_total",
        "Sum over steps of the most loaded worker's resident KV tokens.",
        lambda totals: totals.max_load_tokens,
    ),
    Row(
        "evenstep_load_tokens_total",
        "Sum over steps and workers of resident KV tokens.",
        lambda totals: totals.load_tokens,
    ),
    Row(
        "evenstep_worker_steps_total",
        "Sum over steps of the number of workers that took part.",
        lambda totals: totals.worker_steps,
    ),
    Row(
        "evenstep_step_seconds_total",
        "Time that steps took, the slowest worker's where they differ.",
        lambda totals: totals.step_s,
    ),
    Row(
        "evenstep_energy_joules_total",
        "Energy in steps, of workers whose power is known: those with evenstep_worker_power_watts.",
        lambda totals: totals.energy_j,
    ),
    Row(
        "evenstep_output_tokens_total",
        "Tokens that workers decoded; a first token that comes with its prefill is not among them.",
        lambda totals: totals.output_tokens,
    ),
    Row(
        "evenstep_prompt_tokens_total",
        "Prompt tokens that workers computed in steps.",
        lambda totals: totals.prompt_tokens,
    ),
    Row(
        "evenstep_prompt_seconds_total",
        "Time that computing prompts has added to steps at a barrier: in each step the prompt "
        "tokens of the worker with the most of them, by the cost of a step. Nothing is added "
        "while that is not known.",
        lambda totals: totals.prompt_s,
    ),
    Row(
        "evenstep_free_slot_steps_total",
        "Sum over steps and workers of slots in which nothing ran.",
        lambda totals: totals.free_slots,
    ),
    Row(
        "evenstep_entered_requests_total",
        "Engine requests that had their first step.",
        lambda totals: totals.entered,
    ),
    Row(
        "evenstep_waiting_seconds_total",
        "Time that workers waited in steps for the slowest of them, summed over workers: as "
        "engines have timed it, else modelled by what each had in the step and the step's cost. "
        "Divide by evenstep_timed_worker_seconds_total for the idle share.",
        lambda totals: totals.waiting_s,
    ),
    Row(
        "evenstep_timed_worker_seconds_total",
        "Time of steps, summed over workers, of which it is known how long workers waited in them.",
        lambda totals: totals.timed_s,
    ),
    Row(
        "evenstep_measured_worker_seconds_total",
        "Of evenstep_timed_worker_seconds_total, where engines have timed themselves how long they "
        "waited; the rest is modelled.",
        lambda totals: totals.measured_s,
    ),
)
