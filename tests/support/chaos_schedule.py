"""What a chaos run does, all by one seed: who asks for what, who leaves, which worker fails."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FAULTS: Mapping[str, Mapping[str, Any]] = {
    "kill": {"kind": "kill"},
    "kill-mid-event": {"kind": "kill", "mid_event": True},
    "refuse": {"kind": "refuse"},
    "reset": {"kind": "reset", "after_events": 2},
    "reset-mid-event": {"kind": "reset", "after_events": 1, "mid_event": True},
    "close-mid-event": {"kind": "close", "after_events": 3, "mid_event": True},
    "close-before-the-first-event": {"kind": "close"},
    "error-500": {"kind": "error", "status": 500},
    "error-503-late": {"kind": "error", "status": 503, "delay_s": 0.2},
    "error-429": {"kind": "error", "status": 429},
    "error-429-retry-after": {"kind": "error", "status": 429, "retry_after_s": 1},
    "error-400": {"kind": "error", "status": 400},
    "garbage": {"kind": "garbage"},
    "garbage-mid-stream": {"kind": "corrupt", "after_events": 2},
    "garbage-after-the-head": {"kind": "corrupt"},
    "hang": {"kind": "hang"},
    "hang-mid-event": {"kind": "hang", "mid_event": True},
    "stall-mid-event": {"kind": "stall", "after_events": 2, "mid_event": True},
    "stall-before-the-first-event": {"kind": "stall"},
    "endless-head": {"kind": "endless_head"},
    "slow": {"kind": "slow", "factor": 8.0},
    "drip": {"kind": "drip", "bytes_per_s": 4000.0},
}
"""Faults that a worker is given, by the names that a run prints."""

FAMILIES: Mapping[str, Sequence[str]] = {
    "kill-refuse-reset-close": [
        *("kill", "kill-mid-event", "refuse", "reset", "reset-mid-event"),
        *("close-mid-event", "close-before-the-first-event"),
    ],
    "error-400-429-5xx-garbage": [
        *("error-500", "error-503-late", "error-429", "error-429-retry-after", "error-400"),
        *("garbage", "garbage-mid-stream", "garbage-after-the-head"),
    ],
    "hang-stall-slow-drip": [
        *("hang", "hang-mid-event", "stall-mid-event", "stall-before-the-first-event"),
        *("endless-head", "slow", "drip"),
    ],
}
"""Faults that are tested together."""

ALL = [name for family in FAMILIES.values() for name in family]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and how its client behaves.

    Attributes:
        number: of the run; the client's request id says it.
        leaves_after_s: the client is gone then; None: it stays.
        leaves_after_events: the same by what it has seen; a large number: it stays.
        slow: it reads little by little, through a small window.
    """

    number: int
    chat: bool
    stream: bool
    prompt_tokens: int
    output_tokens: int
    leaves_after_s: float | None
    leaves_after_events: int
    slow: bool

    @property
    def id(self) -> str:
        """The ``X-Request-Id`` that the client sends."""
        return f"chaos-{self.number}"

    def message(self, host: str) -> bytes:
        """The whole request as it is written to the connection."""
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        body: dict[str, Any] = {"model": "emulated", "stream": self.stream, "max_tokens": 1000}
        body["vllm_xargs"] = {"evenstep_output_tokens": self.output_tokens}
        if self.chat:
            content = f"{self.number:08d}" + "ab" * 2 * (self.prompt_tokens - 2)
            body["messages"] = [{"role": "user", "content": content}]
        else:
            body["prompt"] = [self.number] * self.prompt_tokens
        text = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        return (
            f"{head}x-request-id: {self.id}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()
        )


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault from one request of the run to another.

    Attributes:
        begins_at, ends_at: so many requests after the start.
        rank: of the worker.
        name: one of ``FAULTS``.
    """

    begins_at: int
    ends_at: int
    rank: int
    name: str


def asks(seed: int) -> Iterator[Ask]:
    """Requests without end; every eleventh is not streamed."""
    number = 0
    while True:
        yield _ask(random.Random(f"{seed}/{number}"), number)
        number += 1


def _ask(rng: random.Random, number: int) -> Ask:
    whim = rng.random()
    lengths = (1, 2, rng.randint(3, 30), rng.randint(3, 30), rng.randint(30, 80))
    return Ask(
        number=number,
        chat=rng.random() < 0.3,
        stream=number % 11 != 10,
        prompt_tokens=rng.randint(4, 200),
        output_tokens=rng.choice(lengths),
        leaves_after_s=rng.uniform(0, 0.3) if whim < 0.06 else None,
        leaves_after_events=rng.randint(1, 6) if 0.06 <= whim < 0.1 else 1000,
        slow=0.1 <= whim < 0.13,
    )


def strikes(seed: int, names: Sequence[str], ranks: int) -> Iterator[Strike]:
    """Faults without end, all of the names again and again, each time in another order.

    One or two workers are struck at a time.
    """
    rng = random.Random(f"{seed}/faults")
    at, rank = 0, 0
    while True:
        for name in rng.sample(names, len(names)):
            at += rng.randint(15, 30)
            rank = (rank + rng.randint(1, ranks - 1)) % ranks
            yield Strike(at, at + rng.randint(10, 45), rank, name)
