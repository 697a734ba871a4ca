"""What no router can be better than: each request by itself on an idle engine."""

from itertools import accumulate
from math import ceil

from loadgen.emulator.text import CHARS_PER_TOKEN
from router.core.step_time import StepTime
from tests.bench.league.workloads import Workload

_BLOCK_TOKENS = 16


def least_ttft_ms(workload: Workload, seed: int) -> float | None:
    """Mean, in engine time, if a request's prompt is computed as soon as it comes.

    Every beginning that an earlier request had counts as cached, wherever that was computed. None:
    prompts cost no time, or engines are not equal.
    """
    flags = dict(zip(workload.fleet, workload.fleet[1:], strict=False))
    cost = StepTime.parse(flags["--step-time"])
    if not cost.per_prompt_token_s or "--speed" in flags:
        return None
    chunk, known = int(flags["--batch-tokens"]), _Beginnings()
    counted_s = []
    for counts, prompt in _in_order(workload, seed):
        tokens = len(prompt) // CHARS_PER_TOKEN
        computed = tokens - min(known.cached_tokens(prompt), tokens - 1)
        if counts:
            took_s = ceil(computed / chunk) * cost.base_s + computed * cost.per_prompt_token_s
            counted_s.append(took_s)
    return 1e3 * sum(counted_s) / len(counted_s)


def _in_order(workload: Workload, seed: int) -> list[tuple[bool, str]]:
    """The quiet tenant's prompts, by the earliest time that each can come; whether each counts."""
    sessions = workload.sessions(seed)
    warm = workload.warm(len(sessions))
    times = [
        (at_s, number >= warm, ask.prompt)
        for number, session in enumerate(sessions)
        for at_s, ask in zip(accumulate(ask.wait_s for ask in session), session, strict=True)
        if ask.tenant == "one"
    ]
    return [(counts, prompt) for _, counts, prompt in sorted(times, key=lambda each: each[0])]


class _Beginnings:
    """A tree of all prompts so far, block by block."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str], int] = {}

    def cached_tokens(self, prompt: str) -> int:
        """Tokens that earlier prompts began with too; the prompt is known from now on."""
        length, parent, cached = _BLOCK_TOKENS * CHARS_PER_TOKEN, 0, 0
        for start in range(0, len(prompt) - length + 1, length):
            key = parent, prompt[start : start + length]
            if key in self._ids:
                cached += _BLOCK_TOKENS
            parent = self._ids.setdefault(key, len(self._ids) + 1)
        return cached
