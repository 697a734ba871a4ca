"""Measurements of prefill workers: parts of the TTFT, kept KV, lost time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(slots=True)
class Passage:
    """Times of a request up to its first step, in seconds of virtual time.

    ``begun_s`` and ``ready_s`` bound its prompt's computation, ``fetch_s`` and ``fetched_s`` the
    fetch by a decode worker.
    """

    arrival_s: float
    begun_s: float = 0.0
    ready_s: float = 0.0
    fetch_s: float = 0.0
    fetched_s: float = 0.0

    def parts_s(self, first_token_s: float) -> tuple[float, ...]:
        """Parts of the TTFT, in the order of ``PrefillResult``."""
        times = (self.arrival_s, self.begun_s, self.ready_s, self.fetch_s, self.fetched_s)
        ends = (*times[1:], first_token_s)
        return tuple(end - start for start, end in zip(times, ends, strict=True))


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Averages after the warm-up; the first five add up to the mean TTFT of the same requests."""

    prefill_queue_mean_s: float | None  # from the arrival to the first step of the prompt
    prefill_mean_s: float | None  # from there to the end of the prompt's computation
    handoff_wait_mean_s: float | None  # from there to the start of the fetch by a decode worker
    kv_transfer_mean_s: float | None  # from there to the end of the fetch
    # From there to the first token: a slot, the start of a step, the step.
    first_step_mean_s: float | None
    # KV of computed prompts kept until its fetch, of all prefill workers.
    prefill_kept_mean_tokens: float
    prefill_kept_max_tokens: int
    prefill_busy_share: float  # share of the prefill workers' time in steps
    prefill_stalled_share: float  # share of their time without memory for a waiting prompt
    prefill_waiting_at_end: int  # requests whose prompts were not computed yet

    @classmethod
    def of(
        cls, parts_s: Sequence[tuple[float, ...]], meter: KeptMeter, waiting: int
    ) -> PrefillResult:
        queue_s, prefill_s, wait_s, transfer_s, step_s = (
            map(fmean, zip(*parts_s, strict=True)) if parts_s else (None,) * 5
        )
        return cls(queue_s, prefill_s, wait_s, transfer_s, step_s, *meter.figures(), waiting)


class KeptMeter:
    """Meter of the KV tokens kept by all prefill workers, and of the workers' time."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._now_s = 0.0
        self._tokens = 0
        self.restart()

    def restart(self) -> None:
        self._most_tokens = self._tokens
        self._since_s = self._now_s
        self._token_s = self._busy_s = self._stalled_s = 0.0

    def keep(self, tokens: int) -> None:
        """Keep so many tokens more; below 0, fewer."""
        self._tokens += tokens
        self._most_tokens = max(self._most_tokens, self._tokens)

    def advance(self, now_s: float, busy: int, stalled: int) -> None:
        """Advance the time, during which workers were in a step or lacked memory for one."""
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        self._token_s += elapsed_s * self._tokens
        self._busy_s += elapsed_s * busy
        self._stalled_s += elapsed_s * stalled

    def figures(self) -> tuple[float, int, float, float]:
        """Mean and maximum of kept tokens; shares of time in steps, without memory."""
        elapsed_s = (self._now_s - self._since_s) or 1.0
        worker_s = elapsed_s * self._workers
        shares = self._busy_s / worker_s, self._stalled_s / worker_s
        return self._token_s / elapsed_s, self._most_tokens, *shares
