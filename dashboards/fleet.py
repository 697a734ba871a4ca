"""The fleet: is it up, is it balanced, how long do requests take?"""

from dashboards.panel import (
    GROUP,
    Board,
    Query,
    lines,
    mean,
    of_group,
    quantiles,
    rate,
    ratio,
    row,
    stacked,
    stat,
)

_IMBALANCE = "evenstep_imbalance_tokens_total"
_TOGETHER = ratio("evenstep_together_steps_total", "evenstep_contested_steps_total")
# Workers that do not step together lose nothing.
_LOST = (
    f"{rate(_IMBALANCE)} / ({rate(_IMBALANCE)} + {rate('evenstep_load_tokens_total')}) "
    f"unless {_TOGETHER} < 0.9"
)

# Engines export metrics of their processes, too.
_ROUTERS = "and on (job, instance) evenstep_build_info"

GLANCE = row(
    "At a glance",
    stat(
        "Workers up",
        "Workers whose engines can be used. Fewer than you run: see Workers.",
        of_group("evenstep_worker_up"),
    ),
    stat(
        "Requests waiting",
        "Requests that wait in the router for a free slot. Above 0 all the time: the fleet is "
        "full.",
        of_group("evenstep_pool_requests"),
    ),
    stat(
        "Completed",
        "Requests that were answered to the end; in a group of prefill workers, prompts that were "
        "handed over.",
        rate("evenstep_requests_total", where=GROUP + ',outcome="completed"'),
        unit="reqps",
    ),
    stat(
        "Output tokens per second",
        "Tokens that workers decode, by what engines report after each step.",
        rate("evenstep_output_tokens_total"),
    ),
    stat(
        "Lost at the barrier",
        "Share of the time spent on KV tokens in which workers wait for the most loaded one: G max "
        "L - sum L over G max L. The fixed time of a step is not in it, so the share of the whole "
        "step is lower. 0 is even; what a better policy could win is at most this. No value where "
        "workers do not step together: none waits for another.",
        _LOST,
        unit="percentunit",
    ),
    stat(
        "Version",
        "Which evenstep runs; more than one while you roll out.",
        "count by (version) (evenstep_build_info)",
    ),
)

BALANCE = row(
    "Balance",
    lines(
        "Imbalance per step (KV tokens)",
        "Workers x highest load - sum of loads, on average over the steps that all workers of a "
        "group: how many KV tokens' worth of time is waited away per step, where workers step "
        "together. Apart for steps while requests waited in the router and while none did.",
        Query(
            ratio(_IMBALANCE, "evenstep_barrier_steps_total", "group, pool"),
            "{{group}}, pool {{pool}}",
        ),
    ),
    lines(
        "Lost at the barrier",
        "Share of the time spent on KV tokens in which workers wait for the most loaded one. No "
        "line where they do not step together.",
        _LOST,
        unit="percentunit",
    ),
    lines(
        "Steps made together",
        "Of the steps in which two workers or more had something to run, those that all of these "
        "made together. Below 90 % there is no barrier, and none waits for another.",
        _TOGETHER,
        unit="percentunit",
    ),
    lines(
        "What a step costs",
        "As the group's steps have taught: in any case (step), and for each KV token, request and "
        "computed prompt token of its slowest worker, with the ends of the 95 % interval. No line "
        "of what they do not tell.",
        Query("evenstep_step_cost_seconds{" + GROUP + "}", "{{group}} {{term}}"),
        Query("evenstep_step_cost_low_seconds{" + GROUP + "}", "{{group}} {{term}} at least"),
        Query("evenstep_step_cost_high_seconds{" + GROUP + "}", "{{group}} {{term}} at most"),
        unit="s",
    ),
    lines(
        "How well steps are predicted",
        "Median error of predicting a step before it was learned from, as a share of the step, and "
        "the share of how steps vary that the four costs do not explain.",
        Query("evenstep_step_cost_error_ratio{" + GROUP + "}", "{{group}} {{steps}}"),
        not_explained="1 - evenstep_step_cost_explained_ratio{" + GROUP + "}",
        unit="percentunit",
    ),
    lines(
        "Prompts in steps",
        "Share of the time of steps that computing prompts has added to them, by the learned cost "
        "of a step: at a barrier all wait for the worker with the most prompt tokens. What cached "
        "prefixes save is seen on the dashboard of decisions.",
        ratio("evenstep_prompt_seconds_total", "evenstep_step_seconds_total"),
        unit="percentunit",
    ),
    lines(
        "Prompt tokens computed per second",
        "In steps, by all workers; without those that prefix caches had.",
        rate("evenstep_prompt_tokens_total"),
    ),
    lines(
        "Load of workers (KV tokens)",
        "Resident KV tokens: of the most loaded worker, on average, of the least loaded one. Where "
        "workers step together the first alone sets the time of a step.",
        highest=of_group("evenstep_worker_load_tokens", "max"),
        average=of_group("evenstep_worker_load_tokens", "avg"),
        lowest=of_group("evenstep_worker_load_tokens", "min"),
    ),
    lines(
        "Load in steps (KV tokens)",
        "The same, exactly as it was in the steps: the highest load, and the average one.",
        highest=ratio("evenstep_max_load_tokens_total", "evenstep_barrier_steps_total"),
        average=ratio("evenstep_load_tokens_total", "evenstep_worker_steps_total"),
    ),
    lines(
        "Time of a step",
        "Average over barrier steps, the slowest worker's.",
        ratio("evenstep_step_seconds_total", "evenstep_barrier_steps_total"),
        unit="s",
    ),
    lines(
        "Steps per second",
        "Decode steps of the group; where workers do not step together, of the furthest one.",
        rate("evenstep_barrier_steps_total"),
        unit="ops",
    ),
)

