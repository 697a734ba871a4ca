"""Which answers of an engine are asked for anew elsewhere, and how many of them.

Lost connections are another matter: their worker is out of use at once, so that they cannot become
many. Answers can: engines that are all overloaded refuse what others refused before.
"""

from __future__ import annotations

from router.recent import Recent

# However long an engine asks to be left alone: it may have said so to all of its clients.
MOST_REST_S = 5.0
WINDOW_S = 10.0

_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS = 408, 429
_SERVER_ERROR, _NOT_IMPLEMENTED, _UNAVAILABLE = 500, 501, 503


def faults(status: int) -> bool:
    """Whether an answer speaks against its worker; 501 says what no engine of the kind can do."""
    return status >= _SERVER_ERROR and status != _NOT_IMPLEMENTED


def may_differ_elsewhere(status: int) -> bool:
    """Whether another worker may answer better; a client's own mistakes stay mistakes."""
    return faults(status) or status in (_REQUEST_TIMEOUT, _TOO_MANY_REQUESTS)


def rest_s(status: int, retry_after: bytes) -> float:
    """For how long a worker asks to be given nothing, in seconds; 0: it does not.

    Args:
        status: of its answer.
        retry_after: the header, empty if there is none.
    """
    if status not in (_TOO_MANY_REQUESTS, _UNAVAILABLE) or not retry_after.isdigit():
        return 0.0
    return min(float(retry_after), MOST_REST_S)


class RetryBudget:
    """Retries as a share of the requests of the last ten seconds, and some at any rate.

    Args:
        share: retries for each request.
        min_per_s: retries in a second however few the requests.
    """

    def __init__(self, share: float, min_per_s: float) -> None:
        self.configure(share, min_per_s)
        self._requests = Recent(WINDOW_S)
        self._retries = Recent(WINDOW_S)

    def configure(self, share: float, min_per_s: float) -> None:
        """Allow so many from now on; see the arguments of the class."""
        self._share = share
        self._always = min_per_s * WINDOW_S

    def earn(self, now_s: float) -> None:
        """A request has come."""
        self._requests.add(now_s)

    def spend(self, now_s: float) -> bool:
        """Take one retry out, if there is one."""
        allowed = self._share * self._requests.count(now_s) + self._always
        if self._retries.count(now_s) + 1 > allowed:
            return False
        self._retries.add(now_s)
        return True
