"""Every vLLM internal that the plug-in reads; no other module may read one.

They are checked once, at startup. The names below are the same in vLLM 0.26, 0.32 and 0.33; the
differences are in ``SLOTS`` and ``_kv_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import wraps
from importlib import import_module
from inspect import signature
from operator import attrgetter
from typing import Any

from engine_patches.plugin.compat_memory import (
    MANAGER,
    MEMORY,
    REQUEST_MEMORY,
    KvMemory,
    refused_calls,
)
from engine_patches.plugin.end_table import EndReader, table_path
from engine_patches.plugin.settings import PlugInError
from engine_patches.plugin.state import EngineRequest
from engine_patches.power.devices import RankGpus

TESTED_VERSIONS = ("0.26", "0.32", "0.33")

PARALLEL = (
    *("data_parallel_index", "data_parallel_rank_local", "data_parallel_size", "world_size"),
    *("nnodes_within_dp", "assigned_physical_gpu_ids", "tensor_parallel_size"),
    "distributed_executor_backend",
)
SCHEDULER = (
    *("running", "requests", "finished_req_ids", "get_request_counts"),
    "kv_cache_config.kv_cache_tensors",
    "vllm_config.additional_config",
    *(f"vllm_config.parallel_config.{name}" for name in PARALLEL),
    "vllm_config.instance_id",
    *MEMORY,
)
# Number of requests that run at once; in 0.32 and 0.33 it differs from the model runner's slots.
SLOTS = ("max_num_active_reqs", "max_num_running_reqs")
REQUEST = ("request_id", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens")
OUTPUT = (
    *("num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids"),
    *("preempted_req_ids", "scheduled_new_reqs", "scheduled_cached_reqs"),
)
NEW_REQUEST = ("req_id", "num_computed_tokens")
CACHED_REQUESTS = ("req_ids", "resumed_req_ids", "num_computed_tokens")
OUTPUTS = ("outputs",)
KV_TENSOR = ("size", "block_stride")
TOKENS = ("request_id", "new_token_ids")
CLASSES = {
    "vllm.v1.request.Request": (*REQUEST, *REQUEST_MEMORY),
    "vllm.v1.engine.EngineCoreOutputs": OUTPUTS,
    "vllm.v1.engine.EngineCoreOutput": TOKENS,
    "vllm.v1.core.sched.output.SchedulerOutput": OUTPUT,
    "vllm.v1.core.sched.output.NewRequestData": NEW_REQUEST,
    "vllm.v1.core.sched.output.CachedRequestData": CACHED_REQUESTS,
    "vllm.v1.kv_cache_interface.KVCacheTensor": KV_TENSOR,
}
# Needed by the logits processors; the keys are those of a request's ``vllm_xargs``.
END_KEY = "evenstep_request"
HIDDEN_LENGTH_KEY = "evenstep_output_tokens"
END_CLASSES = {
    "vllm.v1.request.Request": ("sampling_params",),
    "vllm.sampling_params.SamplingParams": (
        *("extra_args", "temperature", "ignore_eos", "eos_token_id", "stop_token_ids"),
    ),
    "vllm.v1.sample.logits_processor.interface.BatchUpdate": ("removed", "added", "moved"),
}
EXECUTORS = ("uni", "mp")
LOCKSTEP_ENGINE = ("vllm.v1.engine.core", "DPEngineCoreProc")
DUMMY_BATCH = "execute_dummy_batch"
METHODS = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "add_request": ("request",),
    "shutdown": (),
}


class EngineView:
    """A vLLM scheduler, after the scheduler's own constructor; PlugInError as in ``check``."""

    def __init__(self, scheduler: Any) -> None:
        check(scheduler)
        self._scheduler = scheduler
        parallel = scheduler.vllm_config.parallel_config
        self.rank = int(parallel.data_parallel_index)
        local_rank = parallel.data_parallel_rank_local
        backend = parallel.distributed_executor_backend
        self.gpus = RankGpus(
            int(parallel.world_size),
            self.rank if local_rank is None else int(local_rank),
            int(parallel.nnodes_within_dp),
            None if backend in EXECUTORS else f"the executor {backend}",
            parallel.assigned_physical_gpu_ids,
        )
        # Steps are those of a group with mixture of experts; of dense models each engine is alone.
        self.ranks = int(parallel.data_parallel_size)
        self.lockstep = self.ranks > 1
        self.slots = int(getattr(scheduler, first_name(scheduler, SLOTS)))
        # Whether it proposes tokens, so that requests gain several in a step.
        self.drafts = int(scheduler.num_spec_tokens) > 0
        self.memory = KvMemory(scheduler)
        # Of the KV cache on each GPU.
        self.kv_bytes = _kv_bytes(scheduler.kv_cache_config.kv_cache_tensors)

    def open_ends(self) -> EndReader:
        """The table of the end signal's logits processor; PlugInError: it is missing, or remote."""
        check_names(self._scheduler, (), END_CLASSES)
        config = self._scheduler.vllm_config
        check_end_workers(config)
        try:
            return EndReader(table_path(*engine_key(config)))
        except OSError as error:
            raise PlugInError(
                "evenstep.end_signal needs its logits processor as well: --logits-processors "
                "engine_patches.end_signal:EndSignal"
            ) from error

    @property
    def running(self) -> Sequence[EngineRequest]:
        """List that vLLM keeps changing."""
        return self._scheduler.running  # type: ignore[no-any-return]

    @property
    def alive(self) -> Mapping[str, EngineRequest]:
        """Requests that run or wait."""
        return self._scheduler.requests  # type: ignore[no-any-return]

    @property
    def ended(self) -> Collection[str]:
        """Ids since the last call of ``schedule``."""
        return self._scheduler.finished_req_ids  # type: ignore[no-any-return]

    @property
    def waiting(self) -> int:
        return self._scheduler.get_request_counts()[1]  # type: ignore[no-any-return]


