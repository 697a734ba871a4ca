"""Workload of a replay: arrivals, prompts, request bodies; all of it from a seed."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loadgen.traces.arrivals import Arrivals
from loadgen.traces.request_classes import RequestClass
from loadgen.traces.trace import Trace, TraceRequest
from loadgen.traces.trace_files import BLOCK_TOKENS
from router.core.errors import ConfigError

# All have three digits, so a prompt is one slice of a string. A byte vocabulary has them too.
_TOKEN_IDS = (100, 228)
_ID_WIDTH = len("100,")
_BANK_TOKENS = 1 << 16
_BLOCK_DIGITS = 5
_SPREAD = 40_503  # odd, so that neighbouring ids begin at places far apart


def checked_time_scale(scale: float) -> float:
    """The time scale, or ConfigError if it is not above 0."""
    if not 0 < scale < math.inf:
        raise ConfigError(f"--time-scale: {scale} is not above 0; write 1 for life's own speed")
    return scale


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of sending."""

    requests: Sequence[TraceRequest]
    arrivals: Arrivals
    model: str
    cap_tokens: int  # ``max_tokens`` of every request, unless lengths are revealed
    seed: int
    # Whether ``max_tokens`` is each request's own length, for engines that cannot read the hidden
    # one; the router then sees lengths too.
    reveal_lengths: bool = False
    classes: Sequence[RequestClass] = ()  # of each request; empty: none has targets

    def expected_tokens(self, request: TraceRequest) -> int:
        """Output tokens that the engine must send."""
        return min(request.output_tokens, self.cap_tokens)

    def bodies(self) -> Iterator[bytes]:
        prompts = _prompts(self.requests, self.seed)
        for request, prompt in zip(self.requests, prompts, strict=True):
            rest: dict[str, object] = {
                "model": self.model,
                "max_tokens": self.cap_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "vllm_xargs": {"evenstep_output_tokens": request.output_tokens},
            }
            if self.reveal_lengths:
                del rest["vllm_xargs"]
                rest |= {"max_tokens": self.expected_tokens(request), "ignore_eos": True}
            yield b'{"prompt":[%b],%b' % (prompt, json.dumps(rest).encode()[1:])


def plan(
    trace: Trace, arrivals: Arrivals, count: int | None, seed: int
) -> tuple[TraceRequest, ...]:
    """Select requests and set their arrivals in engine seconds; none in a closed loop.

    The trace's own times take its earliest requests, other arrivals a sample of it, or the first
    ones in its order if their prompts share prefixes. InputError: the trace has no times of its
    own, or too few, and they were requested.
    """
    if arrivals.kind == "trace":
        return trace.earliest(count)
    requests = trace.sample(len(trace.requests) if count is None else count, seed)
    if arrivals.kind == "closed":
        return requests
    rng = random.Random(f"{seed} arrivals")
    at_s = 0.0
    timed = []
    for request in requests:
        timed.append(replace(request, arrival_s=at_s))
        at_s += rng.expovariate(arrivals.value)
    return tuple(timed)


def _prompts(requests: Sequence[TraceRequest], seed: int) -> Iterator[bytes]:
    """Random token ids, comma-separated.

    Prompts share what the trace says that they share; further prefixes only by chance.
    """
    rng = random.Random(f"{seed} prompts")
    longest = max((request.prompt_tokens for request in requests), default=0)
    ids = rng.choices(range(*_TOKEN_IDS), k=_BANK_TOKENS + max(longest, BLOCK_TOKENS))
    bank = ",".join(map(str, ids)).encode() + b","
    for request in requests:
        prompt = b"".join(_block(bank, id_) for id_ in request.blocks)
        missing = request.prompt_tokens - len(prompt) // _ID_WIDTH
        start = rng.randrange(_BANK_TOKENS) * _ID_WIDTH
        prompt += bank[start : start + max(0, missing) * _ID_WIDTH]
        yield prompt[: request.prompt_tokens * _ID_WIDTH - 1]


def _block(bank: bytes, id_: int) -> bytes:
    """The tokens of a block of a trace; they begin with its id, so that no two are alike."""
    first, values = _TOKEN_IDS[0], _TOKEN_IDS[1] - _TOKEN_IDS[0]
    digits = [first + id_ // values**place % values for place in range(_BLOCK_DIGITS)]
    start = id_ * _SPREAD % _BANK_TOKENS * _ID_WIDTH
    rest = bank[start : start + (BLOCK_TOKENS - _BLOCK_DIGITS) * _ID_WIDTH]
    return ",".join(map(str, digits)).encode() + b"," + rest
