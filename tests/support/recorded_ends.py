"""Answers of a trained model to real prompts, with what the end signal said of each token.

Run by the engine's interpreter: PYTHONPATH=. VENV/bin/python -m tests.support.recorded_ends MODEL
PROMPTS OUT. A run that was interrupted goes on.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.engine.serve import write_metadata
from engine_patches.plugin.end_table import STEP_LEAST, STEP_RELATIVE

TEMPERATURE = 0.7
MOST_TOKENS = 512
SLOTS = 24
CONTEXT_TOKENS = 2048
# A prompt of more, without an answer, was too long for the context.
MOST_CHARACTERS = 3000
# A probability p is kept as -8 log2 p, in a byte: to 4 %, and down to 2^-31.
_PER_BIT = 8


@dataclass(frozen=True, slots=True)
class Answers:
    """Recorded answers, shape (n,), and the probabilities of all their tokens one after another."""

    prompts: list[str]
    prompt_tokens: NDArray[np.int64]
    tokens: NDArray[np.int64]
    stopped: NDArray[np.bool_]  # by an end token; else at ``MOST_TOKENS``
    told: NDArray[np.float64]  # as a router reads it
    raw: NDArray[np.float64]  # of the one token

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index of each answer's first token."""
        return np.cumsum(self.tokens) - self.tokens

    @classmethod
    def read(cls, lines: Path, prompts: Path) -> Answers:
        """What ``record`` wrote, up to the first prompt whose answer had not ended.

        Beyond it, short answers alone would be there.
        """
        texts = dict(_texts(prompts))
        found = {row["id"]: row for row in map(json.loads, lines.read_text().splitlines())}
        fit = [id_ for id_ in texts if id_ in found or len(texts[id_]) < MOST_CHARACTERS]
        rows = [found[id_] for id_ in takewhile(found.__contains__, fit)]
        return cls(
            [texts[row["id"]] for row in rows],
            np.array([row["prompt_tokens"] for row in rows]),
            np.array([row["tokens"] for row in rows]),
            np.array([row["stopped"] for row in rows]),
            np.concatenate([reported(row["told"]) for row in rows]),
            np.concatenate([row["raw"] for row in rows]),
        )

    @classmethod
    def load(cls, file: Path, prompts: Path) -> Answers:
        kept = np.load(file)
        texts = [text for _, text in _texts(prompts)]
        told, raw = (2.0 ** -(kept[name] / _PER_BIT) for name in ("told", "raw"))
        columns = kept["prompt_tokens"], kept["tokens"], kept["stopped"]
        return cls([texts[i] for i in kept["prompt"]], *columns, told, raw)

    def write(self, file: Path, prompts: Path) -> None:
        numbers = {text: number for number, (_, text) in enumerate(_texts(prompts))}
        np.savez_compressed(
            file,
            prompt=np.array([numbers[text] for text in self.prompts]),
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            stopped=self.stopped,
            told=_packed(self.told),
            raw=_packed(self.raw),
        )


def reported(averages: Sequence[float]) -> list[float]:
    """What a router has read by each token: an average is reported again once it has changed."""
    told: list[float] = []
    for now in averages:
        before = told[-1] if told else now
        moved = abs(now - before) > max(STEP_RELATIVE * before, STEP_LEAST)
        told.append(now if moved else before)
    return told


def _packed(chances: NDArray[np.float64]) -> NDArray[np.uint8]:
    bits = -np.log2(np.maximum(chances, 2.0**-40))
    return np.minimum(np.round(_PER_BIT * bits), 255).astype(np.uint8)


def _texts(prompts: Path) -> list[tuple[str, str]]:
    with gzip.open(prompts, "rt") as file:
        return [(one["id"], one["prompt"]) for one in map(json.loads, file)]


def engine_of(model: str, endpoint: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=model,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=2048,
        max_num_seqs=SLOTS,
        max_model_len=CONTEXT_TOKENS,
        scheduler_cls="engine_patches.scheduler.EvenstepScheduler",
        logits_processors=["engine_patches.end_signal:EndSignal"],
        additional_config={"evenstep": {"snapshots": endpoint, "end_signal": True}},
    )
    return LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)


def watch(raw: dict[int, list[float]], told: dict[int, list[float]]) -> None:
    """Keep each token's probability, by request number: as computed, and averaged."""
    from engine_patches.plugin.end_table import EndWriter

    take = EndWriter.take

    def noted(self: Any, rows: Any, numbers: Any, now: Any, first: Any) -> None:
        take(self, rows, numbers, now, first)
        for row, number, chance in zip(rows.tolist(), numbers.tolist(), now.tolist(), strict=True):
            if self.numbers[row] == number:
                raw.setdefault(number, []).append(chance)
                told.setdefault(number, []).append(float(self._means[row]))

    EndWriter.take = noted  # type: ignore[method-assign]


def record(model: str, prompts: list[dict[str, str]], out: Path) -> None:
    """Append a line for each prompt that has ended."""
    from transformers import AutoTokenizer
    from vllm.sampling_params import SamplingParams

    done = {json.loads(line)["id"] for line in out.read_text().splitlines()} if out.exists() else ()
    left = [one for one in prompts if one["id"] not in done]
    raw: dict[int, list[float]] = {}
    told: dict[int, list[float]] = {}
    watch(raw, told)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder, out.open("a") as file:
        engine = engine_of(model, f"ipc://{folder}/s")
        sent: dict[str, tuple[int, dict[str, str]]] = {}
        number = 0
        while left or engine.has_unfinished_requests():
            while left and engine.get_num_unfinished_requests() < SLOTS:
                one, number = left.pop(0), number + 1
                chat = [{"role": "user", "content": one["prompt"]}]
                ids = tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_dict=True
                )["input_ids"]
                if len(ids) + MOST_TOKENS > CONTEXT_TOKENS:
                    number -= 1
                    continue
                parameters = SamplingParams(
                    max_tokens=MOST_TOKENS, temperature=TEMPERATURE, seed=number
                )
                sent[one["id"]] = number, one
                engine.add_request(one["id"], {"prompt_token_ids": list(ids)}, parameters)
            for output in engine.step():
                if not output.finished:
                    continue
                number_of, one = sent.pop(output.request_id)
                answer = output.outputs[0]
                line = {
                    "id": one["id"],
                    "source": one["source"],
                    "prompt_tokens": len(output.prompt_token_ids),
                    "tokens": len(answer.token_ids),
                    "stopped": answer.finish_reason == "stop",
                    "raw": [round(chance, 7) for chance in raw.pop(number_of)],
                    "told": [round(chance, 7) for chance in told.pop(number_of)],
                }
                file.write(json.dumps(line) + "\n")
                file.flush()


def main() -> None:
    folder = Path(sys.prefix) / "vllm-name"
    write_metadata(folder)
    sys.path.insert(0, str(folder))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with gzip.open(sys.argv[2], "rt") as file:
        prompts = [json.loads(line) for line in file]
    record(sys.argv[1], prompts, Path(sys.argv[3]))


if __name__ == "__main__":
    main()
