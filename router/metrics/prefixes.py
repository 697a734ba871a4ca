"""Table of the metrics of prefix caches: what the router knows of them, and how right it is."""

from router.core.state.group import Group
from router.metrics.rows import Row, Table


def _blocks(group: Group) -> int | None:
    index = group.prefixes.index
    return None if index is None or not group.prefixes.told else len(index)


def _dropped(group: Group) -> int:
    return 0 if group.prefixes.index is None else group.prefixes.index.dropped


PREFIX_ROWS: Table[Group] = {
    "evenstep_prefix_blocks": Row(
        "Distinct blocks that workers have in their prefix caches; no value before the first "
        "worker has told its own. Of workers that tell nothing, parts of prompts count.",
        _blocks,
    ),
    "evenstep_prefix_guessed_workers": Row(
        "Workers without the plug-in whose prefix caches are guessed by what they were sent.",
        lambda group: group.prefixes.guessed,
    ),
    "evenstep_prefix_guessed_tokens_total": Row(
        "Prompt tokens sent that only such a guess took for cached; they are in no other "
        "evenstep_prefix_ metric.",
        lambda group: group.prefixes.guessed_tokens,
    ),
    "evenstep_prefix_blocks_dropped_total": Row(
        "Blocks of prefix caches that were not noted, since the router's index of them was full.",
        _dropped,
    ),
    "evenstep_prefix_memory_bytes": Row(
        "Memory for the index of prefix caches, and for which blocks texts become.",
        lambda group: group.prefixes.memory_bytes,
    ),
    "evenstep_prefix_requests_total": Row(
        "Requests for which it was foretold as they were sent how much of their prompt was cached, "
        "and whose engine has told how much it found.",
        lambda group: group.hit_totals.requests,
    ),
    "evenstep_prefix_right_requests_total": Row(
        "Of evenstep_prefix_requests_total, those where both numbers were equal.",
        lambda group: group.hit_totals.right,
    ),
    "evenstep_prefix_prompt_tokens_total": Row(
        "Prompt tokens of evenstep_prefix_requests_total.",
        lambda group: group.hit_totals.prompt_tokens,
    ),
    "evenstep_prefix_found_tokens_total": Row(
        "Of evenstep_prefix_prompt_tokens_total, those that engines had cached and did not compute "
        "again. Their share is the hit share.",
        lambda group: group.hit_totals.found_tokens,
    ),
    "evenstep_prefix_foretold_tokens_total": Row(
        "Of evenstep_prefix_prompt_tokens_total, those that the router took for cached.",
        lambda group: group.hit_totals.predicted_tokens,
    ),
    "evenstep_prefix_error_tokens_total": Row(
        "Sum over evenstep_prefix_requests_total of how many tokens the foretold number was off, "
        "either way.",
        lambda group: group.hit_totals.error_tokens,
    ),
}
