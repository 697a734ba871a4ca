"""The plug-in: vLLM's two schedulers, with the state of every step published.

    vllm serve MODEL --scheduler-cls engine_patches.scheduler.EvenstepAsyncScheduler \
        --additional-config '{"evenstep": {"snapshots": "tcp://127.0.0.1:5600"}}'

``EvenstepScheduler`` where vLLM does not schedule asynchronously (on a CPU, for one): with it,
asynchronous scheduling is off. Imported by vLLM only.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from engine_patches.compat import EngineView, version, watch_dummy_batches
from engine_patches.reporter import Reporter, log
from engine_patches.settings import read_settings


class EvenstepMixin:
    """Tells a reporter what a scheduler does; changes nothing of it."""

    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = read_settings(self.vllm_config.additional_config)
        engine = EngineView(self)
        if engine.lockstep:
            watch_dummy_batches(self._idled)
        self.evenstep = Reporter(engine, settings)
        log.info(
            "evenstep: vLLM %s, the state of every step at %s", version(), self.evenstep.endpoint
        )

    def _idled(self) -> None:
        self.evenstep.idled()

    def add_request(self, request: Any) -> None:
        """As vLLM's."""
        super().add_request(request)  # type: ignore[misc]
        self.evenstep.arrived(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        began_s = time.perf_counter()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.evenstep.scheduled(output, began_s)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's."""
        result = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        self.evenstep.stepped(scheduler_output, result)
        return result

    def shutdown(self) -> None:
        """As vLLM's; the stream ends first."""
        self.evenstep.close()
        super().shutdown()  # type: ignore[misc]


class EvenstepScheduler(EvenstepMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a state stream."""


class EvenstepAsyncScheduler(EvenstepMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with a state stream."""
