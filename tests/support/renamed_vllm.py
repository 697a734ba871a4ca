"""For ``--scheduler-cls``: the plug-in in a vLLM that has other names for some of what it reads."""

from contextlib import ExitStack
from typing import Any

from vllm.config import ParallelConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from engine_patches.scheduler import EvenstepScheduler
from tests.support.hidden_names import without

_hidden = ExitStack()  # for as long as the process lives


class LacksSome(EvenstepScheduler):
    """Without preemptions, GPUs, and the blocks that admission leaves free."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _hidden.enter_context(without(SchedulerOutput, "preempted_req_ids"))
        _hidden.enter_context(without(ParallelConfig, "assigned_physical_gpu_ids"))
        _hidden.enter_context(without(KVCacheManager, "watermark_blocks"))
        super().__init__(*args, **kwargs)


class LacksState(EvenstepScheduler):
    """Without the list of running requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _hidden.enter_context(without(Scheduler, "running"))
        super().__init__(*args, **kwargs)
