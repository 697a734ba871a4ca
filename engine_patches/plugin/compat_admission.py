"""vLLM internals that admission reads, see ``compat``."""

from __future__ import annotations

from typing import Any

PREDICTED_KEY = "evenstep_predicted_tokens"


def aborted(request: Any) -> bool:
    """Whether an ended request was withdrawn."""
    return bool(request.status.name == "FINISHED_ABORTED")


def holds_memory(request: Any) -> bool:
    """Whether a waiting request has KV blocks."""
    return bool(request.num_computed_tokens) or request.status.name == "WAITING_FOR_REMOTE_KVS"


def size_tokens(request: Any) -> int:
    """Prompt and output tokens, including those of steps in progress."""
    known = request.num_prompt_tokens + request.num_output_tokens
    return int(known + request.num_output_placeholders)


def is_ready(scheduler: Any, request: Any) -> bool:
    """Whether vLLM would not pass over a waiting request, as far as its own attributes tell.

    It does while a grammar is being compiled, a token from before a preemption is still to come
    (0.26 does not wait for it), or all places for LoRA adapters are taken by other ones.
    """
    if getattr(request, "num_stale_output_tokens", 0) and not request.drop_stale_output:
        return False
    if request.status.name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR":
        return request.structured_output_request.grammar is not None
    lora, config = request.lora_request, scheduler.lora_config
    if lora is None or not config:
        return True
    taken = {one.lora_request.lora_int_id for one in scheduler.running if one.lora_request}
    return lora.lora_int_id in taken or len(taken) < config.max_loras


def predicted_tokens(request: Any) -> int | None:
    """Output length that the client predicts (``vllm_xargs``)."""
    hint = (getattr(request.sampling_params, "extra_args", None) or {}).get(PREDICTED_KEY)
    return hint if type(hint) is int and hint > 0 else None
