"""Reports a vLLM scheduler to the state stream; a fault ends the stream, never the engine.

The engine's thread sends each step's changes without blocking. A second answers requests for full
snapshots and sends an idle engine's heartbeats. A third reads power: a driver may be slow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import zmq

from engine_patches.plugin import compat
from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.harmless import harmless
from engine_patches.plugin.prefixes import CachedPrefixes
from engine_patches.plugin.prompt_bound import PromptBound
from engine_patches.plugin.settings import PlugInError, Settings
from engine_patches.plugin.state import EngineRequest, EngineState, Step
from engine_patches.power.nvml import NvmlSource, open_source
from engine_patches.power.source import UNKNOWN
from engine_patches.stream.curve import CurveGate
from engine_patches.stream.publisher import SnapshotMessage, SnapshotPublisher, StepReport
from router.core.wire import is_local

log = logging.getLogger("vllm.evenstep")

_POLL_S = 0.25
_STEPS_AHEAD = 64
_ENDS = "the state stream ends here; the engine goes on without it"
_ends_stream = harmless(_ENDS)


def _cross_check(source: NvmlSource, kv_bytes: int, blocks: int) -> None:
    """Log the KV cache beside NVML's memory; warn if NVML's is less."""
    try:
        found = source.cross_check(kv_bytes, blocks)
    except Exception:
        log.exception("evenstep: NVML does not tell how much memory the engine holds")
        return
    if found is None:
        return
    enough, line = found
    log.log(logging.INFO if enough else logging.WARNING, "evenstep: %s", line)


class Admissible(Protocol):
    """Source of the admission figures."""

    @property
    def admissible_blocks(self) -> int | None:
        """Blocks of requests that could enter with an empty queue; None: it no longer decides."""

    @property
    def admission(self) -> str: ...


class _Begun(NamedTuple):
    """A step that was scheduled, whose results are still to come."""

    output: Any
    began_s: float
    number: int  # among the barrier's steps
    prompt_budget: int | None
    shared: tuple[int, int]  # as ``EngineView.next_shared``


class Reporter:
    """One engine's state stream; PlugInError: it cannot be bound, or the keys are unusable.

    Where vLLM lacks what the state consists of, and after a fault, the stream says only that.

    Args:
        admissible: None: vLLM's free memory.
        prefixes: what the prefix cache holds; None: it is not told.
        prompts: keeps budgets that routers send; None: none is taken.
        clock: for step durations, seconds.
    """

    def __init__(
        self,
        engine: EngineView,
        settings: Settings,
        admissible: Admissible | None = None,
        prefixes: CachedPrefixes | None = None,
        prompts: PromptBound | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        assert engine.rank is not None, "else it has no endpoint"
        self.endpoint = settings.endpoint(engine.rank)
        self._engine = engine
        self._admissible = admissible
        self._prefixes = prefixes
        self._prompts = prompts
        self._clock = clock
        self._wall = wall
        self._memory = engine.kv_memory
        self._state = EngineState(lists_all=not (engine.reads_tokens and engine.reads_entries))
        self._steps = 0
        self._steps_begun = 0
        self._preemptions = 0
        self._blocks_free = -1
        self._last_end_s: float | None = None
        self._ahead: deque[_Begun] = deque(maxlen=_STEPS_AHEAD)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate: CurveGate | None = None
        self._closing = threading.Event()
        gpus = engine.gpus
        self._power = (
            None if gpus is None else engine.read("power", lambda: open_source(gpus), None)
        )
        self._ends = None
        if settings.end_signal:
            self._ends = engine.read("end_signal", engine.open_ends, None)
        self._publisher = self._open(settings, engine.rank)
        self._read_power()
        if self._power is not None and self._memory is not None and engine.kv_bytes is not None:
            _cross_check(self._power, engine.kv_bytes, self._memory.blocks_total + 1)
        self._thread = threading.Thread(target=self._answer, name="evenstep", daemon=True)
        self._thread.start()
        if self._power is not None:
            threading.Thread(target=self._follow_power, name="evenstep-power", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether the stream has no state to tell."""
        return self._publisher.stateless

    @failed.setter
    def failed(self, _: bool) -> None:
        with self._publisher.lock:
            self._publisher.message.unreported = (*self._engine.lacks, "state")
            self._publisher.stateless = True

    @_ends_stream
    def arrives(self, request: EngineRequest, *_: Any, **__: Any) -> None:
        """The scheduler is about to take a request, or copy it as a session's next input."""
        if self._ends is not None:
            compat.mark(request, self._ends.number(request.request_id))

    @_ends_stream
    def arrived(self, request: EngineRequest, *_: Any, **__: Any) -> None:
        own = self._engine.alive.get(request.request_id)
        if own is None:  # the end of a session
            return
        self._state.arrived(own)
        if self._prefixes is not None:
            self._prefixes.arrived(own)

    @_ends_stream
    def scheduled(self, output: Any, began_s: float) -> None:
        """Note a scheduled step; its results come later, possibly after other steps'."""
        self._steps_begun += output.total_num_scheduled_tokens > 0
        tokens = None if self._prompts is None else self._prompts.tokens
        shared = self._engine.next_shared()
        self._ahead.append(_Begun(output, began_s, self._steps_begun, tokens, shared))
        if self._engine.reads_preemptions:
            self._preemptions += len(compat.preempted(output))
        # No lock is needed: a full snapshot does not contain what is noted here.
        self._state.flushed(output.finished_req_ids)
        entered = compat.admissions(output) if self._engine.reads_entries else ()
        for id_, cached_tokens in entered:
            self._state.admitted(id_, cached_tokens)
            if self._prefixes is not None:
                self._prefixes.admitted(id_)

    @_ends_stream
    def idled(self) -> None:
        """Note a step of the group in which this engine has nothing to compute."""
        self._steps_begun += 1
        self._last_end_s = None

    @_ends_stream
    def stepped(
        self, results: Mapping[int, Any], scheduler_output: Any, *_: Any, **__: Any
    ) -> None:
        """``results`` are those of ``update_from_output``, whose arguments follow."""
        output = scheduler_output
        now_s = self._clock()
        begun = self._begun(output, now_s)
        engine, state, publisher = self._engine, self._state, self._publisher
        scheduled, tokens = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        gained = None
        if engine.reads_tokens:
            gained = compat.gained(results, scheduled, drafts=engine.drafts)
        ahead = [later.output.num_scheduled_tokens for later in self._ahead]
        alive = engine.alive
        step = Step(engine.running, gained, alive, engine.ended, scheduled, ahead)
        message = publisher.message
        with publisher.lock:
            # During a KV transfer from or to another engine no step computes anything.
            if tokens or state.changed(step) or self._moved():
                if tokens:
                    self._steps = begun.number
                    message.wave, message.wave_step = begun.shared
                if self._ends is not None:
                    step = step._replace(end_probabilities=self._ends.changed())
                changes = state.advance(step)
                if self._prefixes is not None:
                    self._prefixes.stepped(changes.finished)
                self._describe(message)
                message.prompt_budget = begun.prompt_budget
                # It began at the end of the one before, unless the engine was idle then.
                began_s = begun.began_s if self._last_end_s is None else self._last_end_s
                message.step_s = now_s - began_s if tokens else 0.0
                message.scheduled_prefill_tokens = changes.prefill_tokens
                message.scheduled_decode_tokens = (
                    changes.decode_tokens if engine.reads_tokens else 0
                )
                publisher.publish_changes(
                    changes.rows,
                    changes.finished,
                    changes.preempted,
                    idle=not step.running,
                    growths=changes.growths,
                )
                if self._ends is not None:
                    self._ends.forget(changes.finished)
        self._last_end_s = now_s if alive else None

    def close(self) -> None:
        """No effect if the stream has ended."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self._thread.join()
            self._publisher.close()
            self._close_context()
        except Exception:
            log.exception("evenstep: the state stream was not closed properly")

    def _open(self, settings: Settings, rank: int) -> SnapshotPublisher:
        engine = self._engine
        initial = StepReport(
            step=0,
            time_s=self._wall(),
            step_s=0.0,
            slots=engine.slots,
            max_loras=engine.max_loras,
            prompt_budget=None if self._prompts is None else 0,
            unreported=(*engine.lacks,),
        )
        self._note_memory(initial)
        try:
            if settings.secret_key_file is not None:
                keys = settings.secret_key_file, settings.allowed_keys
                self._gate = CurveGate(self._context, *keys)
            return SnapshotPublisher(
                self.endpoint,
                group=settings.group,
                worker=settings.name(rank),
                rank=rank,
                stateless=not engine.readable,
                ranks=engine.ranks,
                initial=initial,
                clock=self._wall,
                context=self._context,
                rows=self._state.rows,
                prepare=self._prepare,
                cached=None if self._prefixes is None else self._prefixes.cached,
                leases=None if self._prompts is None else self._prompts.leases,
            )
        except zmq.ZMQError as error:
            self._close_context()
            raise PlugInError(
                f"evenstep.snapshots: cannot bind {self.endpoint} and the port after it "
                f"({error.strerror})"
            ) from error
        except PlugInError:
            self._close_context()
            raise

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        if "[" in self.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if self._gate is not None:
            self._gate.secure(socket)
        else:
            assert is_local(self.endpoint), "settings let nothing else through"

    def _close_context(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=0)

    def _begun(self, output: Any, now_s: float) -> _Begun:
        """The step; it was noted unless the stream began later."""
        while self._ahead:
            found = self._ahead.popleft()
            if found.output is output:
                return found
        message = self._publisher.message
        shared = message.wave, message.wave_step
        return _Begun(output, now_s, self._steps_begun, message.prompt_budget, shared)

    def _moved(self) -> bool:
        """Whether memory or the queue has changed since the last message."""
        memory = self._memory
        free = self._blocks_free if memory is None else memory.blocks_free
        return free != self._blocks_free or self._state.waiting != self._publisher.message.waiting

    def _describe(self, message: SnapshotMessage) -> None:
        """Update the fields that do not depend on a step."""
        message.step = self._steps
        message.time_s = self._wall()
        message.waiting = self._state.waiting
        message.waiting_tokens = self._state.waiting_tokens
        message.waiting_routed = self._state.waiting_routed
        self._note_memory(message)
        if self._admissible is not None:
            message.admission = self._admissible.admission
        message.preemptions_total = self._preemptions

    def _note_memory(self, message: SnapshotMessage | StepReport) -> None:
        memory = self._memory
        if memory is None:
            return
        free = memory.blocks_free
        told = None if self._admissible is None else self._admissible.admissible_blocks
        admissible = max(0, free - memory.watermark) if told is None else told
        if admissible != message.admissible_blocks:
            message.admissible_blocks = admissible
            message.admissible_kv_tokens = memory.tokens(admissible)
        if free != self._blocks_free:
            self._blocks_free = free
            message.kv_groups = memory.used(memory.blocks_total - free)

    def _answer(self) -> None:
        while not self._closing.is_set():
            try:
                self._publisher.poll(_POLL_S)
            except Exception:
                if not self.failed:
                    log.exception("evenstep: %s", _ENDS)
                self.failed = True  # heartbeats go on, and say so
                self._closing.wait(_POLL_S)

    def _follow_power(self) -> None:
        while self._power is not None and not (self.failed or self._closing.wait(_POLL_S)):
            self._read_power()

    def _read_power(self) -> None:
        if self._power is None:
            return
        reading = UNKNOWN
        try:
            reading = self._power.read(self._clock())
        except Exception:
            self._power = None
            log.exception("evenstep: no power and energy from here on")
        with self._publisher.lock:
            self._publisher.message.power_w = reading.power_w
            self._publisher.message.energy_j = reading.energy_j
