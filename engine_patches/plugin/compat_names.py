"""Every name of vLLM that the plug-in reads, by the feature that it serves.

They are checked once, as the engine starts. A feature that lacks a name is left out and told to the
routers (``Snapshot.unreported``); the engine starts without it, unless it is admission.

Notation: ``a.b`` is an attribute of an attribute; of ``a or b`` one is enough. ``f(x, y)`` is a
function whose first arguments have these names; ``f(_, _, z=)`` one that can be called like that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from inspect import signature
from operator import attrgetter
from typing import Any

# Owners of names that are no classes.
SCHEDULER = "Scheduler"
OVERRIDDEN = "vLLM's Scheduler"
"""Methods that the plug-in overrides; vLLM's own are meant."""
KV_GROUP = "KV group"
"""The part of vLLM that has the blocks of one KV group."""

Names = Mapping[str, tuple[str, ...]]
"""By owner; others are classes with their modules."""

SLOTS = "max_num_active_reqs or max_num_running_reqs"
"""Requests that run at once; in 0.32 and 0.33 the second is the model runner's slots alone."""
BESIDE = "kv_holding_waiting or skipped_waiting"
"""Requests waiting outside the queue: holders of memory; in 0.26 any that was skipped."""

_PARALLEL = "vllm_config.parallel_config"
_POOL = "kv_cache_manager.block_pool"
_COORDINATOR = "kv_cache_manager.coordinator"
_REQUEST = "vllm.v1.request.Request"
_STEP = "vllm.v1.core.sched.output"
_ENGINE = "vllm.v1.engine.core.DPEngineCoreProc"