REQUESTS = row(
    "Requests",
    stacked(
        "How requests end",
        "Completed; aborted by the client; failed in the engine; expired in the queue; rejected "
        "since the queue was full; unserved since no worker was up.",
        rate("evenstep_requests_total", "group, outcome"),
        unit="reqps",
    ),
    stacked(
        "Targets met and missed",
        "Requests that say how soon their tokens are wanted: met is the goodput. Missed, by cause: "
        "refused at once; the wait in the router (queue); from the worker to the first token "
        "(prompt); the time for each further token (tokens); an error (failed).",
        rate("evenstep_targets_total", "group, verdict"),
        unit="reqps",
    ),
    lines(
        "Requests waiting",
        "Requests that wait in the router for a free slot.",
        of_group("evenstep_pool_requests"),
    ),
    lines(
        "Time to first token",
        "From arrival at the router to the first byte of the answer.",
        *quantiles("evenstep_time_to_first_token_seconds"),
        unit="s",
    ),
    lines(
        "Wait in the router",
        "Until a request is given to a worker; part of the time to first token.",
        *quantiles("evenstep_pool_wait_seconds"),
        unit="s",
    ),
    lines(
        "Wait in the engine",
        "From being given to a worker to the first byte (or to the end of the prefill where "
        "another worker decodes); the rest of the time to first token.",
        *quantiles("evenstep_service_seconds"),
        unit="s",
    ),
    lines(
        "Time between tokens",
        "Between two tokens of a streamed answer, as the router passes them on: a step of the "
        "engine, and what holds it up.",
        *quantiles("evenstep_inter_token_latency_seconds"),
        unit="s",
    ),
    lines(
        "Time per output token",
        "The same on average over a streamed answer, from its first token to its last.",
        *quantiles("evenstep_time_per_output_token_seconds"),
        unit="s",
    ),
    lines(
        "Average waits",
        "The averages of the three.",
        first_token=mean("evenstep_time_to_first_token_seconds"),
        in_the_router=mean("evenstep_pool_wait_seconds"),
        in_the_engine=mean("evenstep_service_seconds"),
        unit="s",
    ),
    stacked(
        "How workers' states are known",
        "Workers that are up: by their snapshots (exact), else by their engine's own metrics, else "
        "by this router's counts alone, which is the least even.",
        of_group("evenstep_workers", by="group, source"),
    ),
    lines(
        "Given to workers, and given back",
        "Times that a request was given to a worker, and that it came back before its first byte "
        "since the worker failed; it is then given to another one.",
        Query(rate("evenstep_requests_assigned_total"), "{{group}} given"),
        Query(rate("evenstep_requests_beside_total"), "{{group}} beside the pool"),
        Query(rate("evenstep_requests_returned_total"), "{{group}} came back"),
        Query(rate("evenstep_requests_unreturned_total"), "{{group}} passed on, failed"),
        unit="reqps",
    ),
    lines(
        "Workers ejected",
        "Times that a worker was given nothing for a while, since it had failed requests. Workers "
        "one by one: the panel Ejected of the worker dashboard.",
        rate("evenstep_worker_ejections_total"),
        unit="ops",
    ),
    lines(
        "Workers drained",
        "Workers that are given no more requests since their operator drains or removes them; "
        "those whose engines still answer count as up.",
        of_group("evenstep_workers_draining"),
    ),
)

ROUTER = row(
    "The router itself",
    lines(
        "CPU of the router",
        "Seconds of CPU per second; the router uses one core, so near 1 it is the bottleneck.",
        Query(f"rate(process_cpu_seconds_total[$__rate_interval]) {_ROUTERS}", "{{instance}}"),
        unit="percentunit",
    ),
    lines(
        "Memory of the router",
        "Resident memory of its process.",
        Query(f"process_resident_memory_bytes {_ROUTERS}", "{{instance}}"),
        unit="bytes",
    ),
    lines(
        "Connections of clients",
        "Open ones; at --max-connections further ones are answered 503.",
        Query(f"evenstep_http_connections {_ROUTERS}", "{{instance}}"),
    ),
    lines(
        "Replica that decides",
        "1 for the one that holds the lock (--replica-lock), and how often in ten minutes one took "
        "over or had no answer from the lock.",
        Query(f"evenstep_replica_decides {_ROUTERS}", "{{instance}}"),
        Query(
            f"increase(evenstep_replica_takeovers_total[10m]) {_ROUTERS}", "{{instance}} took over"
        ),
        Query(
            f"increase(evenstep_replica_lock_failures_total[10m]) {_ROUTERS}",
            "{{instance}} no answer",
        ),
    ),
    lines(
        "Requests at gateways",
        "Those that a gateway was told where to send and that have not ended (evenstep pick).",
        Query(f"evenstep_picks {_ROUTERS}", "{{instance}}"),
    ),
    lines(
        "Ends at gateways",
        "Requests that end in a second, by who told it; and those that a gateway sent elsewhere.",
        rate("evenstep_picks_ended_total", "by", ""),
        Query(rate("evenstep_picks_moved_total", "", ""), "sent elsewhere"),
    ),
    lines(
        "Requests refused as a whole",
        "By status: malformed, too large (413, 414, 431) or too slow ones (408), and connections "
        "beyond the limit (503). None of them reaches a worker.",
        rate("evenstep_http_refused_total", "status", ""),
        unit="reqps",
    ),
)

FLEET = Board(
    "fleet",
    "Fleet",
    "Is every worker up, do they carry the same load, and how long do requests take? Begin here.",
    (GLANCE, BALANCE, REQUESTS, ROUTER),
)
