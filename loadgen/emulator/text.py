"""Output text of an emulated engine: a fixed cycle of words, one per token, from a seeded start.

Text, length and the position of a stop string depend only on the seed and the prompt. So the same
request gets the same answer, streamed or not, on any worker.
"""

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WORDS = tuple(
    " a step is even when every rank ends it at once and none waits for the fullest one of them "
    "so send each request to where its tokens bring all the loads closer together".replace(
        " ", "\n "
    )
    .strip("\n")
    .split("\n")
)
MEAN_OUTPUT_TOKENS = 128
CHARS_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
KEYED_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How an output runs and ends."""

    key: int  # start in the cycle of words
    output_tokens: int
    finish_reason: Literal["stop", "length"]
    end_chars: int | None = None  # length of the text when a stop string cuts it, else None
    stop_reason: str | None = None

    def text(self, start: int, end: int) -> str:
        """Tokens ``start`` to ``end``, before any cut at a stop string."""
        return "".join(WORDS[(self.key + index) % len(WORDS)] for index in range(start, end))


def estimate_text_tokens(text: str) -> int:
    """One token per four characters, rounded up, at least one."""
    return max(1, math.ceil(len(text) / CHARS_PER_TOKEN))


def prompt_key(seed: int, prompt: str | Sequence[int], index: int) -> int:
    """A number for the seed, the beginning of the prompt, and one of its outputs."""
    head = prompt if isinstance(prompt, str) else str(prompt[:KEYED_PROMPT_TOKENS])
    return zlib.crc32(f"{seed}/{index}/{len(prompt)}/{head}".encode())


def drawn_output_tokens(key: int) -> int:
    """Length for a request without one: geometric-like, mean 128 tokens."""
    return 1 + int(random.Random(key).expovariate(1 / MEAN_OUTPUT_TOKENS))


def plan_output(
    key: int, hidden_tokens: int, max_tokens: int, stop: Sequence[str], *, ignore_eos: bool
) -> OutputPlan:
    """Decide where an output ends: hidden length, cap or stop string, whichever is first."""
    ends_itself = hidden_tokens <= max_tokens and not ignore_eos
    plan = OutputPlan(
        key=key,
        output_tokens=hidden_tokens if ends_itself else max_tokens,
        finish_reason="stop" if ends_itself else "length",
    )
    return _cut_at_stop(plan, stop) if stop else plan


def _cut_at_stop(plan: OutputPlan, stop: Sequence[str]) -> OutputPlan:
    text = plan.text(0, plan.output_tokens)
    found = [(start + len(word), word) for word in stop if (start := text.find(word)) >= 0]
    if not found:
        return plan
    end_chars, word = min(found, key=lambda item: item[0])
    tokens, chars = 0, 0
    while chars < end_chars:
        chars += len(WORDS[(plan.key + tokens) % len(WORDS)])
        tokens += 1
    return OutputPlan(plan.key, tokens, "stop", end_chars - len(word), word)
