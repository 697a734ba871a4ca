"""What admission reads of vLLM besides, checked when it starts; see ``compat``."""

from __future__ import annotations

from typing import Any

# Who waits beside the queue: those that hold memory; in 0.26 whoever was passed over.
BESIDE = ("kv_holding_waiting", "skipped_waiting")
ENTRANCE = (
    "policy.value",
    "connector",
    "max_num_scheduled_tokens",
    "num_spec_tokens",
    "num_waiting_for_streaming_input",
    "waiting.add_request",
    "waiting.pop_request",
    "waiting.prepend_request",
    "waiting.remove_requests",
    "waiting.__iter__",
)
ENTRANCE_CLASSES = {
    "vllm.v1.request.Request": (
        *("arrival_time", "max_tokens", "num_preemptions", "priority", "sampling_params", "status"),
        "num_output_placeholders",
    ),
}
PREDICTED_KEY = "evenstep_predicted_tokens"


def aborted(request: Any) -> bool:
    """Whether a request that is over was withdrawn."""
    return bool(request.status.name == "FINISHED_ABORTED")


def holds_memory(request: Any) -> bool:
    """Whether a request that waits has KV blocks."""
    return bool(request.num_computed_tokens) or request.status.name == "WAITING_FOR_REMOTE_KVS"


def size_tokens(request: Any) -> int:
    """Of the prompt and the output, that of the steps under way included."""
    known = request.num_prompt_tokens + request.num_output_tokens
    return int(known + request.num_output_placeholders)


def is_passed_over(request: Any) -> bool:
    """Whether it lost its slot while a token of it was under way; 0.26 waits for none."""
    return getattr(request, "num_stale_output_tokens", 0) > 0 and not request.drop_stale_output


def predicted_tokens(request: Any) -> int | None:
    """Output tokens at which its client says that it ends (``vllm_xargs``)."""
    hint = (getattr(request.sampling_params, "extra_args", None) or {}).get(PREDICTED_KEY)
    return hint if type(hint) is int and hint > 0 else None
