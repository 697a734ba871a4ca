"""Admission inside a vLLM scheduler: a policy chooses the requests, vLLM admits them.

Before each step all requests but the chosen ones are set aside from vLLM's queue. Running requests
are never held up. A request that was chosen but cannot run yet is not chosen again until it can.
A fault ends admission, never the engine: from then on vLLM decides alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from engine_patches.admission import ADMISSIONS, make_admission
from engine_patches.admission.ledger import Memory, Ticket
from engine_patches.admission.protocol import ledger_of
from engine_patches.admission.settings import AdmissionSettings
from engine_patches.plugin import compat
from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.compat_admission import (
    aborted,
    adapters,
    is_fetching,
    may_run,
    predicted_tokens,
    size_tokens,
)
from engine_patches.plugin.entrance import Entrance
from engine_patches.plugin.harmless import harmless
from engine_patches.plugin.settings import PlugInError
from router.core.types import ADMISSION_ENDED

# A closed gate would make the engine run hundreds of empty steps a second.
_PAUSE_S = 0.002

_ends_admission = harmless("admission ends here; from now on vLLM decides alone")


class AdmissionGate:
    """Admission of one engine; PlugInError: policy and vLLM would both reorder the queue.

    ``ahead`` steps are scheduled before the results of one are known; an ended request keeps its
    memory for as long.
    """

    def __init__(
        self,
        engine: EngineView,
        entrance: Entrance,
        settings: AdmissionSettings,
        *,
        ahead: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.failed = False
        self.policy = make_admission(settings)
        self._engine = engine
        self._entrance = entrance
        self._ahead = ahead
        self._clock = clock
        self._sleep = sleep
        self._ledger = ledger_of(self.policy)
        self._requests: dict[str, Any] = {}
        self._prefilling: set[str] = set()
        # Requests that have computed their prompts lately, with the last step that may show it.
        self._begun: dict[str, int] = {}
        self._prompt_budget = 0
        # Ids that the policy let in, in the step that is scheduled.
        self._chosen: Sequence[str] = ()
        if not (entrance.in_order or ADMISSIONS[settings.policy].in_order):
            raise PlugInError(
                f"evenstep.admission: {settings.policy} orders the queue, and so does this "
                "engine: start it with --scheduling-policy fcfs, or take headroom"
            )

    @property
    @_ends_admission
    def admissible_blocks(self) -> int | None:
        """Blocks of requests that could enter with an empty queue; None: admission has ended."""
        return max(0, self.policy.admissible_blocks(self._ledger, self._memory()))

    @property
    def admission(self) -> str:
        return ADMISSION_ENDED if self.failed else self.policy.name

    @_ends_admission
    def arrived(self, request: Any) -> None:
        id_ = request.request_id
        if id_ in self._requests:  # a session's next input
            return
        self._requests[id_] = request
        self._wait(request)

    @_ends_admission
    def open(self, prompt_budget: int = 0) -> None:
        """``prompt_budget``: most prompt tokens of the step; 0: no such bound."""
        self._prompt_budget, self._chosen = prompt_budget, ()
        for id_ in self._engine.ended:
            request = self._requests.pop(id_, None)
            if request is not None:
                self._prefilling.discard(id_)
                self._ledger.left(id_, by_itself=not aborted(request))
        if self._entrance.uneven:
            self._measure()
        for id_ in self._ready(self._ledger.postponed):
            self._ledger.resume(id_)
        if not self._ledger.waiting and not self._ledger.postponed:
            return
        now_s = self._clock()
        verdict = self.policy.admit(self._ledger, self._memory(), now_s)
        if verdict.admit is None:
            return
        admit = verdict.admit
        idle = not admit and len(self._ledger.running) <= self._entrance.paused
        if idle and verdict.wake_s is None:
            # vLLM knows better what fits into an idle engine: it drops its watermark.
            admit = [*self._ledger.waiting[:1]]
        self._chosen = [ticket.id for ticket in admit]
        self._entrance.admit(self._chosen, self._ledger.running)
        # In lockstep the other ranks compute and would wait for the sleeper; no polling occurs
        # then.
        if idle and verdict.wake_s is not None and not self._engine.lockstep:
            self._sleep(max(0.0, min(_PAUSE_S, verdict.wake_s - now_s)))

    def close(self) -> None:
        """Restore vLLM's own queue after the step is scheduled, or could not be."""
        self._entrance.admit_all()

    @_ends_admission
    def scheduled(self, output: Any) -> None:
        ledger = self._ledger
        for id_ in compat.preempted(output):
            if id_ in ledger.running:  # otherwise it was withdrawn too
                self._prefilling.discard(id_)
                ledger.preempted(id_)
        for id_, cached_tokens in compat.admissions(output):
            self._enter(self._requests[id_], cached_tokens)
        for request in self._entrance.holders:
            if request.request_id not in ledger.running:
                self._enter(request)
        outside = [id_ for id_ in self._chosen if id_ not in ledger.running]
        ready = self._ready(outside)
        for id_ in outside:
            if id_ not in ready:
                ledger.postpone(id_)
        if output.total_num_scheduled_tokens:
            ledger.stepped(self._still(output.num_scheduled_tokens))

    def _ready(self, ids: Collection[str]) -> Collection[str]:
        """Those of the waiting requests that vLLM would not pass over."""
        if not ids:
            return ()
        most = self._engine.max_loras
        taken = adapters(self._engine.running) if most else ()
        return {id_ for id_ in ids if may_run(self._requests[id_], taken, most)}

    def _wait(self, request: Any) -> None:
        hint = predicted_tokens(request)
        self._ledger.arrived(
            Ticket(
                id=request.request_id,
                prompt_tokens=request.num_prompt_tokens,
                cap_tokens=request.max_tokens + self._ahead,
                hint_tokens=None if hint is None else hint + self._ahead,
                priority=0 if self._entrance.in_order else request.priority,
                arrived_s=self._clock(),
                prefix=self._engine.memory.prefix(request),
            )
        )

    def _enter(self, request: Any, cached_tokens: int = 0) -> None:
        """The request runs, or waits with memory."""
        id_, ledger = request.request_id, self._ledger
        self._prefilling.add(id_)
        ticket = ledger.running.get(id_)
        if ticket is not None:
            if ticket.prompt_tokens == request.num_prompt_tokens:
                return
            # A session's next input.
            ledger.left(id_)
            self._wait(request)
        # What came from elsewhere is in blocks of its own.
        ledger.entered(id_, cached_tokens=0 if self._entrance.remote else cached_tokens)

    def _measure(self) -> None:
        """Enter the sizes of running requests that may have grown by other than one token."""
        ledger = self._ledger
        for id_, ticket in ledger.running.items():
            request = self._requests[id_]
            size = size_tokens(request)
            same = ticket.prompt_tokens == request.num_prompt_tokens  # else it must enter again
            if same and ledger.size_tokens(ticket) != size:
                ledger.resized(ticket, size)

    def _still(self, scheduled: dict[str, int]) -> Iterable[str]:
        """Running requests that get no token in the step just scheduled."""
        running = self._ledger.running
        if not self._prefilling and len(scheduled) == len(running):
            return ()
        for id_ in [*self._prefilling]:
            left = running[id_].uncomputed_tokens = max(0, self._prefill_left(id_))
            if not left:
                self._prefilling.discard(id_)
                if self._engine.memory.kv.windowed:
                    self._begun[id_] = self._ledger.steps + 1 + 2 * self._engine.memory.steps_ahead
        return [id_ for id_ in running if id_ not in scheduled or id_ in self._prefilling]

    def _prefill_left(self, id_: str) -> int:
        """Prompt tokens that no step so far computes."""
        request = self._requests[id_]
        whole = request.num_prompt_tokens + request.num_output_tokens
        return int(whole - request.num_computed_tokens)

    def _memory(self) -> Memory:
        """Memory for the next step; growth of running requests in it counts as used."""
        memory, running, steps = self._engine.memory, self._ledger.running, self._ledger.steps
        used = memory.blocks_total - memory.blocks_free
        promised = 0
        for id_ in self._prefilling:
            left = self._prefill_left(id_)
            promised += left
            size = self._ledger.size_tokens(running[id_])
            used += memory.kv.entering(size) - memory.kv.entering(size - left)
        apart = {*self._prefilling, *self._engine.ended}
        if self._begun:
            self._begun = {id_: step for id_, step in self._begun.items() if step >= steps}
            fresh = (running.keys() & self._begun.keys()) - apart
            used += sum(memory.growth_of(self._requests[id_]) for id_ in fresh)
            apart |= fresh
        growing: Iterable[Ticket] = running.values()
        if apart:
            growing = [one for one in growing if one.id not in apart]
        if self._ahead:  # a request whose last token is under way stays, and computes no more
            growing = [
                one
                for one in growing
                if one.offset_tokens + steps - one.prompt_tokens < one.cap_tokens - self._ahead
            ]
        sizes = np.array([one.offset_tokens for one in growing], dtype=np.int64) + steps
        step, budget = self._entrance.step_tokens, self._prompt_budget
        room = Memory(
            capacity_blocks=memory.blocks_total - memory.watermark,
            used_blocks=used + memory.kv.growth(sizes, memory.in_flight),
            slots_free=self._slots_free(),
            kv=memory.kv,
            step_tokens=step,
            prompt_tokens_left=max(0, step - promised - len(running) + len(self._prefilling)),
            hashed_tokens=memory.hashed_tokens,
            found=self._found,
            prompt_chunk=self._entrance.prompt_chunk,
        )
        return room.under(budget, len(running), promised) if budget else room

    def _slots_free(self) -> int:
        """As vLLM counts: a request whose KV is on its way takes a slot only when it has come."""
        running, taken = self._ledger.running, len(self._ledger.running)
        if self._entrance.remote:
            taken -= sum(
                is_fetching(one) and one.request_id in running for one in self._entrance.holders
            )
        return max(0, self._engine.slots - taken)

    def _found(self, ticket: Ticket) -> int:
        """Blocks of a waiting request that running ones hold; vLLM is asked only if any may."""
        memory, first = self._engine.memory, ticket.prefix[:1]
        if not first:
            return 0
        running = self._ledger.running.values()
        if memory.caches_states or first in [one.prefix[:1] for one in running]:
            return memory.blocks_found(self._requests[ticket.id])
        return 0
