"""The error of calls that the picker refuses.

It is apart from the request router, whose module Ray copies: an ``except`` elsewhere would not know
the copy's class.
"""

from ray.serve.exceptions import RayServeException


class RefusedError(RayServeException):  # type: ignore[misc]
    """The picker refused a request: ``status`` and ``body`` are what its client should get."""

    def __init__(self, status: int, body: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, body, retry_after_s)  # what pickle makes a copy from
        self.status, self.body, self.retry_after_s = status, body, retry_after_s

    def __str__(self) -> str:
        return f"evenstep pick: {self.status} {self.body}"
