"""One rank: an engine, and what it tells the router after each step, as the plug-in does."""

from loadgen.engine.engine import Engine
from loadgen.engine.engine_state import IDLE, state_of
from loadgen.engine.request import EngineRequest
from loadgen.engine.schedule import Schedule
from router.core.types import RunningRequest, Snapshot


class Rank:
    """An engine with its snapshots."""

    def __init__(self, worker_id: str, group: str, rank: int, engine: Engine) -> None:
        self.worker_id = worker_id
        self.engine = engine
        # Requests that got their first token in the last step.
        self.entered: list[EngineRequest] = []
        self.ended: list[EngineRequest] = []  # those that it completed
        self._group = group
        self._rank = rank
        self._requests: dict[str, EngineRequest] = {}
        # Running ones whose prompts are being computed: a delta lists them.
        self._computing: dict[str, EngineRequest] = {}
        self._schedule = IDLE

    def add(self, request: EngineRequest) -> None:
        self._requests[request.id] = request
        self.engine.add(request)

    @property
    def decodes(self) -> bool:
        """Whether a running request has had its first token."""
        return len(self.engine.running) > len(self._computing)

    @property
    def resident_tokens(self) -> int:
        """KV tokens of running requests, without prompt tokens still to be computed."""
        engine = self.engine
        return engine.load_tokens - engine.pending_prompt_tokens + engine.waiting_tokens

    def begin(self, now_s: float, *, prefill: bool) -> Schedule:
        self._schedule = schedule = self.engine.schedule(now_s, prefill=prefill)
        for request_id in schedule.preempted:
            self._computing.pop(request_id, None)
        for request_id in schedule.admitted:
            self._computing[request_id] = self._requests[request_id]
        return schedule

    def finish(self, now_s: float, step: int, step_s: float) -> Snapshot:
        """End the step; all running requests that are not listed grew by one token."""
        self.ended = self.engine.advance(now_s)
        for request in self.ended:
            del self._requests[request.id]
        listed, self._computing = self._computing, {}
        self.entered = []
        for request in listed.values():
            if request.prefill_left:
                self._computing[request.id] = request
            elif request.generated_tokens == 1:
                self.entered.append(request)
        return self.snapshot(now_s, step, step_s, listed)

    def snapshot(
        self, now_s: float, step: int, step_s: float, listed: dict[str, EngineRequest] | None
    ) -> Snapshot:
        """A delta after a step; with None for the listed requests a full one of an idle engine."""
        return Snapshot(
            kind="full" if listed is None else "delta",
            group=self._group,
            worker=self.worker_id,
            rank=self._rank,
            epoch="e",
            sequence=step,
            step=step,
            time_s=now_s,
            step_s=step_s,
            running=tuple(
                RunningRequest(
                    each.id,
                    each.prompt_tokens,
                    each.generated_tokens,
                    each.cached_tokens,
                    each.prefill_left,
                )
                for each in (listed or {}).values()
            ),
            finished=tuple([each.id for each in self.ended]),
            prompt_budget=self.engine.prompt_budget or 0,
            **state_of(self.engine, self._schedule),
        )
