"""Predicted loads of the workers over a short look-ahead (arXiv 2601.17855, section 4).

A decision is made before step k. A running request holds its prompt and the tokens generated so far
during step k and yields tokens at its end, so it also runs at step k + h if more than h such steps
are still to come. K = H + 1 columns always stand for the steps k, k + 1, …, k + H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from router.tier import Tier
from router.types import Assignment, Request, WorkerView
from router.workload import Floats, Ints, WorkProfile

NO_CAP = 1 << 40  # max_tokens of a request whose output nobody has capped


@dataclass(frozen=True, slots=True)
class Running:
    """The engine requests that run in a group, one row each; every column has shape (n,).

    A request on its way that no engine has shown yet is a row without generated tokens whose
    prompt is still to be computed.

    Attributes:
        id: opaque, unique among the running ones.
        worker: index of its worker, 0 to G - 1.
        prompt_tokens: of its prompt.
        generated_tokens: output tokens so far.
        max_tokens: its output's cap, ``NO_CAP`` where there is none.
        end_probability: that its next token is the last, as the engine reports; nan if it does not.
        prefill_left: prompt tokens that are still to be computed.
        from_tokens: output that it had when it was seen first, or again; see ``Departure``.
    """

    id: Ints
    worker: Ints
    prompt_tokens: Ints
    generated_tokens: Ints
    max_tokens: Ints
    end_probability: Floats
    prefill_left: Ints
    from_tokens: Ints

    def __len__(self) -> int:
        return len(self.id)

    @property
    def tokens(self) -> Ints:
        """KV tokens held during the coming step."""
        return self.prompt_tokens + self.generated_tokens

    def take(self, rows: NDArray[np.integer | np.bool] | slice) -> Self:
        """Some of the rows."""
        return type(self)(*(getattr(self, column.name)[rows] for column in fields(self)))


@dataclass(frozen=True, slots=True)
class Ends:
    """When each request ends, as if it were certain: it runs at step k + h if h < steps.

    Attributes:
        steps: shape (n,), at least 1.
    """

    steps: Ints

    def chances(self, steps: int) -> Floats:
        """The same as probabilities, shape (n, steps)."""
        return (self.steps > np.arange(steps)[:, None]).astype(np.float64).T


@dataclass(frozen=True, slots=True)
class Chances:
    """How probable it is that each request still runs.

    Attributes:
        probabilities: shape (n, K), that it runs at step k + h; 1 in column 0, never rising.
    """

    probabilities: Floats

    def chances(self, steps: int) -> Floats:
        """Those of the first steps, shape (n, steps)."""
        return self.probabilities[:, :steps]


Prediction = Ends | Chances


class Signal(Protocol):
    """Predicts when running requests end."""

    def predict(self, running: Running, horizon: int) -> Prediction:
        """When they end, as far as steps k to k + horizon can tell; rows as in ``running``."""
        ...


def forecast(
    running: Running, prediction: Prediction, profile: WorkProfile, workers: int, horizon: int
) -> Floats:
    """Expected work of each worker over the look-ahead, if nothing new enters.

    Takes O(n + G K) where ends are certain and work grows evenly, else O(n K).

    Args:
        running: n requests; rows need not be sorted.
        prediction: when they end, row by row.
        profile: what they cost.
        workers: G.
        horizon: H.

    Returns:
        Shape (G, H + 1), KV tokens' worth of work at step k + h in column h.
    """
    if isinstance(prediction, Ends) and profile.plain:
        return _linear(running, prediction.steps, profile, workers, horizon + 1)
    ahead = np.arange(horizon + 1)[:, None]
    work = profile.work_at(running.tokens, running.prefill_left, ahead)
    work *= prediction.chances(horizon + 1).T
    place = running.worker + workers * ahead
    bins = workers * (horizon + 1)
    by_step = np.bincount(place.ravel(), work.ravel(), bins).reshape(horizon + 1, workers)
    return by_step.T.astype(np.float64, order="C")  # of nobody bincount makes whole numbers


def _linear(running: Running, ends: Ints, profile: WorkProfile, workers: int, steps: int) -> Floats:
    """The sums from counts by (worker, end), read from the back: who ends later, runs still."""
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
    """What is predicted of the workers of a group, and how it is to be weighed.

    Attributes:
        work: shape (G, H + 1), KV tokens' worth of work of each worker at step k + h, the requests
            that are on it now; rows in the order of the views.
        profile: what a new request adds.
        discount: gamma, weight of a step against the one before it.
        tie_weight: mu of the quadratic term, in 1/tokens.
        lead_tokens: how far below the others a worker that can be filled is to be left.
    """

    work: Floats
    profile: WorkProfile
    discount: float
    tie_weight: float
    lead_tokens: float = 0.0

    def request_work(self, requests: Sequence[Request]) -> Floats:
        """What each request would add to its worker; shape (R, H + 1)."""
        pairs = np.array([(request.prompt_tokens, request.slots) for request in requests])
        prompts, slots = pairs.reshape(-1, 2).astype(np.int64, copy=False).T
        work = self.profile.work(prompts, prompts, self.work.shape[1])
        return work if (slots == 1).all() else slots[:, None] * work

    def after(
        self,
        assignments: Sequence[Assignment],
        tier: Tier,
        workers: Sequence[WorkerView],
    ) -> Outlook:
        """The outlook once requests of a tier have been assigned."""
        row = {worker.id: index for index, worker in enumerate(workers)}
        entered = [tier.by_id[assignment.request_id] for assignment in assignments]
        rows = [row[assignment.worker_id] for assignment in assignments]
        work = self.work.copy()
        np.add.at(work, rows, self.request_work(entered))
        return replace(self, work=work)
