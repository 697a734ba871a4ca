"""Prompt sizes as a router estimates them without exact counts."""

import math
import random

from loadgen.simulator.decode.request_streams import Job


def seen_prompt_tokens(job: Job, sigma: float, seed: int) -> int:
    """Return a prompt's size with an error, at least 1; the same at every call.

    The live router estimates sizes from bytes of text by a ratio of sums, so the mean is right.
    """
    if sigma == 0:
        return job.prompt_tokens
    factor = random.Random(f"{seed} {job.number}").lognormvariate(-(sigma**2) / 2, sigma)
    return max(1, math.ceil(job.prompt_tokens * factor))
