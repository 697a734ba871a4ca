"""Prompt sizes as a router sees them that has not been told the exact ones."""

from __future__ import annotations

import math
import random

from loadgen.simulator.decode.arrivals import Job


def seen_prompt_tokens(job: Job, sigma: float, seed: int) -> int:
    """A prompt's size with an error, the same whenever it is asked for; at least 1.

    Live, sizes are estimated from bytes of text by a ratio of sums, so that the mean is right.

    Args:
        job: whose prompt it is.
        sigma: of the logarithm of the lognormal factor, whose mean is 1; 0: the exact size.
        seed: of the simulation.
    """
    if sigma == 0:
        return job.prompt_tokens
    factor = random.Random(f"{seed} {job.number}").lognormvariate(-(sigma**2) / 2, sigma)
    return max(1, math.ceil(job.prompt_tokens * factor))
