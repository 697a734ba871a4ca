"""Workers one by one: their loads, and how well the router knows them."""

from dashboards.panel import (
    ENGINE_LEGEND,
    WORKER,
    WORKER_LEGEND,
    Board,
    Query,
    lines,
    of_worker,
    rate,
    row,
    stacked,
)

# A worker with a closed breaker exports no value.
_EJECTED = f"evenstep_worker_breaker{{{WORKER}}} or 0 * evenstep_worker_up{{{WORKER}}}"

LOADS = row(
    "What workers carry",
    lines(
        "Load of each worker (KV tokens)",
        "Resident KV tokens, those on their way included. One line far above the others: where "
        "workers step together, the others wait for it in every step.",
        of_worker("evenstep_worker_load_tokens"),
        width=16,
    ),
    lines(
        "Up",
        "On while the worker may be given requests.",
        of_worker("evenstep_worker_up"),
        unit="bool_on_off",
    ),
    lines(
        "Ejected",
        "2 while a worker is given nothing, since it has failed requests; 1 while a few trials "
        "decide whether it comes back. Look at its engine's log: it answers its health checks.",
        Query(_EJECTED, WORKER_LEGEND),
    ),
    lines(
        "Requests on each worker",
        "Engine requests that run there, are queued there, or are on their way.",
        of_worker("evenstep_worker_requests"),
    ),
    lines(
        "Of them this router's",
        "Requests that this router sent and that have not ended.",
        of_worker("evenstep_worker_in_flight"),
    ),
    lines(
        "Of them surely others'",
        "Requests that somebody else has sent past the router, by the engine's own metrics. No "
        "line where snapshots tell all of them. Above 0: send that traffic through the router too.",
        of_worker("evenstep_worker_foreign_requests"),
    ),
    lines(
        "Slots",
        "Requests that a worker runs at once (vLLM's max-num-seqs).",
        of_worker("evenstep_worker_slots"),
    ),
    lines(
        "Free slots",
        "Requests that the worker could start at its next step. Free slots here while requests "
        "wait: memory or admission keeps them out.",
        Query(
            f"clamp_min(evenstep_worker_slots{{{WORKER}}} "
            f"- evenstep_worker_requests{{{WORKER}}}, 0)",
            WORKER_LEGEND,
        ),
    ),
    lines(
        "Service rate per slot",
        "Requests that each slot completes per second: service_rate at first, then what the worker "
        "has completed. jffc, sed and sa_jsq go by it. No line while nothing is known.",
        of_worker("evenstep_worker_service_rate"),
        unit="reqps",
    ),
    lines(
        "Power",
        "What the worker last reported; no line where engines do not report power.",
        of_worker("evenstep_worker_power_watts"),
        unit="watt",
    ),
)

KNOWN = row(
    "How well the router knows them",
    lines(
        "Age of the last snapshot",
        "Time since a worker last told its state. Beyond --snapshot-stale (3 s) the router goes by "
        "the engine's metrics instead, which is less exact.",
        of_worker("evenstep_worker_snapshot_age_seconds"),
        unit="s",
    ),
    stacked(
        "Where states are known from",
        "Workers by source: their snapshots (exact), else their engine's own metrics, else this "
        "router's counts alone.",
        f"sum by (group, source) (evenstep_worker_state_source{{{WORKER}}})",
    ),
    lines(
        "Blocks in the prefix cache",
        "Blocks of prompts and answers that a worker has told that its cache holds. No line where "
        "it does not tell, which the log of its plug-in explains.",
        of_worker("evenstep_worker_prefix_blocks"),
    ),
    lines(
        "Lost messages",
        "State messages that were lost on the way, per second; the router then asks for the whole "
        "state.",
        rate("evenstep_snapshot_gaps_total"),
        unit="ops",
    ),
    lines(
        "State messages",
        "Per second, of all workers: understood, and asked for as a whole.",
        Query(rate("evenstep_snapshots_received_total", "", ""), "understood"),
        Query(rate("evenstep_snapshot_full_requests_total", "", ""), "whole states asked"),
        unit="ops",
    ),
    lines(
        "Size of state messages",
        "Bytes per second, of all workers.",
        Query(rate("evenstep_snapshot_received_bytes_total", "", ""), "received"),
        unit="binBps",
    ),
    lines(
        "Troubles with state messages",
        "Per second: not understood (another version?), of a stream that is another worker's, "
        "CURVE keys not accepted, errors in the router. All should be 0; the router's log says "
        "more.",
        Query(rate("evenstep_snapshots_broken_total", "", ""), "not understood"),
        Query(rate("evenstep_snapshots_refused_total", "", ""), "another worker's"),
        Query(rate("evenstep_snapshot_handshakes_failed_total", "", ""), "keys refused"),
        Query(rate("evenstep_snapshot_failures_total", "", ""), "errors"),
        unit="ops",
    ),
    lines(
        "Messages of power agents",
        "Per second, of evenstep agent on hosts whose engines do not tell their power: understood; "
        "not understood, or not clear of which worker; errors in the router. All but the first "
        "should be 0.",
        Query(rate("evenstep_agent_messages_received_total", "", ""), "understood"),
        Query(rate("evenstep_agent_messages_broken_total", "", ""), "not understood"),
        Query(rate("evenstep_agent_failures_total", "", ""), "errors"),
        unit="ops",
    ),
    lines(
        "Health checks",
        "Per second: all, those without a timely success, and those that led to an error in the "
        "router.",
        Query(rate("evenstep_health_checks_total", "", ""), "all"),
        Query(rate("evenstep_health_checks_failed_total", "", ""), "failed"),
        Query(rate("evenstep_health_check_errors_total", "", ""), "errors"),
        unit="ops",
    ),
    lines(
        "Readings of engines' metrics",
        "Per second, only while snapshots do not come; failed ones told nothing.",
        Query(rate("evenstep_engine_metrics_reads_total", "", ""), "all"),
        Query(rate("evenstep_engine_metrics_reads_failed_total", "", ""), "failed"),
        unit="ops",
    ),
    lines(
        "Messages with KV events",
        "Per second, of engines without the plug-in; those not understood should be 0.",
        Query(rate("evenstep_kv_event_messages_received_total", "", ""), "understood"),
        Query(rate("evenstep_kv_event_messages_broken_total", "", ""), "not understood"),
        unit="ops",
    ),
)

ENGINES = row(
    "What engines say themselves (scrape their /metrics too)",
    lines(
        "Running in the engine",
        "vLLM's own count of requests in its batch.",
        Query("vllm:num_requests_running", ENGINE_LEGEND),
    ),
    lines(
        "Waiting in the engine",
        "vLLM's own count of requests that it has not started; more than a few: they wait where no "
        "router can place them any more.",
        Query("vllm:num_requests_waiting", ENGINE_LEGEND),
    ),
    lines(
        "Tokens generated",
        "Per second, by engine.",
        Query("rate(vllm:generation_tokens_total[$__rate_interval])", ENGINE_LEGEND),
    ),
)

WORKERS = Board(
    "worker",
    "Workers",
    "What does each worker carry, and where does the router know it from?",
    (LOADS, KNOWN, ENGINES),
)
