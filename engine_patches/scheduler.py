r"""The plug-in: vLLM's two schedulers, publishing their state in each step, and with admission.

    vllm serve MODEL --scheduler-cls engine_patches.scheduler.EvenstepAsyncScheduler \
        --additional-config '{"evenstep": {"snapshots": "tcp://127.0.0.1:5600"}}'

Routers can bound the prompt tokens of each step. With ``"admission": {"policy": "headroom"}`` in
the settings, a policy decides on admission. Use ``EvenstepScheduler`` where vLLM does not schedule
asynchronously, as on a CPU: it turns asynchronous scheduling off. Imported by vLLM only.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from engine_patches.plugin.compat import (
    EngineView,
    version,
    watch_dummy_batches,
    watch_shared_steps,
)
from engine_patches.plugin.compat_cache import open_cache
from engine_patches.plugin.compat_prompts import PromptTokens, watch_group_steps
from engine_patches.plugin.entrance import Entrance
from engine_patches.plugin.gate import AdmissionGate
from engine_patches.plugin.prefixes import CachedPrefixes
from engine_patches.plugin.prompt_bound import PromptBound
from engine_patches.plugin.reporter import Reporter, log
from engine_patches.plugin.settings import PlugInError, Settings

ADMISSION_NEEDS = "state", "slots", "cached_tokens", "preemptions", "memory", "watermark"


class EvenstepMixin:
    """Reports a scheduler's actions; controls admission and prompt tokens if configured."""

    evenstep: Reporter | None = None
    _asynchronous = False
    _gate: AdmissionGate | None = None
    _prompts: PromptBound | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        engine = EngineView(self)
        settings = engine.settings()
        if settings is not None:
            self._begin(engine, settings)
        engine.say()

    def _begin(self, engine: EngineView, settings: Settings) -> None:
        """PlugInError: a setting is wrong, or admission cannot work with this vLLM."""
        if settings.admission is not None:
            engine.require("admission", *ADMISSION_NEEDS)
            # A request that waits for its token is scheduled ahead by the asynchronous one alone.
            ahead = engine.memory.steps_ahead if self._asynchronous else 0
            self._gate = AdmissionGate(engine, Entrance(self), settings.admission, ahead=ahead)
        if settings.prompt_budget is not False:
            self._prompts = self._bound(engine, asked=settings.prompt_budget is True)
        if engine.lockstep:
            engine.read("idle_steps", lambda: watch_dummy_batches(self._idled), None)
            unknown = engine.next_shared
            engine.next_shared = engine.read("shared_steps", watch_shared_steps, unknown)
        prefixes = engine.read(
            "prefix_cache", lambda: self._cached(engine), None, "state", "memory"
        )
        if engine.rank is None:  # its endpoint is unknown
            return
        given = engine, settings, self._gate, prefixes, self._prompts
        self.evenstep = engine.read("stream", lambda: Reporter(*given), None)
        log.info(
            "evenstep: vLLM %s, the state of every step at %s; admission: %s",
            version(),
            settings.endpoint(engine.rank),
            "as vLLM decides" if self._gate is None else self._gate.policy.name,
        )

    def _bound(self, engine: EngineView, *, asked: bool) -> PromptBound | None:
        """PlugInError: somebody has asked for budgets, and this engine cannot keep them."""

        def bound() -> PromptBound:
            prompts = PromptBound(PromptTokens(self), lockstep=engine.lockstep)
            if engine.lockstep:
                watch_group_steps(prompts.stepped)
            return prompts

        ranks = ("ranks", "group_steps") if engine.lockstep else ()
        try:
            return engine.read("prompt_budget", bound, None, "state", *ranks)
        except PlugInError as error:
            if asked:
                raise
            log.info("evenstep: routers cannot bound the prompts of a step here: %s", error)
            return None

    def _cached(self, engine: EngineView) -> CachedPrefixes | None:
        cache = open_cache(self, engine.memory.groups)
        return None if cache is None else CachedPrefixes(cache)

    def _idled(self) -> None:
        if self.evenstep is not None:
            self.evenstep.idled()

    # vLLM's methods may take more, or other, arguments than those that are read.

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        if self.evenstep is not None:
            self.evenstep.arrives(*args, **kwargs)
        result = super().add_request(*args, **kwargs)  # type: ignore[misc]
        if self.evenstep is not None:
            self.evenstep.arrived(*args, **kwargs)
        if self._gate is not None:
            self._gate.arrived(*args, **kwargs)
        return result

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        gate, prompts = self._gate, self._prompts
        if prompts is not None:
            prompts.open()
        if gate is not None:
            gate.open(0 if prompts is None else prompts.tokens)
        if prompts is not None and prompts.holds:
            args, kwargs = (), {"throttle_prefills": True}
        began_s = time.perf_counter()
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            if gate is not None:
                gate.close()
            if prompts is not None:
                prompts.close()
        if gate is not None:
            gate.scheduled(output)
        if self.evenstep is not None:
            self.evenstep.scheduled(output, began_s)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        results = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self.evenstep is not None:
            self.evenstep.stepped(results, *args, **kwargs)
        return results

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        if self.evenstep is not None:
            self.evenstep.close()
        return super().shutdown(*args, **kwargs)  # type: ignore[misc]


class EvenstepScheduler(EvenstepMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with a state stream."""


class EvenstepAsyncScheduler(EvenstepMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with a state stream."""

    _asynchronous = True