def admissions(output: Any) -> Iterator[tuple[str, int]]:
    """Requests that got a slot in a step, with their tokens found in a cache."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    if resumed := cached.resumed_req_ids:
        for id_, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if id_ in resumed:
                yield id_, tokens


def gained(
    results: Mapping[int, Any], scheduled: Mapping[str, int], *, drafts: bool
) -> Mapping[str, int] | None:
    """Tokens that requests got, by id; None if each scheduled one got exactly one.

    ``results`` of ``update_from_output`` have each request at most once, tokens for scheduled ones.
    With ``drafts`` several are expected, and whether all got one is not checked.
    """
    if not drafts:
        counts = [len(one.new_token_ids) for some in results.values() for one in some.outputs]
        if counts.count(1) == len(scheduled):
            return None
    return {
        one.request_id: len(one.new_token_ids) for some in results.values() for one in some.outputs
    }


def mark(request: Any, number: int) -> None:
    """Pass a request's number to the workers, unless it generates nothing."""
    if request.sampling_params is not None:
        # Another request may share this object.
        params = copy(request.sampling_params)
        params.extra_args = {**(params.extra_args or {}), END_KEY: number}
        request.sampling_params = params


def end_tokens(params: Any) -> tuple[int, ...]:
    """Tokens that end a request, the model's own first, unless it is ignored."""
    eos = () if params.ignore_eos or params.eos_token_id is None else (params.eos_token_id,)
    return tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))


def engine_key(vllm_config: Any) -> tuple[str, int]:
    """Key that the processes of one engine share, unique on the machine."""
    return vllm_config.instance_id, int(vllm_config.parallel_config.data_parallel_index)


def check_end_workers(vllm_config: Any) -> None:
    """PlugInError unless one worker computes all logits, on the engine's own machine."""
    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    if backend not in EXECUTORS:
        raise PlugInError(
            "evenstep.end_signal needs the engine's workers on its own machine: "
            f"--distributed-executor-backend {' or '.join(EXECUTORS)}, not {backend}"
        )
    if parallel.world_size != parallel.tensor_parallel_size:
        raise PlugInError(
            "evenstep.end_signal works with tensor parallelism only: leave out "
            "--pipeline-parallel-size and --prefill-context-parallel-size, or end_signal"
        )


