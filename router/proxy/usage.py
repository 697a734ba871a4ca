from __future__ import annotations

import re

# Text cannot match: its quotation marks are escaped. Details of a count may stand between.
_USAGE = re.compile(rb'"usage": ?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}')
_DETAILS = re.compile(rb"\{[^{}]*\}")
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,9})\b')
_CACHED = re.compile(rb'"cache_(?:read|creation)_input_tokens": ?(\d{1,9})\b')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens": ?(\d{1,9})\b')


def tokens_of(body: bytes) -> tuple[int, int] | None:
    """Tokens of prompt and output (0 if unknown) in the answer of any endpoint.

    A message's ``input_tokens`` exclude cached tokens; the other formats include them.
    """
    usage = _USAGE.search(body)
    if usage is None:
        return None
    counts = _DETAILS.sub(b"", usage[1])
    prompt, output = _PROMPT.search(counts), _OUTPUT.search(counts)
    if prompt is None:
        return None
    cached = sum(map(int, _CACHED.findall(counts)))
    return int(prompt[1]) + cached, 0 if output is None else int(output[1])
