r"""The plug-in: vLLM's two schedulers with a published state per step, and with admission.

    vllm serve MODEL --scheduler-cls engine_patches.scheduler.EvenstepAsyncScheduler \
        --additional-config '{"evenstep": {"snapshots": "tcp://127.0.0.1:5600"}}'

With ``"admission": {"policy": "headroom"}`` in the settings, a policy decides on admission; with
``"prompt_budget": true``, routers bound the prompt tokens of each step. Use
``EvenstepScheduler`` where vLLM does not schedule asynchronously, as on a CPU: it turns
asynchronous scheduling off. Imported by vLLM only.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from engine_patches.plugin.compat import EngineView, version, watch_dummy_batches
from engine_patches.plugin.compat_cache import open_cache
from engine_patches.plugin.compat_prompts import PromptTokens, watch_group_steps
from engine_patches.plugin.entrance import Entrance
from engine_patches.plugin.gate import AdmissionGate
from engine_patches.plugin.prefixes import CachedPrefixes
from engine_patches.plugin.prompt_bound import PromptBound
from engine_patches.plugin.reporter import Reporter, log
from engine_patches.plugin.settings import read_settings


class EvenstepMixin:
    """Reports a scheduler's actions; controls admission and prompt tokens if configured."""

    vllm_config: Any
    _asynchronous = False
    _gate: AdmissionGate | None = None
    _prompts: PromptBound | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = read_settings(self.vllm_config.additional_config)
        engine = EngineView(self)
        if engine.lockstep:
            watch_dummy_batches(self._idled)
        if settings.admission is not None:
            # A request that waits for its token is scheduled ahead by the asynchronous one alone.
            ahead = engine.memory.steps_ahead if self._asynchronous else 0
            self._gate = AdmissionGate(engine, Entrance(self), settings.admission, ahead=ahead)
        if settings.prompt_budget:
            self._prompts = PromptBound(PromptTokens(self), lockstep=engine.lockstep)
            if engine.lockstep:
                watch_group_steps(self._prompts.stepped)
        cache = open_cache(self, engine.memory.groups)
        prefixes = None if cache is None else CachedPrefixes(cache)
        self.evenstep = Reporter(
            engine, settings, admissible=self._gate, prefixes=prefixes, prompts=self._prompts
        )
        log.info(
            "evenstep: vLLM %s, the state of every step at %s; admission: %s",
            version(),
            self.evenstep.endpoint,
            "as vLLM decides" if self._gate is None else self._gate.policy.name,
        )

    def _idled(self) -> None:
        self.evenstep.idled()

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self.evenstep.arrived(request)
        if self._gate is not None:
            self._gate.arrived(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        gate, prompts = self._gate, self._prompts
        if prompts is not None:
            prompts.open()
        if gate is not None:
            gate.open(0 if prompts is None else prompts.tokens)
        began_s = time.perf_counter()
        try:
            output = super().schedule(  # type: ignore[misc]
                *((True,) if prompts is not None and prompts.holds else args), **kwargs
            )
        finally:
            if gate is not None:
                gate.close()
            if prompts is not None:
                prompts.close()
        if gate is not None:
            gate.scheduled(output)
        self.evenstep.scheduled(output, began_s)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        result = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        self.evenstep.stepped(scheduler_output, result)
        return result

    def shutdown(self) -> None:
        self.evenstep.close()
        super().shutdown()  # type: ignore[misc]


class EvenstepScheduler(EvenstepMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a state stream."""


class EvenstepAsyncScheduler(EvenstepMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with a state stream."""

    _asynchronous = True
