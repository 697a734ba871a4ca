"""Work of requests and predicted loads of workers, step by step, in KV tokens' worth.

A decision precedes step k. During step k a running request holds its prompt and the tokens
generated so far; it yields tokens at the step's end. It runs at step k + h if it has more than h
such steps left. The K = H + 1 columns stand for steps k, k + 1, …, k + H. Arrays of shape (n, K)
are stored step by step, since numpy is fast along the long axis n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from router.core.types import Assignment, Request, WorkerView

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

DEFAULT_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class WorkProfile:
    """BF-IO's general workload profile (arXiv 2601.17855, sections 3 and 5.1), one per group.

    MLA has fewer bytes per token, not fewer tokens: its profile is that of full attention.

    Raises:
        ValueError: a value is out of range.
    """

    # Tokens gained per step: 1 for plain decoding, more with accepted drafts, 0 for constant work.
    growth: float = 1.0
    window: int | None = None  # tokens that a sliding-window layer attends to; None: full attention
    window_share: float = 1.0  # fraction of the layers with the window
    request_tokens: float = 0.0  # fixed cost of a running request, t_r / t_l
    # Work per computed prompt token, t_p / t_l; 0 where other workers prefill.
    prefill_beta: float = 0.0
    prefill_chunk: int = DEFAULT_CHUNK  # most prompt tokens of a request per step

    def __post_init__(self) -> None:
        for name in ("growth", "request_tokens", "prefill_beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: give a number from 0 up")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window}: give 1 token or more, or none at all")
        if not 0 <= self.window_share <= 1:
            raise ValueError(f"window_share {self.window_share}: give a fraction from 0 to 1")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk {self.prefill_chunk}: give 1 token or more")

    @property
    def plain(self) -> bool:
        """True if work is linear in tokens and steps: no window, no prefill."""
        return self.window is None and self.prefill_beta == 0

    @property
    def step_tokens(self) -> float:
        """More than one with accepted drafts."""
        return max(1.0, self.growth)

    def work(self, tokens: Ints, prefill_left: Ints, steps: int) -> Floats:
        """Work at step k + h in column h, and in the last one the prompt tokens left then as well.

        An engine's budget for prompts holds for a worker's step, whatever waits there: what one
        step cannot compute delays a later one. So without a look-ahead prompts count whole. As KV
        tokens a prompt counts in full from its request's first step, computed or not, as in
        snapshots.

        ``tokens`` are prompt and generated ones at the next step; both arrays have shape (n,), the
        result (n, K) with K ``steps``.
        """
        if self.plain:
            ahead = np.arange(steps, dtype=np.float64)
            return (tokens + (self.request_tokens + self.growth * ahead)[:, None]).T
        work = self.work_at(tokens, prefill_left, np.arange(steps)[:, None])
        if self.prefill_beta > 0:
            left = np.maximum(0, prefill_left - steps * self.prefill_chunk)
            work[-1] += self.prefill_beta * left
        return work.T

    def work_at(self, tokens: Ints, prefill_left: Ints, ahead: Ints) -> Floats:
        """Work of each step alone; shape (K, n) for steps k + ahead of shape (K, 1)."""
        held: Floats = tokens + self.growth * self.decoded(prefill_left, ahead)
        if self.window is not None:
            seen = np.minimum(held, self.window)
            held = (1 - self.window_share) * held + self.window_share * seen
        held += self.request_tokens
        if self.prefill_beta > 0:
            left = np.maximum(0, prefill_left - ahead * self.prefill_chunk)
            held += self.prefill_beta * np.minimum(self.prefill_chunk, left)
        return held

    def decoded(self, prefill_left: Ints, ahead: Ints) -> Ints:
        """Number of steps before k + ahead that yield tokens, a prefill's last step included.

        Shapes as in ``work_at``; the shape of the steps if nothing is prefilled.
        """
        if self.prefill_beta == 0:
            return ahead
        steps: Ints = np.maximum(0, ahead - self.steps_before_first(prefill_left))
        return steps

    def steps_before_first(self, prefill_left: Ints) -> Ints:
        """Steps that compute a prompt without yielding a token; shape (n,)."""
        if self.prefill_beta == 0:
            return np.zeros_like(prefill_left)
        return np.maximum(0, -(-prefill_left // self.prefill_chunk) - 1)


NO_CAP = 1 << 40  # cap of a request without one


@dataclass(frozen=True, slots=True)
class Running:
    """Running engine requests of a group, one row each; every column has shape (n,).

    A dispatched request that no engine has shown yet has no output and its whole prompt to compute.
    """

    id: Ints  # unique among running requests
    worker: Ints  # index, 0 to G - 1
    prompt_tokens: Ints
    generated_tokens: Ints
    max_tokens: Ints  # cap of its output, or ``NO_CAP``
    end_probability: Floats  # the engine's, that the next token is the last; nan if not reported
    prefill_left: Ints
    from_tokens: Ints  # output at its first sight; see ``Departure``

    def __len__(self) -> int:
        return len(self.id)

    @property
    def tokens(self) -> Ints:
        return self.prompt_tokens + self.generated_tokens

    def take(self, rows: NDArray[np.integer | np.bool] | slice) -> Self:
        return type(self)(*(getattr(self, column.name)[rows] for column in fields(self)))


@dataclass(frozen=True, slots=True)
class Ends:
    """Certain ends: a request runs at step k + h if h < steps; shape (n,), at least 1."""

    steps: Ints

    def chances(self, steps: int) -> Floats:
        return (self.steps > np.arange(steps)[:, None]).astype(np.float64).T


@dataclass(frozen=True, slots=True)
class Chances:
    """Of each request, that it runs at step k + h: shape (n, K), 1 in column 0, never rising."""

    probabilities: Floats

    def chances(self, steps: int) -> Floats:
        return self.probabilities[:, :steps]


Prediction = Ends | Chances


def forecast(
    running: Running, prediction: Prediction, profile: WorkProfile, workers: int, horizon: int
) -> Floats:
    """Expected work of each worker without newcomers, in KV tokens; shape (G, H + 1).

    O(n + G K) for certain ends and linear work, else O(n K). Requests may be in any order; the
    prediction has the same rows.
    """
    if isinstance(prediction, Ends) and profile.plain:
        return _linear(running, prediction.steps, profile, workers, horizon + 1)
    work = profile.work(running.tokens, running.prefill_left, horizon + 1).T
    work *= prediction.chances(horizon + 1).T
    place = running.worker + workers * np.arange(horizon + 1)[:, None]
    bins = workers * (horizon + 1)
    by_step = np.bincount(place.ravel(), work.ravel(), bins).reshape(horizon + 1, workers)
    return by_step.T.astype(np.float64, order="C")  # bincount of nothing returns integers


def _linear(running: Running, ends: Ints, profile: WorkProfile, workers: int, steps: int) -> Floats:
    """Sum up from counts by (worker, end), from the back: what ends later still runs."""
    bins = workers * (steps + 1)
    place = np.minimum(ends, steps)
    place += running.worker * (steps + 1)
    count = _from_the_back(np.bincount(place, minlength=bins), workers)
    held = _from_the_back(np.bincount(place, running.tokens, bins), workers)
    return held + count * (profile.request_tokens + profile.growth * np.arange(steps))


def _from_the_back(by_end: NDArray[np.number], workers: int) -> Floats:
    sums = by_end.reshape(workers, -1)[:, :0:-1].cumsum(axis=1, dtype=np.float64)
    return sums[:, ::-1]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted loads of a group's workers, and their weights (``Parameters``).

    ``work`` has shape (G, H + 1): work of present requests at step k + h, in KV tokens; rows in the
    order of the views. ``profile``: cost of a new request.
    """

    work: Floats
    profile: WorkProfile
    discount: float
    tie_weight: float
    lead_tokens: float = 0.0

    def request_work(self, requests: Sequence[Request]) -> Floats:
        """Shape (R, H + 1)."""
        pairs = np.array([(request.prompt_tokens, request.slots) for request in requests])
        prompts, slots = pairs.reshape(-1, 2).astype(np.int64, copy=False).T
        work = self.profile.work(prompts, prompts, self.work.shape[1])
        return work if (slots == 1).all() else slots[:, None] * work

    def after(
        self,
        assignments: Sequence[Assignment],
        by_id: Mapping[str, Request],
        workers: Sequence[WorkerView],
    ) -> Outlook:
        row = {worker.id: index for index, worker in enumerate(workers)}
        entered = [by_id[assignment.request_id] for assignment in assignments]
        rows = [row[assignment.worker_id] for assignment in assignments]
        work = self.work.copy()
        np.add.at(work, rows, self.request_work(entered))
        return replace(self, work=work)
