from __future__ import annotations

from collections.abc import Sequence

from router.core.policies.policy_protocol import NOTHING, Known
from router.core.types import Assignment, Request, WorkerView


class Room:
    """A mutable copy of the workers of one round, by index.

    One entry per worker; those from ``waiting`` on do not change.
    """

    def __init__(self, workers: Sequence[WorkerView], known: Known = NOTHING) -> None:
        self.known = known
        self.ids = [worker.id for worker in workers]
        self.load_tokens = [worker.load_tokens for worker in workers]
        self.requests = [worker.requests for worker in workers]
        self.capacity = [worker.capacity for worker in workers]
        self.pending = [worker.pending_prompt_tokens for worker in workers]
        self.waiting = [worker.waiting for worker in workers]
        self.kv_usage = [worker.kv_usage for worker in workers]
        self.slots = [worker.slots for worker in workers]
        self.rate = [worker.service_rate for worker in workers]
        self.rate_error = [worker.rate_error for worker in workers]
        self.assignments: list[Assignment] = []

    def open_to(self, request: Request) -> list[int]:
        """Workers with room for all engine requests of a request, else for some."""
        some = [i for i, capacity in enumerate(self.capacity) if capacity > 0]
        return [i for i in some if self.capacity[i] >= request.slots] or some

    def ahead(self, index: int, request: Request) -> int:
        """Engine requests that must leave before all of a request can run: (Z - c + 1)^+."""
        return max(0, self.requests[index] + request.slots - self.slots[index])

    def idle(self, request: Request, open_: Sequence[int]) -> Sequence[int]:
        """Workers that would run it at once, else those that would run a part, else all."""
        some = [i for i in open_ if self.requests[i] < self.slots[i]]
        return [i for i in some if not self.ahead(i, request)] or some or open_

    def cached(self, index: int, request: Request) -> int:
        """Tokens of a request's prompt that a worker has cached; 0 if unknown."""
        return self.known.hits(request)[index] if self.known.hits else 0

    def prompt_work(self, index: int, request: Request) -> int:
        """Prompt tokens that a worker would have to compute with this request."""
        return (
            self.pending[index] + request.load_tokens - self.cached(index, request) * request.slots
        )

    def place(self, index: int, request: Request) -> None:
        self.pending[index] = self.prompt_work(index, request)
        self.load_tokens[index] += request.load_tokens
        self.requests[index] += request.slots
        self.capacity[index] -= request.slots
        self.assignments.append(Assignment(request.id, self.ids[index]))
