"""Engines of all workers as arrays over (worker, slot): running and queued requests, and work.

KV on another engine is fetched as in vLLM: for all queued requests, once a slot is free.

No state moves from step to step: a request's first and last step are known when it starts, and its
tokens at any step follow from these.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from loadgen.simulator.decode.oracle import Foreseen
from loadgen.simulator.decode.request_streams import Job
from router.core.forecast.forecast import Floats, Ints, WorkProfile

_FAR = 1 << 40  # a step that never comes


class Residence(NamedTuple):
    """A request in a slot, from its first step to its last."""

    job: Job
    slot: int
    start_step: int
    start_s: float
    free_since: int  # step from which the slot was free before; -1: always


class Engines:
    """G workers with B slots each; requests queue in order before a full one.

    ``fetch`` starts the fetch of a request's KV at a time and returns its end; None: prompts are
    computed here.
    """

    def __init__(
        self,
        workers: int,
        slots: int,
        profile: WorkProfile,
        fetch: Callable[[Job, float], float] | None = None,
    ) -> None:
        size = workers * slots
        self._shape = (workers, slots)
        self._profile = profile
        self._number: Ints = np.zeros(size, dtype=np.int64)
        self._prompt: Ints = np.zeros(size, dtype=np.int64)
        self._start: Ints = np.zeros(size, dtype=np.int64)
        self._first: Ints = np.full(size, _FAR, dtype=np.int64)
        self._end: Ints = np.full(size, -1, dtype=np.int64)
        self._free_since = [-1] * size
        self._free = [list(range(g * slots, (g + 1) * slots))[::-1] for g in range(workers)]
        self._fetch = fetch
        self._on_way: deque[tuple[int, int, Job]] = deque()
        self._fetching: list[tuple[float, int, int, Job]] = []
        self._order = count()
        self._elsewhere: list[deque[Job]] = [deque() for _ in range(workers)]
        self._queues: list[deque[Job]] = [deque() for _ in range(workers)]
        self._firsts: dict[int, list[Residence]] = {}
        self._ends: dict[int, list[Residence]] = {}
        # Requests of each worker, shape (G,); those in transit are queued.
        self.running: Ints = np.zeros(workers, dtype=np.int64)
        self.queued: Ints = np.zeros(workers, dtype=np.int64)
        self._queued_tokens: Ints = np.zeros(workers, dtype=np.int64)

    @property
    def waiting(self) -> list[int]:
        """Queued requests that have reached the engine, per worker."""
        here: list[int] = self.queued.tolist()
        for _, worker, _ in self._on_way:
            here[worker] -= 1
        return here

    @property
    def empty(self) -> bool:
        return not (self.running.any() or self.queued.any())

    def send(self, job: Job, worker: int, arrives_step: int) -> None:
        """Send a request to a worker; it arrives at a step. Steps never decrease."""
        self._on_way.append((arrives_step, worker, job))
        self.queued[worker] += 1
        self._queued_tokens[worker] += job.prompt_tokens

    def begin(self, step: int, now_s: float) -> list[Residence]:
        """Start the requests that have reached an engine with a free slot."""
        self._receive(step, now_s)
        started = []
        for queue, free in zip(self._queues, self._free, strict=True):
            while queue and free:
                job, slot = queue.popleft(), free.pop()
                started.append(Residence(job, slot, step, now_s, self._free_since[slot]))
        self._place(started, step)
        return started

    def first_tokens(self, step: int) -> list[Residence]:
        return self._firsts.pop(step, [])

    def finish(self, step: int) -> list[Residence]:
        """Free the slots of requests whose last step this is, and return these requests."""
        ended = self._ends.pop(step, [])
        slots = [residence.slot for residence in ended]
        self._prompt[slots] = 0
        self._first[slots] = _FAR
        self._end[slots] = -1
        for slot in slots:
            self._free[slot // self._shape[1]].append(slot)
            self._free_since[slot] = step + 1
        workers = np.array(slots, dtype=np.int64) // self._shape[1]
        self.running -= np.bincount(workers, minlength=self._shape[0])
        return ended

    def tokens(self, step: int) -> Ints:
        """KV tokens of running requests at the start of the step, shape (G,)."""
        total: Ints = self._tokens(step).reshape(self._shape).sum(axis=1)
        return total

    def known_tokens(self, step: int) -> Ints:
        """``tokens`` plus the prompts of requests queued or in transit, shape (G,)."""
        return self.tokens(step) + self._queued_tokens

    def pending_prompts(self, step: int) -> Ints:
        """Prompt tokens not computed yet, running, queued or in transit, shape (G,)."""
        if self._profile.prefill_beta == 0:
            return np.zeros_like(self.running)
        left: Ints = self._prefill_left(step).reshape(self._shape).sum(axis=1)
        return left + self._queued_tokens

    def shown(self, step: int) -> tuple[list[int], list[int], list[int], list[float]]:
        """What snapshots show of a step, by worker.

        KV tokens at its end, requests, computed prompt tokens, and these times those before them.
        """
        held = self._held(self._prompt, _decoded(step + 1, self._first))
        left = self._prefill_left(step)
        computed = np.minimum(left, self._profile.prefill_chunk)
        contexts = computed * (self._prompt - left + computed / 2)
        tokens, prompts = (each.reshape(self._shape).sum(axis=1) for each in (held, computed))
        by_worker = contexts.reshape(self._shape).sum(axis=1)
        return tokens.tolist(), self.running.tolist(), prompts.tolist(), by_worker.tolist()

    def admissible_tokens(self, step: int) -> Sequence[int | None]:
        """KV tokens that each worker can take on; None: its memory is not limited."""
        return [None] * self._shape[0]

    def decoding(self, step: int) -> int:
        """Requests that get a token in this step."""
        if self._profile.prefill_beta == 0:
            return int(self.running.sum())
        return int(np.count_nonzero(self._first <= step))

    def work(self, step: int) -> Floats:
        """Work of the step in KV tokens' worth, shape (G,)."""
        profile = self._profile
        if profile.plain:
            return self.tokens(step) + profile.request_tokens * self.running
        now = np.zeros((1, 1), dtype=np.int64)
        (work,) = profile.work_at(self._tokens(step), self._prefill_left(step), now)
        total: Floats = np.where(self._end >= 0, work, 0.0).reshape(self._shape).sum(axis=1)
        return total

    def foreseen(self, step: int, cap_tokens: int) -> Foreseen:
        """All requests (running, queued, in transit) as they are before a step."""
        runs = np.flatnonzero(self._end >= 0)
        prompt = self._prompt.take(runs)
        generated = _decoded(step, self._first.take(runs))
        queues = chain(enumerate(self._queues), enumerate(self._elsewhere))
        queued = [(worker, job) for worker, queue in queues for job in queue]
        queued += [(worker, job) for _, _, worker, job in self._fetching]
        queued += [(worker, job) for _, worker, job in self._on_way]
        jobs = [job for _, job in queued]
        prompts = np.array([job.prompt_tokens for job in jobs], dtype=np.int64)
        outputs = np.array([job.output_tokens for job in jobs], dtype=np.int64)
        count = len(runs) + len(jobs)
        return Foreseen(
            id=_joined(self._number.take(runs), [job.number for job in jobs]),
            worker=_joined(runs // self._shape[1], [worker for worker, _ in queued]),
            prompt_tokens=_joined(prompt, prompts),
            generated_tokens=_joined(generated, np.zeros_like(prompts)),
            max_tokens=np.full(count, cap_tokens),
            end_probability=np.full(count, np.nan),
            prefill_left=_joined(self._prefill_left(step).take(runs), prompts),
            from_tokens=np.zeros(count, dtype=np.int64),
            remaining=_joined(
                self._end.take(runs) - (step - 1),
                self._profile.steps_before_first(prompts) + outputs,
            ),
            held_tokens=_joined(self._held(prompt, generated), prompts),
        )

    def _receive(self, step: int, now_s: float) -> None:
        """Queue the requests that have reached an engine with their KV; start the other fetches."""
        arriving = self._queues if self._fetch is None else self._elsewhere
        while self._on_way and self._on_way[0][0] <= step:
            _, worker, job = self._on_way.popleft()
            arriving[worker].append(job)
        if self._fetch is None:
            return
        self._end_fetches(now_s)
        for worker, jobs in enumerate(self._elsewhere):
            while jobs and len(self._free[worker]) > len(self._queues[worker]):
                job = jobs.popleft()
                there_s = self._fetch(job, now_s)
                heapq.heappush(self._fetching, (there_s, next(self._order), worker, job))
        self._end_fetches(now_s)

    def _end_fetches(self, now_s: float) -> None:
        while self._fetching and self._fetching[0][0] <= now_s:
            *_, worker, job = heapq.heappop(self._fetching)
            self._queues[worker].append(job)

    def _place(self, residences: Sequence[Residence], step: int) -> None:
        if not residences:
            return
        slots = np.array([residence.slot for residence in residences])
        jobs = np.array([residence.job[:3] for residence in residences], dtype=np.int64)
        numbers, prompts, outputs = jobs.T
        first = step + self._profile.steps_before_first(prompts)
        end = first + outputs - 1
        self._number[slots] = numbers
        self._prompt[slots] = prompts
        self._start[slots] = step
        self._first[slots] = first
        self._end[slots] = end
        workers = slots // self._shape[1]
        came = np.bincount(workers, minlength=self._shape[0])
        self.running += came
        self.queued -= came
        np.subtract.at(self._queued_tokens, workers, prompts)
        for residence, at, last in zip(residences, first.tolist(), end.tolist(), strict=True):
            self._firsts.setdefault(at, []).append(residence)
            self._ends.setdefault(last, []).append(residence)

    def _tokens(self, step: int) -> Ints:
        return self._held(self._prompt, _decoded(step, self._first))

    def _held(self, prompt: Ints, decoded: Ints) -> Ints:
        """With a drift, the tokens held do not grow by one per generated token."""
        if self._profile.growth != 1:
            decoded = np.rint(self._profile.growth * decoded).astype(np.int64)
        held: Ints = prompt + decoded
        return held

    def _prefill_left(self, step: int) -> Ints:
        if self._profile.prefill_beta == 0:
            return np.zeros_like(self._prompt)
        computed = self._profile.prefill_chunk * (step - self._start)
        left: Ints = np.maximum(0, self._prompt - computed)
        return left


def _decoded(step: int, first: Ints) -> Ints:
    """Steps that yielded a token, one each."""
    steps: Ints = np.maximum(0, step - first)
    return steps


def _joined(running: Ints, queued: Ints | list[int]) -> Ints:
    if not len(queued):
        return running
    return np.concatenate([running, np.array(queued, dtype=np.int64)])
