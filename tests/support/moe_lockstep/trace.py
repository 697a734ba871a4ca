"""A slice of a published trace, cut down to what a tiny model on two cores computes in seconds."""

from __future__ import annotations

import csv
from pathlib import Path

from loadgen.traces.trace import load_trace

PROMPT_CAP_TOKENS = 1024


def write_slice(file: Path, requests: int, seed: int) -> Path:
    """BurstGPT's lengths, some of them drawn: outputs as published, longer prompts cut.

    Returns:
        The file, in a format that ``evenstep replay`` reads.
    """
    with file.open("w", newline="", encoding="utf-8") as text:
        rows = csv.writer(text)
        rows.writerow(("Request tokens", "Response tokens"))
        for row in load_trace("burstgpt").sample(requests, seed):
            rows.writerow((min(row.prompt_tokens, PROMPT_CAP_TOKENS), row.output_tokens))
    return file
