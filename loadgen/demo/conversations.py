"""Conversations of several turns with shared system prompts, as a trace with ``hash_ids``."""

import json
import random
from itertools import count
from pathlib import Path
from typing import Any

from loadgen.traces.trace_files import BLOCK_TOKENS

TURNS = 5
_STARTS_PER_S = 8.0
# From turn to turn; more or less by half.
_PAUSE_S = 4.0
_SYSTEM_PROMPTS = 4
_SYSTEM_BLOCKS = 8
# Of a user's message or a tool's result: lognormal. The few longest ones keep a rank busy alone.
_MESSAGE_TOKENS, _MESSAGE_SPREAD, _MESSAGE_MOST = 900, 0.8, 16_000
_MEAN_ANSWER_TOKENS = 100


def write_conversations(path: Path, requests: int, seed: int) -> None:
    """Write so many requests in order of arrival, the same for the same seed.

    A prompt repeats the conversation's prompts before it, and has the answers as new text.
    """
    rng = random.Random(f"{seed} conversations")
    ids = count()
    systems = [[next(ids) for _ in range(_SYSTEM_BLOCKS)] for _ in range(_SYSTEM_PROMPTS)]
    conversations = -(-requests // TURNS)
    rows: list[dict[str, Any]] = []
    for number in range(conversations):
        blocks = list(systems[number % _SYSTEM_PROMPTS])
        tokens = _SYSTEM_BLOCKS * BLOCK_TOKENS
        at_s = rng.uniform(0, conversations / _STARTS_PER_S)
        for _ in range(TURNS):
            message = _MESSAGE_TOKENS * rng.lognormvariate(0, _MESSAGE_SPREAD)
            tokens += 1 + int(min(message, _MESSAGE_MOST))
            blocks += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
            answer = 1 + int(rng.expovariate(1 / _MEAN_ANSWER_TOKENS))
            row = {
                "timestamp": round(at_s * 1000),
                "input_length": tokens,
                "output_length": answer,
                # The last block is not full; the next turn has another one in its place.
                "hash_ids": [*blocks, next(ids)],
            }
            rows.append(row)
            tokens += answer
            at_s += _PAUSE_S * rng.uniform(0.5, 1.5)
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:requests]), encoding="utf-8")