FEATURES: Mapping[str, Names] = {
    "settings": {SCHEDULER: ("vllm_config.additional_config",)},
    "state": {
        SCHEDULER: ("running", "requests", "finished_req_ids"),
        OVERRIDDEN: (
            *("schedule()", "add_request(request)"),
            "update_from_output(scheduler_output, model_runner_output)",
        ),
        _REQUEST: (
            *("request_id", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens"),
        ),
        f"{_STEP}.SchedulerOutput": (
            *("num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids"),
        ),
    },
    "rank": {SCHEDULER: (f"{_PARALLEL}.data_parallel_index",)},
    "ranks": {SCHEDULER: (f"{_PARALLEL}.data_parallel_size",)},
    # Of data-parallel ranks: steps in which one has nothing to compute.
    "idle_steps": {_ENGINE: ("execute_dummy_batch()",)},
    # Of data-parallel ranks: the count of steps that they share.
    "shared_steps": {_ENGINE: ("run_busy_loop()", "current_wave", "step_counter")},
    "slots": {SCHEDULER: (SLOTS,)},
    "max_loras": {SCHEDULER: ("lora_config",), "vllm.config.LoRAConfig": ("max_loras",)},
    # That requests gain; without them each message lists all requests.
    "tokens": {
        "vllm.v1.engine.EngineCoreOutputs": ("outputs",),
        "vllm.v1.engine.EngineCoreOutput": ("request_id", "new_token_ids"),
    },
    # Prefixes found at admission; without them, too, each message lists all requests.
    "cached_tokens": {
        f"{_STEP}.SchedulerOutput": ("scheduled_new_reqs", "scheduled_cached_reqs"),
        f"{_STEP}.NewRequestData": ("req_id", "num_computed_tokens"),
        f"{_STEP}.CachedRequestData": ("req_ids", "resumed_req_ids", "num_computed_tokens"),
    },
    "preemptions": {f"{_STEP}.SchedulerOutput": ("preempted_req_ids",)},
    "memory": {
        SCHEDULER: (
            *("max_model_len", "num_lookahead_tokens", "num_spec_tokens"),
            *("vllm_config.max_concurrent_batches", "kv_cache_manager.enable_caching"),
            *(f"{_POOL}.num_gpu_blocks", f"{_POOL}.get_num_free_blocks()"),
            f"{_COORDINATOR}.single_type_managers",
        ),
        KV_GROUP: (
            *("block_size", "req_to_blocks"),
            "get_num_blocks_to_allocate(_, _, _, _, _, _, apply_admission_cap=)",
        ),
    },
    # Blocks that admission leaves free; without them as if there were none.
    "watermark": {SCHEDULER: ("kv_cache_manager.watermark_blocks",)},
    "memory_check": {
        SCHEDULER: ("kv_cache_config.kv_cache_tensors",),
        "vllm.v1.kv_cache_interface.KVCacheTensor": ("size", "block_stride"),
    },
    "power": {
        SCHEDULER: tuple(
            f"{_PARALLEL}.{name}"
            for name in (
                *("data_parallel_index", "data_parallel_rank_local", "world_size"),
                *("nnodes_within_dp", "assigned_physical_gpu_ids", "distributed_executor_backend"),
            )
        )
    },
    "prefix_cache": {
        SCHEDULER: ("kv_cache_manager.enable_caching", "connector"),
        KV_GROUP: (
            *("kv_cache_group_id", "block_pool.hash_block_size"),
            "block_pool.cached_block_hash_to_block.get_one_block",
            "block_pool.cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, "
            "block_size, kv_cache_group_id)",
            # The only way in which a block loses what it is cached for, short of a reset.
            *("block_pool._remove_cached_block_hashes(block)", "block_pool.reset_prefix_cache()"),
        ),
        _REQUEST: (
            *("all_token_ids", "block_hashes", "cache_salt", "lora_request", "mm_features"),
            "prompt_embeds",
        ),
        "vllm.v1.core.kv_cache_utils.KVCacheBlock": ("block_id", "block_hash"),
        "vllm.lora.request.LoRARequest": ("lora_name",),
        "vllm.multimodal.inputs.MultiModalFeatureSpec": ("identifier", "mm_position"),
        "vllm.multimodal.inputs.PlaceholderRange": ("offset",),
    },
    "end_signal": {
        SCHEDULER: (
            *("vllm_config.instance_id", f"{_PARALLEL}.data_parallel_index"),
            *(f"{_PARALLEL}.world_size", f"{_PARALLEL}.tensor_parallel_size"),
            f"{_PARALLEL}.distributed_executor_backend",
        ),
        _REQUEST: ("sampling_params",),
        "vllm.sampling_params.SamplingParams": (
            *("extra_args", "temperature", "ignore_eos", "eos_token_id", "stop_token_ids"),
        ),
        "vllm.v1.sample.logits_processor.interface.BatchUpdate": ("removed", "added", "moved"),
    },
    "prompt_budget": {
        SCHEDULER: (
            *("max_num_scheduled_tokens", "num_spec_tokens", "prefill_capacity_bound"),
            "scheduler_config.enable_chunked_prefill",
            "scheduler_config.long_prefill_token_threshold",
        ),
        OVERRIDDEN: ("schedule(throttle_prefills)",),
        _REQUEST: (
            *("is_prefill_chunk", "max_tokens", "num_output_placeholders", "num_tokens_with_spec"),
        ),
    },
    # Of data-parallel ranks, which agree on their budgets.
    "group_steps": {
        _ENGINE: ("_has_global_unfinished_reqs",),
        "vllm.config.ParallelConfig": ("sync_kv_cache_memory_size",),
    },
    "admission": {
        SCHEDULER: (
            *("policy.value", "connector", "max_num_scheduled_tokens", "num_spec_tokens"),
            "lora_config",
            "scheduler_config.long_prefill_token_threshold",
            *("num_waiting_for_streaming_input", BESIDE),
            *("waiting.add_request", "waiting.pop_request", "waiting.prepend_request"),
            *("waiting.remove_requests", "waiting.__iter__"),
            f"{_POOL}.hash_block_size",
            f"{_COORDINATOR}.find_longest_cache_hit(_, _)",
            f"{_COORDINATOR}.get_num_blocks_to_allocate(_, _, _, _, _, _, _, apply_admission_cap=)",
        ),
        KV_GROUP: ("get_num_skipped_tokens",),
        _REQUEST: (
            *("arrival_time", "max_tokens", "num_preemptions", "priority", "sampling_params"),
            *("status", "num_output_placeholders", "block_hashes", "num_in_flight_tokens"),
            *("skip_reading_prefix_cache", "lora_request", "structured_output_request"),
        ),
    },
}
_FUNCTION = re.compile(r"([\w.]+)(?:\((.*)\))?")


def missing(scheduler: Any, feature: str) -> list[str]:
    """Names of a feature, of the list or not, that this vLLM lacks; nothing is raised."""
    absent: list[str] = []
    for owner, names in FEATURES.get(feature, {}).items():
        if owner == SCHEDULER:
            absent += _lacking(owner, names, partial(_value, scheduler))
        elif owner == OVERRIDDEN:
            absent += _lacking(SCHEDULER, names, partial(_overridden, type(scheduler)))
        elif owner == KV_GROUP:
            absent += _missing_of_groups(scheduler, names)
        else:
            absent += missing_fields(owner, names)
    return absent


def missing_fields(path: str, names: tuple[str, ...]) -> list[str]:
    """Those that a class neither has nor declares, nor sets in its constructor."""
    module, _, name = path.rpartition(".")
    class_: type | None = None
    with suppress(Exception):
        class_ = getattr(import_module(module), name)
    if class_ is None:
        return [path]
    declared = declared_by(class_)
    absent = _lacking(name, names, partial(_value, class_))
    return [one for one in absent if one.rpartition(".")[2] not in declared]


def declared_by(class_: type) -> set[str]:
    """Fields of its objects that are no attributes of the class."""
    assigned = getattr(getattr(class_, "__init__", None), "__code__", None)
    return {
        *getattr(class_, "__dataclass_fields__", ()),
        *getattr(class_, "__struct_fields__", ()),
        *(assigned.co_names if assigned else ()),
    }


def first_name(owner: Any, names: str) -> str:
    """The first of ``a or b`` that an object has; AttributeError: none."""
    for name in names.split(" or "):
        if hasattr(owner, name):
            return name
    raise AttributeError(names)


def has(owner: Any, path: str) -> bool:
    """Whether an object has an attribute, or one of one of its attributes."""
    return not [*_lacking("", (path,), partial(_value, owner))]


def _value(owner: Any, path: str) -> Any:
    return attrgetter(path)(owner)


def _missing_of_groups(scheduler: Any, names: tuple[str, ...]) -> list[str]:
    managers = f"{_COORDINATOR}.single_type_managers"
    if not has(scheduler, managers):
        return [f"{SCHEDULER}.{managers}"]
    absent: dict[str, None] = {}
    for manager in attrgetter(managers)(scheduler):
        kind = f"{type(manager).__name__} (KV group)"
        absent |= dict.fromkeys(_lacking(kind, names, partial(_value, manager)))
    return [*absent]


def _lacking(owner: str, names: tuple[str, ...], get: Callable[[str], Any]) -> Iterator[str]:
    for name in names:
        if not any(_fits(one, get) for one in name.split(" or ")):
            yield f"{owner}.{name}"


def _fits(name: str, get: Callable[[str], Any]) -> bool:
    found = _FUNCTION.fullmatch(name)
    assert found is not None, name
    path, arguments = found.groups()
    # An attribute may be computed, and raise anything.
    with suppress(Exception):
        value = get(path)
        return arguments is None or _takes(value, arguments.split(", ") if arguments else [])
    return False


def _takes(function: Callable[..., Any], arguments: list[str]) -> bool:
    """Whether a function can be called so, or has these first arguments; see the notation."""
    if "_" in arguments:
        named = {one.rstrip("="): True for one in arguments if one != "_"}
        signature(function).bind(*range(arguments.count("_")), **named)
        return True
    return [*signature(function).parameters][: len(arguments)] == arguments


def _overridden(scheduler: type, name: str) -> Callable[..., Any]:
    """Of vLLM's own classes, the method without its first argument."""
    own = next(
        base
        for base in scheduler.__mro__
        if base.__module__.startswith("vllm.") and name in vars(base)
    )
    method: Callable[..., Any] = getattr(own, name).__get__(object())
    return method