def _kv_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the KV cache.

    Up to some version between 0.26 and 0.32 each tensor has memory of its own, unless several are
    packed block by block. Since then all are views of one allocation.
    """
    sizes = [int(one.size) for one in tensors]
    apart = all(hasattr(one, "shared_by") and not one.block_stride for one in tensors)
    return sum(sizes) if apart else max(sizes)


def preempted(output: Any) -> Collection[str]:
    """Ids that lost their slot when a step was scheduled."""
    return output.preempted_req_ids or ()


def watch_dummy_batches(began: Callable[[], None]) -> None:
    """Call ``began`` in the steps in which a rank in lockstep has nothing to compute.

    vLLM does not call the scheduler then; only the engine around it knows. A process has one
    engine. PlugInError: this version of vLLM has no such step.
    """
    module, name = LOCKSTEP_ENGINE
    engine = getattr(import_module(module), name, None)
    execute = getattr(engine, DUMMY_BATCH, None)
    if execute is None:
        raise PlugInError(
            f"the plug-in cannot count the steps of vLLM {version()}'s data-parallel ranks: it has "
            f"no {name}.{DUMMY_BATCH}. Tested versions: {', '.join(TESTED_VERSIONS)}"
        )

    @wraps(execute)
    def counted(core: Any) -> Any:
        began()
        return execute(core)

    setattr(engine, DUMMY_BATCH, counted)


def version() -> str:
    """Return vLLM's version, or "unknown"."""
    return str(getattr(import_module("vllm"), "__version__", "unknown"))


def check(scheduler: Any) -> None:
    """PlugInError names what vLLM lacks of all that the plug-in reads."""
    missing = _missing(scheduler, SCHEDULER, CLASSES)
    if not any(has(scheduler, name) for name in SLOTS):
        missing.append(f"Scheduler.{' or '.join(SLOTS)}")
    missing.extend(_missing_arguments(type(scheduler)))
    if not missing:
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            missing.extend(f"KV group's {name}" for name in MANAGER if not has(manager, name))
    if not missing:
        missing.extend(refused_calls(scheduler))
    if missing:
        raise PlugInError(_cannot_work(missing))


def first_name(scheduler: Any, names: Iterable[str]) -> str:
    """First of these names, which vary between versions, that the scheduler has; or PlugInError."""
    found = next((name for name in names if hasattr(scheduler, name)), None)
    if found is None:
        raise PlugInError(_cannot_work([f"Scheduler.{' or '.join(names)}"]))
    return found


def check_names(scheduler: Any, paths: Iterable[str], classes: Mapping[str, Iterable[str]]) -> None:
    """PlugInError unless vLLM has these attributes and class fields."""
    if missing := _missing(scheduler, paths, classes):
        raise PlugInError(_cannot_work(missing))


def _missing(
    scheduler: Any, paths: Iterable[str], classes: Mapping[str, Iterable[str]]
) -> list[str]:
    missing = [f"Scheduler.{path}" for path in paths if not has(scheduler, path)]
    for path, names in classes.items():
        missing.extend(missing_fields(path, names))
    return missing


def _cannot_work(missing: Iterable[str]) -> str:
    return (
        f"the plug-in cannot work with vLLM {version()}: it has no {', '.join(missing)}. "
        f"Tested versions: {', '.join(TESTED_VERSIONS)}"
    )


def _missing_arguments(scheduler: type) -> Iterator[str]:
    """Methods of vLLM's own classes whose arguments have changed."""
    own = [base for base in scheduler.__mro__ if base.__module__.startswith("vllm.")]
    for name, arguments in METHODS.items():
        method = next((vars(base)[name] for base in own if name in vars(base)), None)
        if method is None:
            yield f"Scheduler.{name}"
        elif tuple(signature(method).parameters)[1 : len(arguments) + 1] != arguments:
            yield f"Scheduler.{name}({', '.join(arguments)})"


def missing_fields(path: str, names: Iterable[str]) -> Iterator[str]:
    """Fields that a class neither declares nor sets in its constructor."""
    module, _, name = path.rpartition(".")
    class_ = getattr(import_module(module), name, None)
    if class_ is None:
        yield path
        return
    assigned = getattr(class_.__init__, "__code__", None)
    declared = {
        *getattr(class_, "__dataclass_fields__", ()),
        *getattr(class_, "__struct_fields__", ()),
        *(assigned.co_names if assigned else ()),
    }
    for field in names:
        if not hasattr(class_, field) and field not in declared:
            yield f"{name}.{field}"


def has(owner: Any, path: str) -> bool:
    """Whether an object has an attribute, or one of one of its attributes."""
    try:
        attrgetter(path)(owner)
    except AttributeError:
        return False
    return True
