"""The real engine with a trained model and the plug-in, and chats for it."""

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai

from tests.support.docs import pages, text_of
from tests.support.engine import MODEL, Installation, running_engine
from tests.support.engine_clients import client_of
from tests.support.engine_python import ROOT
from tests.support.server import Server, free_port

SLOTS = 12
CONTEXT_TOKENS = 4096
FLAGS = (
    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
    *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(SLOTS)),
    # Every slot's whole context, in blocks of 32.
    *("--num-gpu-blocks-override", str(SLOTS * CONTEXT_TOKENS // 32)),
)


@dataclass(frozen=True, slots=True)
class Trained:
    """A running engine, and its state stream."""

    server: Server
    endpoint: str

    @property
    def worker(self) -> str:
        """For ``evenstep serve --worker``."""
        return f"{self.server.url},slots={SLOTS},snapshots={self.endpoint}"


@contextlib.contextmanager
def running_trained(where: Installation, folder: Path, *more: str) -> Iterator[Trained]:
    """Run it until the block ends; ``folder`` is for the log, ``more`` are flags of vLLM."""
    endpoint = f"tcp://127.0.0.1:{free_port(2)}"
    config = json.dumps({"evenstep": {"snapshots": endpoint}})
    model = replace(where, model=where.trained)
    environment = {"PYTHONPATH": str(ROOT)}
    flags = (*FLAGS, "--additional-config", config, *more)
    with running_engine(model, folder, *flags, environment=environment) as server:
        yield Trained(server, endpoint)


def chats(count: int, seed: int, words: tuple[int, int] = (20, 1200)) -> list[str]:
    """Questions about pieces of this project's documentation, of so many words each.

    Tables are left out: a word of numbers has several tokens, of which the model takes 4,096.
    """
    rng = random.Random(seed)
    lines = [line for page in pages() for line in text_of(page).splitlines()]
    text = " ".join(line for line in lines if not line.startswith("|")).split()
    sizes = [rng.randint(*words) for _ in range(count)]
    starts = [rng.randrange(len(text) - words[1]) for _ in range(count)]
    pieces = (" ".join(text[i : i + n]) for i, n in zip(starts, sizes, strict=True))
    return [f"What is this about?\n\n{piece}" for piece in pieces]


def answered(server: Server, questions: Sequence[str], max_tokens: int) -> list[Any]:
    """The answers to all, ``SLOTS`` at a time."""

    def ask(question: str) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
        )

    with client_of(server) as plain, ThreadPoolExecutor(SLOTS) as clients:
        client: openai.OpenAI = plain.with_options(timeout=600)
        return list(clients.map(ask, questions))
