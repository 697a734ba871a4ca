"""What all simulations of a diagnosis share: the recorded conditions, and what is read off."""

import math
from dataclasses import dataclass

import numpy as np

from loadgen.diagnose.analysis.findings import Findings
from loadgen.diagnose.analysis.prospects import Mode
from loadgen.diagnose.analysis.window import Window
from router.core.step_time import StepTime
from router.core.types import Dispatch

# Default of ``evenstep serve``: waiting time after which a request goes first.
_STARVATION_S = 5.0
# With shorter outputs, a delay of one step empties more than 2 % of the slots' time. The router
# then queues a few requests in the engines (``router.core.rounds.overcommit``).
_SHORT_OUTPUT_TOKENS = 65
_MOST_QUEUED = 2
# Warm-up, until the simultaneous start of the first requests no longer shows.
_WARMUP_LIVES = 4
_WARMUP_STEPS = (300, 4000)
_MEASURED_STEPS = (1500, 6000)
# Share of steps with waiting requests from which on the system is kept full.
FULL_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    """Common settings of the simulations."""

    window: Window
    mode: Mode
    clients: int
    slots: int
    workers: int
    step_time: StepTime  # as fitted
    decode_time: StepTime  # the cost of tokens, and as the base all else in a mean step
    starvation_s: float  # engine seconds
    deadline_steps: int
    overcommit: int
    warmup: int
    steps: int

    @property
    def computes_prompts(self) -> bool:
        """Whether the workers compute prompts, and that takes time."""
        return self.window.computed_share > 0 and self.step_time.per_prompt_token_s > 0


def setting_of(window: Window, found: Findings) -> Setting:
    """The window's conditions; its findings have a fitted step time and known slots."""
    load, fitted = found.load, found.barrier.fitted
    assert fitted is not None
    assert load.slots is not None
    assert load.output_tokens is not None
    # As many queue in each engine as recorded, else by the router's rule.
    overcommit = int(load.output_tokens < _SHORT_OUTPUT_TOKENS)
    if window.dispatch is Dispatch.POOL:
        overcommit = min(_MOST_QUEUED, round(float(window.queued.mean()) / load.workers))
    lives = math.ceil(_WARMUP_LIVES * load.output_tokens)
    rest_s = float((window.step_s - fitted.per_token_s * window.peak_tokens).mean())
    costs = fitted.per_token_s, fitted.per_request_s, fitted.per_prompt_token_s
    starvation_s = _STARVATION_S / window.time_scale
    return Setting(
        window=window,
        mode="full" if load.waiting_share >= FULL_SHARE else "arrivals",
        clients=max(1, round(load.inside)),
        slots=max(1, round(load.slots)),
        workers=load.workers,
        step_time=StepTime(max(fitted.base_s, 1e-9), *costs),
        decode_time=StepTime(max(rest_s, 1e-9), fitted.per_token_s),
        starvation_s=starvation_s,
        deadline_steps=max(1, round(starvation_s / found.waiting.step_s)),
        overcommit=overcommit,
        warmup=int(np.clip(lives, *_WARMUP_STEPS)),
        steps=int(np.clip(window.steps, *_MEASURED_STEPS)),
    )
