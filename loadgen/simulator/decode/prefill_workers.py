"""Workers that compute prompts for the decode workers, in virtual time.

As in the live router, a prompt waits until a prefill worker is about to run out of work and has
memory, and goes to the one with the fewest outstanding prompt tokens. The emulated engine computes
it in chunks; each worker steps alone. Its KV holds memory until a decode worker has fetched it.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from loadgen.engine.engine import Engine
from loadgen.engine.kv_handoff import TransferTime
from loadgen.engine.prefill_settings import DEFAULT_CHUNK, PrefillTime
from loadgen.engine.request import EngineRequest
from loadgen.engine.stepping import Step, StepGroup, WorkerModel
from loadgen.model.power_model import PowerModel
from loadgen.simulator.decode.prefill_results import KeptMeter, Passage, PrefillResult
from loadgen.simulator.decode.request_streams import Job, Stream
from router.core.errors import ConfigError
from router.core.state.prefill_worker import CHUNKS_AHEAD, MEMORY_SHARE

_NO_BOUND = 1 << 60
_MOST_WORKERS = 100_000
_MOST_TOKENS = 10**15


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Prefill workers, and the KV transfer to the decode workers."""

    workers: int
    time: PrefillTime = field(default_factory=PrefillTime)
    chunk: int = DEFAULT_CHUNK  # upper bound on the prompt tokens of a worker's step
    kv_tokens: int = 0  # KV memory of each; 0: unbounded
    transfer: TransferTime = field(default_factory=TransferTime)

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("--prefill-workers", self.workers, 1, _MOST_WORKERS),
            ("--prefill-chunk", self.chunk, 1, _MOST_TOKENS),
            ("--prefill-kv-tokens", self.kv_tokens, 0, _MOST_TOKENS),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most:,}, got {value}")


class _Worker:
    """One prefill worker: its engine and its current step."""

    def __init__(self, config: PrefillConfig) -> None:
        memory = config.kv_tokens or _NO_BOUND
        # A prompt takes at least one token of a step, so a step never runs out of slots.
        self.engine = Engine(config.chunk, memory, chunk=config.chunk, lease_s=math.inf)
        self.left_tokens = 0  # prompt tokens to compute, including those of the current step
        self.stepping = False
        self._group = StepGroup([WorkerModel(0, self.engine)], config.time.step_time, PowerModel())
        self._backlog_tokens = CHUNKS_AHEAD * config.chunk
        self._share_tokens = MEMORY_SHARE * memory

    @property
    def takes_more(self) -> bool:
        """Whether the router sends another prompt; the rule of ``PrefillWorker``."""
        left, kept = self.left_tokens, self.engine.kept
        if left >= self._backlog_tokens:
            return False
        return not (left or len(kept)) or kept.tokens + left < self._share_tokens

    def take(self, job: Job) -> None:
        self.engine.add(EngineRequest(str(job.number), job.prompt_tokens, 1, keeps_kv=True))
        self.left_tokens += job.prompt_tokens

    def begin(self, now_s: float) -> Step | None:
        """Begin a step; None without work, or without memory for it."""
        if self.stepping or not self.engine.unfinished:
            return None
        step = self._group.begin(now_s)
        self.stepping = step.parts[0].schedule.prefill_tokens > 0
        return step if self.stepping else None

    def end(self, step: Step, now_s: float) -> list[EngineRequest]:
        """Return the requests whose prompt is computed."""
        self.stepping = False
        self.left_tokens -= step.parts[0].schedule.prefill_tokens
        (ended,) = self._group.finish(step, now_s)
        return ended


