"""The logits processor of hidden lengths by itself; run by the engine's interpreter, in its venv.

PYTHONPATH=. VENV/bin/python -m tests.support.hidden_lengths MODEL check STEPS

Requests enter, leave and change places in a batch as in vLLM's own, whose update it is; beside it
stands what each row's probabilities should be, one request after the other.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deploy.engine.serve import write_metadata

SLOTS = 12
VOCABULARY = 64
EOS = 1
STOP = 7


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Counts what is asked of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class Request:
    """One of the batch; ``hidden`` is None for one that ends by itself or not at all."""

    params: Any
    hidden: int | None
    ends: list[int]
    prefill_steps: int
    output: list[int] = field(default_factory=list)

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities of the next token."""
        row = logits.clone()
        if self.hidden is not None and len(self.output) + 1 < self.hidden:
            row[self.ends] = -torch.inf
        elif self.hidden is not None:
            row[:] = -torch.inf
            row[self.ends[0]] = 0.0
        return torch.softmax(row, dim=-1)


class Batch:
    """The slots that requests have, and the messages about them."""

    def __init__(self, seed: int) -> None:
        from vllm.v1.sample.logits_processor.state import BatchUpdateBuilder

        self.rng = random.Random(seed)
        self.rows: list[Request] = []
        self.update = BatchUpdateBuilder()

    def leave(self, gone: list[Request]) -> None:
        """Some leave; ``close`` closes the gaps."""
        for one in gone:
            self.update.removed_append(self.rows.index(one))

    def close(self) -> None:
        """The last ones take the places that are still free."""
        from vllm.v1.sample.logits_processor import MoveDirectionality

        free = list(self.update.removed)  # the last one first
        for index in free:
            last = len(self.rows) - 1
            if index < last:
                self.update.moved.append((last, index, MoveDirectionality.UNIDIRECTIONAL))
                self.rows[index] = self.rows[last]
            self.rows.pop()

    def swap(self) -> None:
        """Two change places."""
        from vllm.v1.sample.logits_processor import MoveDirectionality

        a, b = self.rng.sample(range(len(self.rows)), 2)
        self.update.moved.append((a, b, MoveDirectionality.SWAP))
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]

    def enter(self) -> None:
        """A request with a hidden length, without one, or one that ignores end tokens."""
        from vllm import SamplingParams

        kind = self.rng.choice(["hidden", "hidden", "stops", "plain", "ignores"])
        length = self.rng.randrange(1, 40)
        params = SamplingParams(
            extra_args=None if kind == "plain" else {"evenstep_output_tokens": length},
            stop_token_ids=[STOP] if kind == "stops" else None,
            ignore_eos=kind == "ignores",
        )
        params.update_from_generation_config({}, EOS)
        ends = [EOS, STOP] if kind == "stops" else [EOS]
        hidden = length if kind in ("hidden", "stops") else None
        # One that was preempted has some of its output already.
        output = [STOP + 1] * self.rng.choice([0, self.rng.randrange(length)])
        one = Request(params, hidden, ends, self.rng.randrange(3), output)
        free = self.update.pop_removed()
        index = len(self.rows) if free is None else free
        self.update.added.append((index, params, None, one.output))
        self.rows[index : index + 1] = [one]

    def change(self, gone: list[Request]) -> Any:
        """Some leave, some enter, two change places; what vLLM says of it, None of nothing."""
        self.leave(gone)
        if self.rng.random() < 0.15 and len(self.rows) < SLOTS:
            self.enter()
        self.close()
        if self.rng.random() < 0.1 and len(self.rows) > 1:
            self.swap()
        return self.update.get_and_reset(len(self.rows))


def check(steps: int) -> dict[str, Any]:
    """Some steps of a batch.

    Returns:
        ``wrong`` rows; ``ended`` requests of a hidden length and those that ended ``elsewhere``;
        how often a step asked for which operations: while ``quiet``, where nothing entered, left
        or ended, and in ``other`` steps.
    """
    from engine_patches.hidden_length import HiddenLength

    torch.manual_seed(1)
    batch, processor = Batch(seed=1), HiddenLength(None, torch.device("cpu"), False)
    counts: Counter[str] = Counter(wrong=0, ended=0, elsewhere=0)
    quiet: Counter[str] = Counter()
    other: Counter[str] = Counter()
    gone: list[Request] = []
    for _ in range(steps):
        update = batch.change(gone)
        processor.update_state(update)
        logits = 4 * torch.randn(len(batch.rows), VOCABULARY)
        should = [one.expected(row) for one, row in zip(batch.rows, logits, strict=True)]
        with Operations() as asked:
            found = torch.softmax(processor.apply(logits), dim=-1)
        hidden = [one for one in batch.rows if one.hidden is not None]
        ending = any(len(one.output) + 1 >= (one.hidden or 0) for one in hidden)
        names = ",".join(asked.names[:-1]) if hidden else f"none hidden: {asked.names[:-1]}"
        (other if update or ending else quiet)[names] += 1
        counts["wrong"] += sum(not torch.equal(a, b) for a, b in zip(found, should, strict=True))
        gone = sample(batch, found)
        for one in gone:
            counts["ended" if one.hidden in (None, len(one.output)) else "elsewhere"] += 1
    return {**counts, "quiet": quiet, "other": other}


def sample(batch: Batch, chances: torch.Tensor) -> list[Request]:
    """Give each its token, unless its prompt is not computed; those that end by it."""
    ended = []
    for one, row in zip(batch.rows, chances, strict=True):
        if one.prefill_steps:
            one.prefill_steps -= 1
            continue
        one.output.append(int(torch.multinomial(row, 1)))
        stops = one.output[-1] in one.ends and not one.params.ignore_eos
        if stops or len(one.output) > VOCABULARY:
            ended.append(one)
    return ended


def main() -> None:
    """Print one line of JSON."""
    folder = Path(sys.prefix) / "vllm-name"
    write_metadata(folder)
    sys.path.insert(0, str(folder))
    sys.stdout.write(json.dumps(check(int(sys.argv[3]))) + "\n")


if __name__ == "__main__":
    main()
