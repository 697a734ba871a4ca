"""What a policy writes on while it assigns: loads, counts and capacity, in plain lists."""

from __future__ import annotations

from collections.abc import Sequence

from router.types import Assignment, Request, WorkerView


class Room:
    """A mutable copy of the workers of one round, by index.

    Attributes:
        ids, load_tokens, requests, capacity, waiting, kv_usage: one entry per worker; the last two
            stay as they were reported.
        assignments: what has been placed so far.
    """

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        self.ids = [worker.id for worker in workers]
        self.load_tokens = [worker.load_tokens for worker in workers]
        self.requests = [worker.requests for worker in workers]
        self.capacity = [worker.capacity for worker in workers]
        self.waiting = [worker.waiting for worker in workers]
        self.kv_usage = [worker.kv_usage for worker in workers]
        self.assignments: list[Assignment] = []

    def open_to(self, request: Request) -> list[int]:
        """Workers that can take it: those with room for all its parts, else with room for any."""
        some = [i for i, capacity in enumerate(self.capacity) if capacity > 0]
        return [i for i in some if self.capacity[i] >= request.slots] or some

    def place(self, index: int, request: Request) -> None:
        """Assign a request to the worker at an index."""
        self.load_tokens[index] += request.load_tokens
        self.requests[index] += request.slots
        self.capacity[index] -= request.slots
        self.assignments.append(Assignment(request.id, self.ids[index]))