class Prefill:
    """A ``Stream`` that returns the requests of another one when their prompts are computed."""

    def __init__(self, config: PrefillConfig, source: Stream) -> None:
        self._config = config
        self._source = source
        self._workers = [_Worker(config) for _ in range(config.workers)]
        self._queue: list[tuple[int, int, Job]] = []
        self._computing: dict[str, Job] = {}
        self._keepers: dict[int, _Worker] = {}
        self._ready: list[Job] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._coming = 0
        self._now_s = 0.0
        self._passages: dict[int, Passage] = {}
        self._parts_s: list[tuple[float, ...]] = []
        self.meter = KeptMeter(config.workers)

    @property
    def inside(self) -> int:
        return self._coming + len(self._queue) + len(self._computing)

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        """Requests whose prompts have been computed since, in that order."""
        self._run(now_s, waiting)
        ready, self._ready = self._ready, []
        return ready

    def next_s(self) -> float:
        """Time of the next computed prompt, if no further fetch begins until then."""
        while not self._ready:
            at_s = self._source.next_s()
            if not self.inside:
                at_s = max(self._now_s, at_s)
            else:
                if at_s <= self._now_s:  # there are as many as are to be kept waiting
                    at_s = math.inf
                at_s = min(at_s, self._events[0][0])
            if at_s == math.inf:
                return math.inf
            self._run(at_s, 0)
        return self._now_s

    def fetch(self, job: Job, now_s: float) -> float:
        """Start the fetch of a request's KV by a decode worker; return its end."""
        passage = self._passages[job.number]
        passage.fetch_s = now_s
        passage.fetched_s = now_s + self._config.transfer.seconds(job.prompt_tokens)
        self._at(passage.fetched_s, partial(self._release, job))
        return passage.fetched_s

    def first_token(self, job: Job, now_s: float, *, counts: bool) -> None:
        """``counts`` adds the first token to the averages."""
        passage = self._passages.pop(job.number)
        if counts:
            self._parts_s.append(passage.parts_s(now_s))

    def result(self) -> PrefillResult:
        return PrefillResult.of(self._parts_s, self.meter, self.inside)

    def _run(self, until_s: float, waiting: int) -> None:
        """Run all events up to a time, and let requests arrive until then."""
        for job in self._source.due(until_s, waiting + self.inside + len(self._ready)):
            self._coming += 1
            self._at(job.arrival_s, partial(self._arrive, job))
        while self._events and self._events[0][0] <= until_s:
            # All events of one time happen; only then may workers begin a step.
            at_s = self._events[0][0]
            self._pass(at_s)
            while self._events and self._events[0][0] == at_s:
                heapq.heappop(self._events)[2]()
            self._give()
            for worker in self._workers:
                step = worker.begin(at_s)
                if step is not None:
                    for number in step.parts[0].schedule.admitted:
                        self._passages[int(number)].begun_s = self._now_s
                    self._at(self._now_s + step.seconds, partial(self._end, worker, step))
        self._pass(until_s)

    def _pass(self, now_s: float) -> None:
        idle = [worker for worker in self._workers if not worker.stepping]
        stalled = len(idle) if self._queue else sum(worker.engine.waiting > 0 for worker in idle)
        self._now_s = max(now_s, self._now_s)
        self.meter.advance(self._now_s, len(self._workers) - len(idle), stalled)

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happen))

    def _arrive(self, job: Job) -> None:
        limit = self._config.kv_tokens
        if limit and job.prompt_tokens > limit:
            raise ConfigError(
                f"--prefill-kv-tokens {limit} cannot hold a prompt of {job.prompt_tokens} tokens: "
                "give more"
            )
        self._coming -= 1
        self._passages[job.number] = Passage(job.arrival_s)
        heapq.heappush(self._queue, (job.priority, job.number, job))

    def _give(self) -> None:
        while self._queue:
            able = [worker for worker in self._workers if worker.takes_more]
            if not able:
                return
            job = heapq.heappop(self._queue)[2]
            self._computing[str(job.number)] = job
            min(able, key=lambda worker: worker.left_tokens).take(job)

    def _end(self, worker: _Worker, step: Step) -> None:
        for request in worker.end(step, self._now_s):
            job = self._computing.pop(request.id)
            self._passages[job.number].ready_s = self._now_s
            self._keepers[job.number] = worker
            self._ready.append(job)
            self.meter.keep(job.prompt_tokens)

    def _release(self, job: Job) -> None:
        self._keepers.pop(job.number).engine.kept.fetch(str(job.number))
        self.meter.keep(-job.prompt_tokens)
