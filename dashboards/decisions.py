"""Decisions: how the policy decides, how long it takes, and its inputs."""

from dashboards.panel import Board, Panel, lines, mean, of_group, quantiles, rate, ratio, row


def _parameter(title: str, text: str, name: str) -> Panel:
    return lines(title, text, of_group(name, "max"), width=6)


ROUNDS = row(
    "Rounds",
    lines(
        "Time of a decision",
        "How long a round takes to assign requests, the look-ahead included. Above a tenth of a "
        "step it delays others: lower --solver-ms.",
        *quantiles("evenstep_decision_seconds"),
        unit="s",
    ),
    lines(
        "Rounds",
        "Rounds per second in which requests were assigned, or held back since their prompts would "
        "make all workers wait.",
        rate("evenstep_rounds_total"),
        held_back=rate("evenstep_rounds_held_total"),
        unit="ops",
    ),
    lines(
        "Policy errors",
        "Rounds per second in which the policy failed and a simpler one stood in. Should be 0; the "
        "router's log has the error.",
        rate("evenstep_policy_errors_total"),
        unit="ops",
    ),
    lines(
        "Requests to choose from, and chosen",
        "Average per round: waiting when it began, and assigned. With one to choose from a joint "
        "decision is no better than one after the other.",
        waiting=mean("evenstep_decision_candidates"),
        assigned=mean("evenstep_decision_admitted"),
    ),
    lines(
        "Objective of bfio (KV tokens)",
        "What the chosen assignment comes to, on average: imbalance, weighted over the look-ahead. "
        "Only with --policy bfio.",
        mean("evenstep_decision_objective_tokens"),
    ),
    lines(
        "Moves of bfio's search",
        "Changes that it weighed in a round, on average; as many as --solver-ms buys, or until "
        "none is better. Only with --policy bfio.",
        mean("evenstep_decision_moves"),
    ),
)

LOOK_AHEAD = row(
    "Look-ahead of bfio (only with --policy bfio)",
    _parameter(
        "Horizon (steps)",
        "Steps that bfio looks ahead beyond the coming one; 0 while nothing is known of ends.",
        "evenstep_horizon_steps",
    ),
    _parameter(
        "Discount",
        "Weight of a step of the look-ahead against the one before it.",
        "evenstep_discount",
    ),
    _parameter(
        "Weight of the quadratic term (per token)",
        "How much an even spread counts among assignments of equal imbalance.",
        "evenstep_tie_weight",
    ),
    _parameter(
        "Lead (KV tokens)",
        "How far below the others bfio leaves a worker that it can fill.",
        "evenstep_lead_tokens",
    ),
)

KNOWLEDGE = row(
    "What decisions go by",
    lines(
        "Skill of the forecast",
        "1: ends of requests are known for certain; 0: no better than their base rate; below 0: "
        "worse. The look-ahead grows with it. Only with --policy bfio.",
        of_group("evenstep_forecast_skill", "max"),
    ),
    lines(
        "Bytes taken for a token",
        "Learned from what engines have counted; sizes prompts that no engine has seen yet.",
        of_group("evenstep_bytes_per_token", "max"),
    ),
    lines(
        "Prompts whose size was a guess",
        "Requests per second that were given to a worker before any engine had counted their "
        "prompt. All of them where prompts come as text.",
        rate("evenstep_requests_estimated_total"),
        unit="reqps",
    ),
)

PREFIXES = row(
    "Prefix caches",
    lines(
        "Prompt tokens that were cached",
        "Share of the prompt tokens of requests sent that their engine had in its prefix cache and "
        "did not compute again, and the share that the router had taken for cached.",
        found=ratio("evenstep_prefix_found_tokens_total", "evenstep_prefix_prompt_tokens_total"),
        foretold=ratio(
            "evenstep_prefix_foretold_tokens_total", "evenstep_prefix_prompt_tokens_total"
        ),
        unit="percentunit",
    ),
    lines(
        "Prompt tokens not computed again",
        "Tokens per second that engines found in their prefix caches.",
        rate("evenstep_prefix_found_tokens_total"),
    ),
    lines(
        "How right the router is about them",
        "Share of requests for which it foretold exactly what the engine found, and by how much it "
        "was off, as a share of the prompt tokens. Token ids are foretold exactly, texts within "
        "some hundred bytes.",
        exact=ratio("evenstep_prefix_right_requests_total", "evenstep_prefix_requests_total"),
        off=ratio("evenstep_prefix_error_tokens_total", "evenstep_prefix_prompt_tokens_total"),
        unit="percentunit",
    ),
    lines(
        "Blocks in prefix caches",
        "Distinct blocks that the router knows of. Of each worker: the worker dashboard.",
        of_group("evenstep_prefix_blocks", "max"),
    ),
    lines(
        "Workers whose caches are guessed",
        "Without the plug-in: by what they were sent. The share above leaves them out.",
        of_group("evenstep_prefix_guessed_workers", "max"),
    ),
    lines(
        "Prompt tokens guessed to be cached",
        "Per second, of requests sent to these workers. No engine tells whether they were.",
        rate("evenstep_prefix_guessed_tokens_total"),
    ),
    lines(
        "Blocks that were not noted",
        "Per second, since the router's index of blocks was full. Above 0, it takes some cached "
        "prompts for new ones.",
        rate("evenstep_prefix_blocks_dropped_total"),
        unit="ops",
    ),
    lines(
        "Memory of the index",
        "For the blocks, and for which blocks texts become.",
        of_group("evenstep_prefix_memory_bytes", "max"),
        unit="bytes",
    ),
)

DECISIONS = Board(
    "decisions",
    "Decisions",
    "How long do decisions take, how many requests do they choose from, and what do they know?",
    (ROUNDS, LOOK_AHEAD, KNOWLEDGE, PREFIXES),
)
