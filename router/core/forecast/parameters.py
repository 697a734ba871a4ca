"""Parameters of BF-IO's look-ahead (arXiv 2601.17855, section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import Running, Signal

NEEDED_SKILL = 0.35
BLIND_TIE_WEIGHT = 0.1
WINDOW = 2.0  # effective look-ahead in steps where a worker completes one request per step
WINDOW_STEPS = (1.5, 10.0)  # its bounds
WINDOWS_SEEN = 4.0  # the horizon, in effective look-aheads
TIE_WEIGHT = 1.2e-5  # where a worker completes one request per step
TIE_WEIGHTS = (1e-4, 1e-3)  # its bounds
MANY_WORKERS = 64  # above, 30,000 moves level all only with the upper bound
# Lead of a worker with free slots below the others, as a share of the tokens that it gains until
# its next free slot: without and with look-ahead.
BLIND_LEAD = 1.5
LEAD = 0.5


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of BF-IO's objective.

    Attributes:
        horizon: H, steps beyond the coming one.
        discount: gamma, weight of a step relative to the one before.
        tie_weight: mu of the quadratic term, in 1/tokens.
        lead_tokens: tokens by which a worker with free slots should end below the others.
    """

    horizon: int
    discount: float
    tie_weight: float
    lead_tokens: float = 0.0

    def __post_init__(self) -> None:
        if self.horizon < 0:
            raise ValueError(f"horizon {self.horizon}: give 0 steps or more")
        if not 0 < self.discount <= 1:
            raise ValueError(f"discount {self.discount}: give more than 0 and at most 1")
        if not 0 <= self.tie_weight < math.inf:
            raise ValueError(f"tie_weight {self.tie_weight}: give a number from 0 up")
        if not 0 <= self.lead_tokens < math.inf:
            raise ValueError(f"lead_tokens {self.lead_tokens}: give a number from 0 up")


def choose(
    workers: int,
    slots: int,
    output_steps: float,
    skill: float | None,
    horizon: int | None = None,
    growth: float = 1.0,
) -> Parameters:
    """The rule for H, gamma, mu and the lead.

    A request decodes for S steps (E[o] over the tokens of a step), so a full worker completes one
    every e = S / B steps. A choice matters until later ones on that worker make up for it. So the
    effective look-ahead w = 1 / (1 - gamma) grows with e, though more slowly: distant steps depend
    on choices still open. Without a signal no look-ahead is best, and mu does the work.

    =====  ==========================  =============================
    .      skill < ``NEEDED_SKILL``    else
    =====  ==========================  =============================
    w      -                           2 e^(1/2), 1.5 to 10 steps
    H      0                           4 w
    gamma  1                           1 - 1 / w
    mu     0.1                         1.2e-5 e^2, 1e-4 to 1e-3; 1e-3 above G = 64
    lead   1.5 S growth                0.5 S growth
    =====  ==========================  =============================

    The lead is not in the paper. The program ignores that the others refill as their requests end,
    while a worker just filled gains S growth tokens until its next end.

    Fitted to simulations of BurstGPT and Azure conv lengths (e from 0.8 to 9, oracles that miss
    none to half of the ends) at 16 to 64 workers. With 128 and more the search needs a steeper way
    to its goal. A single worker has nothing to balance: H = 0.

    ``workers`` is G, ``slots`` B of each, ``output_steps`` the mean S, ``growth`` the tokens gained
    per step. A given horizon is kept, and the rest chosen for it.
    """
    completion_steps = output_steps / slots
    window = _between(WINDOW_STEPS, WINDOW * math.sqrt(completion_steps))
    if horizon is None:
        sees = workers > 1 and skill is not None and skill >= NEEDED_SKILL
        horizon = math.ceil(WINDOWS_SEEN * window) if sees else 0
    if horizon == 0:
        return Parameters(0, 1.0, BLIND_TIE_WEIGHT, BLIND_LEAD * growth * output_steps)
    wanted = math.inf if workers > MANY_WORKERS else TIE_WEIGHT * completion_steps**2
    tie_weight = _between(TIE_WEIGHTS, wanted)
    return Parameters(horizon, 1 - 1 / window, tie_weight, LEAD * growth * output_steps)


def _between(bounds: tuple[float, float], value: float) -> float:
    return min(max(value, bounds[0]), bounds[1])


class SkillMeter:
    """Brier skill of a signal's predictions of ends within some steps.

    The score is the mean of (chance - outcome)^2. The skill is 1 less the ratio of the score to
    that of the base rate: 1 for an oracle, 0 for no gain. It notes a sample of the running
    requests, and the next one once these outcomes are known. Aborted requests are left out.

    Args:
        steps: number of steps ahead.
        sample: requests noted at a time.
        memory: outcomes after which an older one counts 1/e.
        evidence: outcomes of each kind needed for a result.
    """

    def __init__(
        self, steps: int = 16, sample: int = 512, memory: int = 16384, evidence: float = 16
    ) -> None:
        self._steps = steps
        self._sample = sample
        self._memory = memory
        self._evidence = evidence
        self._noted: dict[int, float] = {}
        self._left = 0
        self._fresh = np.zeros(3)
        self._sums = np.zeros(3)

    @property
    def due(self) -> bool:
        """True if no noted outcome is pending."""
        return self._left <= 0

    @property
    def skill(self) -> float | None:
        """At most 1; None with too few outcomes."""
        count, ends, errors = self._sums.tolist()
        if min(ends, count - ends) < self._evidence:
            return None
        return 1 - float(errors / (ends * (1 - ends / count)))

    def note(self, running: Running, signal: Signal) -> None:
        """Note the signal's predictions before step k; needs ``due``."""
        sample = running.take(slice(None, None, -(-len(running) // self._sample) or 1))
        chances = signal.predict(sample, self._steps).chances(self._steps + 1)
        self._noted = dict(zip(sample.id.tolist(), (1 - chances[:, -1]).tolist(), strict=True))
        self._left = self._steps

    def ended(self, departure: Departure) -> None:
        chance = self._noted.pop(departure.id, None)
        if chance is not None and departure.completed:
            self._fresh += (1.0, 1.0, (chance - 1) ** 2)

    def advance(self, steps: int) -> None:
        if self.due:
            return
        self._left -= steps
        if self.due:
            self._close()

    def _close(self) -> None:
        chances = np.array(list(self._noted.values()))
        self._fresh += (len(chances), 0.0, np.square(chances).sum())
        self._sums *= math.exp(-self._fresh[0] / self._memory)
        self._sums += self._fresh
        self._fresh = np.zeros(3)
        self._noted = {}
