"""What the plug-in reads of vLLM; only the ``compat*`` modules may read it.

``compat_names`` has the names. They are the same in vLLM 0.26 to 0.33, but for those with an
"or"; ``_kv_bytes`` has a difference too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

from engine_patches.plugin.compat_memory import KvMemory
from engine_patches.plugin.compat_names import SLOTS, first_name, missing
from engine_patches.plugin.end_table import EndReader, table_path
from engine_patches.plugin.settings import PlugInError, Settings, read_settings
from engine_patches.plugin.state import EngineRequest
from engine_patches.power.devices import RankGpus
from router.core.types import DEFAULT_SLOTS

log = logging.getLogger("vllm.evenstep")

TESTED_VERSIONS = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")

# Needed by the logits processors; the keys are those of a request's ``vllm_xargs``.
END_KEY = "evenstep_request"
HIDDEN_LENGTH_KEY = "evenstep_output_tokens"
EXECUTORS = ("uni", "mp")
LOCKSTEP_ENGINE = ("vllm.v1.engine.core", "DPEngineCoreProc")
DUMMY_BATCH = "execute_dummy_batch"

T = TypeVar("T")
U = TypeVar("U")


class EngineView:
    """A vLLM scheduler, after the scheduler's own constructor; as far as it can be read.

    Attributes:
        lacks: features that cannot be read, with the reason.
        ranks: of the data-parallel group, which step together; 1 for dense models, whose engines
            step alone. 0: unknown.
        rank, kv_memory, gpus: None: unknown.
        kv_bytes: of the KV cache on each GPU; None: unknown.
        next_shared: ``wave`` and ``wave_step`` of the step that begins next; zeros: unknown.
        drafts: whether it may propose tokens, so that requests gain several in a step.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.lacks: dict[str, str] = {}
        self.ranks = self.read("ranks", lambda: int(_parallel(scheduler).data_parallel_size), 0)
        self.lockstep = self.ranks != 1
        self.next_shared: Callable[[], tuple[int, int]] = lambda: (0, 0)
        only = None if self.lockstep else 0
        self.rank = self.read("rank", lambda: int(_parallel(scheduler).data_parallel_index), only)
        self.slots = self.read(
            "slots", lambda: int(getattr(scheduler, first_name(scheduler, SLOTS))), DEFAULT_SLOTS
        )
        self.max_loras = self.read("max_loras", lambda: _max_loras(scheduler.lora_config), 0)
        self.drafts = int(getattr(scheduler, "num_spec_tokens", 1)) > 0
        self.kv_memory = self.read("memory", lambda: KvMemory(scheduler), None)
        self.reads("watermark")
        self.gpus = self.read("power", lambda: _gpus(_parallel(scheduler)), None)
        self.kv_bytes = self.read(
            "memory_check", lambda: _kv_bytes(scheduler.kv_cache_config.kv_cache_tensors), None
        )
        self.reads_tokens = self.reads("tokens")
        self.reads_entries = self.reads("cached_tokens")
        self.reads_preemptions = self.reads("preemptions")
        self.readable = self.reads("state")

    def read(self, feature: str, make: Callable[[], T], without: U, *needs: str) -> T | U:
        """What ``make`` returns; ``without``, with a note, if the feature cannot be read.

        PlugInError of ``make`` is raised: a setting is wrong. ``needs``: features that it rests on.
        """
        reason = self._reason(feature, *needs)
        if not reason:
            try:
                return make()
            except PlugInError:
                raise
            except Exception as error:
                log.exception("evenstep: %s cannot be read", feature)
                reason = repr(error)
        self.lacks[feature] = reason
        return without

    def reads(self, feature: str) -> bool:
        """Whether vLLM has all names of a feature."""
        return self.read(feature, lambda: True, False)

    def require(self, feature: str, *needs: str) -> None:
        """PlugInError: the feature cannot work with this vLLM."""
        if reason := self._reason(feature, *needs):
            raise PlugInError(
                f"evenstep.{feature} cannot work with vLLM {version()}: it has no {reason}. "
                f"Tested versions: {', '.join(TESTED_VERSIONS)}"
            )

    def _reason(self, *features: str) -> str:
        """Names that vLLM lacks for these features; empty: none."""
        absent: dict[str, None] = {}
        for one in features:
            known = one in self.lacks
            absent |= dict.fromkeys([self.lacks[one]] if known else missing(self._scheduler, one))
        return ", ".join(absent)

    @property
    def memory(self) -> KvMemory:
        assert self.kv_memory is not None, "its KV memory cannot be read"
        return self.kv_memory

    def settings(self) -> Settings | None:
        """None: vLLM does not tell them; PlugInError: they are wrong."""
        config = self.read("settings", lambda: self._scheduler.vllm_config.additional_config, None)
        return None if "settings" in self.lacks else read_settings(config)

    def say(self) -> None:
        """Log what cannot be read."""
        if self.lacks:
            log.warning(
                "evenstep: of vLLM %s the plug-in cannot read: %s. Routers are told; the engine "
                "goes on without. Tested versions: %s",
                version(),
                "; ".join(f"{feature} ({reason})" for feature, reason in self.lacks.items()),
                ", ".join(TESTED_VERSIONS),
            )

    def open_ends(self) -> EndReader:
        """The table of the end signal's logits processor; PlugInError: it is missing, or remote."""
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
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        raise PlugInError(
            "evenstep.end_signal needs one worker that samples for all requests: leave out "
            "--enable-batch-sharded-sampling, or end_signal"
        )


def _parallel(scheduler: Any) -> Any:
    return scheduler.vllm_config.parallel_config


def _max_loras(config: Any) -> int:
    return int(config.max_loras) if config else 0


def _gpus(parallel: Any) -> RankGpus:
    backend, local_rank = parallel.distributed_executor_backend, parallel.data_parallel_rank_local
    return RankGpus(
        int(parallel.world_size),
        int(parallel.data_parallel_index if local_rank is None else local_rank),
        int(parallel.nnodes_within_dp),
        None if backend in EXECUTORS else f"the executor {backend}",
        parallel.assigned_physical_gpu_ids,
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
    engine.
    """
    module, name = LOCKSTEP_ENGINE
    engine = getattr(import_module(module), name)
    execute = getattr(engine, DUMMY_BATCH)

    @wraps(execute)
    def counted(core: Any, *args: Any, **named: Any) -> Any:
        began()
        return execute(core, *args, **named)

    setattr(engine, DUMMY_BATCH, counted)


def watch_shared_steps() -> Callable[[], tuple[int, int]]:
    """``EngineView.next_shared`` of an engine in lockstep, from the beginning of its loop."""
    module, name = LOCKSTEP_ENGINE
    engine = getattr(import_module(module), name)
    loop = engine.run_busy_loop
    looping: list[Any] = []

    @wraps(loop)
    def noted(core: Any, *args: Any, **named: Any) -> Any:
        looping[:] = [core]
        return loop(core, *args, **named)

    engine.run_busy_loop = noted
    return lambda: (looping[0].current_wave, looping[0].step_counter + 1) if looping else (0, 0)


def version() -> str:
    """Return vLLM's version, or "unknown"."""
    return str(getattr(import_module("vllm"), "__version__", "unknown"))
