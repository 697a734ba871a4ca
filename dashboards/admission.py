"""Admission: waiting requests, the cost of full memory, and prompts computed elsewhere."""

from dashboards.panel import (
    ENGINE_LEGEND,
    GROUP,
    Board,
    Query,
    lines,
    of_group,
    of_worker,
    quantiles,
    rate,
    ratio,
    row,
    stacked,
)

QUEUES = row(
    "Waiting for a slot",
    lines(
        "Waiting in the router",
        "They are placed as soon as a slot is free; beyond the limit (--pool-size) further ones "
        "are rejected.",
        of_group("evenstep_pool_requests"),
        limit=of_group("evenstep_pool_limit_requests"),
    ),
    lines(
        "Prompt tokens that wait",
        "Of the requests that wait in the router.",
        of_group("evenstep_pool_tokens"),
    ),
    lines(
        "Wait in the router",
        "Until a request is given to a worker.",
        *quantiles("evenstep_pool_wait_seconds"),
        unit="s",
    ),
    stacked(
        "Turned away",
        "Per second: rejected since the queue was full, displaced from it by another key, expired "
        "in it, refused since their first token could not come in time, unserved since no worker "
        "was up.",
        rate(
            "evenstep_requests_total",
            "group, outcome",
            GROUP + ',outcome=~"rejected|displaced|expired|refused|unserved"',
        ),
        unit="reqps",
    ),
    lines(
        "Entered a batch",
        "Engine requests that had their first step, per second.",
        rate("evenstep_entered_requests_total"),
        unit="reqps",
    ),
    lines(
        "Empty slots in steps",
        "Slots in which nothing ran, per worker and step; apart for steps while requests waited in "
        "the router and while none did. Empty slots while requests wait are lost throughput, or "
        "memory that is full.",
        Query(
            ratio(
                "evenstep_free_slot_steps_total",
                "evenstep_worker_steps_total",
                "group, pool",
            ),
            "{{group}}, pool {{pool}}",
        ),
    ),
    lines(
        "Slot bubble (steps) and over-commit (requests)",
        "Steps from a slot's becoming free to its next request's first step while others waited, "
        "and how many requests may queue in an engine beforehand to shorten it.",
        Query(of_group("evenstep_slot_bubble_steps", "max"), "{{group}} bubble"),
        Query(of_group("evenstep_overcommit_requests", "max"), "{{group}} over-commit"),
    ),
)

KEYS = row(
    "API keys (--api-key-file)",
    stacked(
        "Slots of each key",
        "That its requests hold on the workers. While keys compete, each should have its share by "
        "weight, or all that it asks for if that is less.",
        "sum by (key) (evenstep_key_slots)",
    ),
    stacked(
        "Waiting in the router, by key",
        "Requests that wait for a slot. A key with many is asking for more than its share.",
        "sum by (key) (evenstep_key_pool_requests)",
    ),
    lines(
        "Requests of each key",
        "Under way, and per second those that were let in.",
        Query("sum by (key) (evenstep_key_requests)", "{{key}} under way"),
        Query(rate("evenstep_key_requests_total", "key", ""), "{{key}} per second"),
    ),
    lines(
        "Refused for their keys",
        "Per second: keys at their limits of concurrency or rate; no key, or one not known.",
        rate("evenstep_key_limited_total", "key, limit", ""),
        Query(rate("evenstep_unauthorized_requests_total", "", ""), "without a key"),
        unit="reqps",
    ),
)

MEMORY = row(
    "KV memory of engines (scrape their /metrics too)",
    lines(
        "KV memory in use",
        "Share of an engine's KV memory. At 100 % it evicts requests and computes them again.",
        Query("vllm:kv_cache_usage_perc", ENGINE_LEGEND),
        unit="percentunit",
    ),
    lines(
        "Preemptions",
        "Requests per second whose KV was thrown away since memory was full. More than a few a "
        "minute: use an admission policy (docs/admission.md).",
        Query("rate(vllm:num_preemptions_total[$__rate_interval])", ENGINE_LEGEND),
        unit="ops",
    ),
    lines(
        "Preemptions by snapshots",
        "The same by what the plug-in tells, of all workers of a group.",
        rate("evenstep_preemptions_total"),
        unit="ops",
    ),
    lines(
        "What workers would let in (KV tokens)",
        "Prompts that would still enter if nobody waited there: a worker at 0 keeps requests out, "
        "by its admission policy or since memory is full.",
        of_worker("evenstep_worker_admissible_kv_tokens"),
    ),
    stacked(
        "Who decides on admission",
        "Workers by the policy of their plug-in; engine: their engine alone. Ended: a fault has "
        "ended the policy, and the engine decides alone; its log says why.",
        of_group("evenstep_admission_workers", by="group, admission"),
    ),
    lines(
        "Prompt tokens of a step",
        "Most that the router tells engines (--prompt-budget), and the least that engines keep to; "
        "0 where one keeps to no such bound, as it takes none or a rank was not told. One of so "
        "many steps has prompts.",
        of_group("evenstep_prompt_budget_tokens", by="group, by"),
        steps=of_group("evenstep_prompt_window_steps"),
    ),
    lines(
        "Held at the engine's door",
        "Requests that an engine has and has not started: its admission policy, or full slots or "
        "memory.",
        Query("vllm:num_requests_waiting", ENGINE_LEGEND),
    ),
)

HAND_OFF = row(
    "Prompts that prefill workers compute (role=prefill)",
    lines(
        "KV kept for decode workers (tokens)",
        "Computed on prefill workers and not fetched yet. Rising: decode workers are full.",
        of_group("evenstep_kv_kept_tokens"),
    ),
    lines(
        "KV that nobody fetched (tokens per second)",
        "Prefill work for nothing: it expired before a decode worker fetched it.",
        rate("evenstep_kv_expired_tokens_total"),
    ),
    lines(
        "Prompts that take another way",
        "Per second: past the prefill workers, since a decode worker was sooner; done whole, since "
        "no prefill worker could; computed again, since their KV was gone; computed twice, since "
        "the prefill engine did not say where their KV lies.",
        past=rate("evenstep_prefills_passed_total"),
        done_whole=rate("evenstep_prefill_fallbacks_total"),
        again=rate("evenstep_prefills_repeated_total"),
        twice=rate("evenstep_prefills_lost_total"),
        unit="reqps",
    ),
)

ADMISSION = Board(
    "admission",
    "Admission and hand-off",
    "Where do requests wait, is KV memory short, and do hand-offs from prefill workers succeed?",
    (QUEUES, KEYS, MEMORY, HAND_OFF),
)
