from __future__ import annotations

from collections.abc import Sequence

from router.core.stats import TokenStats


class TokenTimes:
    """Times at which one stream's tokens were forwarded.

    With several ``answers`` in it there is no ITL, since their tokens are mixed.
    """

    __slots__ = ("_answers", "_first_s", "_last_s", "_stats", "_tokens")

    def __init__(self, stats: TokenStats, answers: int) -> None:
        self._stats = stats
        self._answers = answers
        self._tokens = 0
        self._first_s = self._last_s = 0.0

    def passed(self, tokens: int, now_s: float) -> None:
        """Record the number of tokens forwarded so far."""
        if tokens <= self._tokens:
            return
        if not self._tokens:
            self._first_s = now_s
        elif self._answers == 1:
            self._stats.itl_s.observe(now_s - self._last_s)
        self._tokens, self._last_s = tokens, now_s

    def each(self, times_s: Sequence[float]) -> None:
        """Record one token at each of these times; at least one."""
        if not self._tokens:
            self._first_s = self._last_s = times_s[0]
            self._tokens, times_s = 1, times_s[1:]
        if self._answers == 1:
            observe, before_s = self._stats.itl_s.observe, self._last_s
            for time_s in times_s:
                observe(time_s - before_s)
                before_s = time_s
        self._tokens += len(times_s)
        self._last_s = times_s[-1] if times_s else self._last_s

    def end(self) -> None:
        """Record TPOT; answers are taken to be equally long."""
        tokens = self._tokens / self._answers
        if tokens > 1:
            self._stats.tpot_s.observe((self._last_s - self._first_s) / (tokens - 1))
