"""vLLM internals that admission reads, see ``compat``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

PREDICTED_KEY = "evenstep_predicted_tokens"


def aborted(request: Any) -> bool:
    """Whether an ended request was withdrawn."""
    return bool(request.status.name == "FINISHED_ABORTED")


def holds_memory(request: Any) -> bool:
    """Whether a waiting request has KV blocks."""
    return bool(request.num_computed_tokens) or is_fetching(request)


def is_fetching(request: Any) -> bool:
    """Whether its KV is on its way from elsewhere; it has no slot then."""
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")


def size_tokens(request: Any) -> int:
    """Prompt and output tokens, including those of steps in progress."""
    known = request.num_prompt_tokens + request.num_output_tokens
    return int(known + request.num_output_placeholders)


def may_run(request: Any, taken: Collection[int], max_loras: int) -> bool:
    """Whether vLLM would not pass over a waiting request, as far as its own attributes tell.

    It does while a grammar is being compiled, a token from before a preemption is still to come
    (0.26 does not wait for it), or all places for LoRA adapters are ``taken`` by other ones.
    ``max_loras``: 0: adapters are not bounded.
    """
    if getattr(request, "num_stale_output_tokens", 0) and not request.drop_stale_output:
        return False
    if request.status.name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR":
        return request.structured_output_request.grammar is not None
    lora = request.lora_request
    return not (lora and max_loras) or lora.lora_int_id in taken or len(taken) < max_loras


def adapters(running: Iterable[Any]) -> Collection[int]:
    """LoRA adapters of running requests."""
    return {one.lora_request.lora_int_id for one in running if one.lora_request}


def predicted_tokens(request: Any) -> int | None:
    """Output length that the client predicts (``vllm_xargs``)."""
    hint = (getattr(request.sampling_params, "extra_args", None) or {}).get(PREDICTED_KEY)
    return hint if type(hint) is int and hint > 0 else None
