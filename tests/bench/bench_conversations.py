"""Conversations before two real engines with prefix caches: what is computed again, by policy.

    python tests/bench/bench_conversations.py [--prompts own] [--cache 60000] [--dealt 5,5]
        [--only bfio,sticky] [--runs 1] [--json FILE]

Two vLLM engines on the CPU with the trained model of `make engine`, the plug-in and prefix caching.
Ten conversations of six turns, some 6,500 tokens at their end, run at once through the chat
endpoint; a client reads the answer, thinks for a second on average and asks again. Their system
prompts are their own or one that all share. Sticky is the best that a client can do which knows
its engines: each conversation goes to one of them, dealt out as --dealt says, without a router. The
policies take turns, and each run has texts of its own, so that no run finds those of another.

Hits and tokens computed are those of the engines' own counters. Needs the CPU engine (`make
engine`), and both processors for itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import openai

from docs.kept_figures import read_figures
from docs.stale_figures import changed
from loadgen.report.origin import KEY, Engines, origin
from tests.support.docs import pages, prose_lines, text_of
from tests.support.engine import MODEL, READY_S, installation, metric, starting_engine
from tests.support.engine_clients import client_of
from tests.support.engine_python import ROOT
from tests.support.figure_files import write_part
from tests.support.server import free_port, wait_ready
from tests.support.told_hits import noted, running_noting, totals
from tests.support.trained import SLOTS, Trained

CODE = (
    "router/core/prefix",
    "router/core/policies",
    "router/core/rounds",
    "router/core/state",
    "engine_patches/plugin",
    "tests/support/told_hits.py",
    "tests/support/trained.py",
    "tests/bench/bench_conversations.py",
)
STICKY = "sticky"
POLICIES = (STICKY, "bfio", "least_tokens", "round_robin")
CONVERSATIONS, TURNS = 10, 6
BLOCK_TOKENS = 32
CONTEXT_TOKENS = 8192
# Of a system prompt and of a user's message; some 3.5 are a token.
SYSTEM_CHARACTERS, USER_CHARACTERS = 7_000, 2_450
ANSWER_TOKENS = 64
THINK_S = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked.

    Attributes:
        shared: all conversations have one system prompt; else each has its own.
        dealt: conversations that sticky gives to each engine.
    """

    shared: bool
    dealt: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's run.

    Attributes:
        prompt_tokens: of all requests, by the engines.
        hit_tokens: found in the caches, by the engines.
        foretold: requests whose cached tokens the router knew exactly, as a share.
        error: tokens by which it was wrong, as a share of those found.
        busy: load average of the machine.
    """

    policy: str
    prompt_tokens: int
    hit_tokens: int
    preemptions: int
    ttft_s: float
    ttft_p90_s: float
    wall_s: float
    last_prompt_tokens: float
    foretold: float | None
    error: float | None
    busy: float

    @property
    def hits(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.hit_tokens


@contextlib.contextmanager
def engines(folder: Path, cache_tokens: int) -> Iterator[list[Trained]]:
    """Two of them."""
    found = installation()
    assert found is not None
    trained = replace(found, model=found.trained)
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(2):
            endpoint = f"tcp://127.0.0.1:{free_port(2)}"
            server = stack.enter_context(
                starting_engine(
                    trained,
                    folder,
                    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
                    *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(SLOTS)),
                    *("--num-gpu-blocks-override", str(cache_tokens // BLOCK_TOKENS)),
                    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
                    "--additional-config",
                    json.dumps({"evenstep": {"snapshots": endpoint}}),
                    environment={"PYTHONPATH": str(ROOT)},
                )
            )
            started.append(Trained(server, endpoint))
        for engine in started:
            wait_ready(engine.server, READY_S)
        yield started


class Talk:
    """One conversation; the run's name begins its system prompt, so no other run has its blocks."""

    def __init__(self, number: int, case: Case, seed: int, run: str) -> None:
        self._rng = random.Random(f"{seed} {number}")
        lines = (line for page in pages() for line in prose_lines(text_of(page)))
        self._text = "\n".join(line for line in lines if line and line[0] not in "|<")
        system = random.Random(seed) if case.shared else self._rng
        piece = self._piece(system, SYSTEM_CHARACTERS)
        name = run if case.shared else f"{run} {number}"
        system_prompt = f"You are helper {name}. {piece}"
        self._messages: list[Any] = [{"role": "system", "content": system_prompt}]
        self.ttft_s: list[float] = []
        self.prompt_tokens = 0

    def hold(self, client: openai.OpenAI) -> None:
        for _ in range(TURNS):
            time.sleep(self._rng.expovariate(1 / THINK_S))
            size = int(USER_CHARACTERS * self._rng.uniform(0.7, 1.3))
            self._messages.append({"role": "user", "content": self._piece(self._rng, size)})
            self._messages.append({"role": "assistant", "content": self._ask(client)})

    def _piece(self, rng: random.Random, characters: int) -> str:
        start = rng.randrange(len(self._text) - characters)
        return self._text[start : start + characters]

    def _ask(self, client: openai.OpenAI) -> str:
        start_s, answer = time.perf_counter(), ""
        first_s = 0.0
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=self._messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                first_s = first_s or time.perf_counter() - start_s
                answer += chunk.choices[0].delta.content
            if chunk.usage is not None:
                self.prompt_tokens = chunk.usage.prompt_tokens
        self.ttft_s.append(first_s or time.perf_counter() - start_s)
        return answer


def measured(policy: str, case: Case, seed: int, pair: Sequence[Trained], folder: Path) -> Run:
    """One run; those of one seed ask the same."""
    name = f"{policy} {seed}"
    file = folder / f"hits {name}"
    workers = [word for engine in pair for word in ("--worker", engine.worker)]
    with contextlib.ExitStack() as stack:
        if policy == STICKY:
            targets = [e.server for e, n in zip(pair, case.dealt, strict=True) for _ in range(n)]
        else:
            flags = [] if policy == "bfio" else ["--policy", policy]
            router = stack.enter_context(running_noting(folder, file, *workers, *flags))
            targets = [router] * CONVERSATIONS
        clients = [
            stack.enter_context(client_of(server)).with_options(timeout=900) for server in targets
        ]
        talks = [Talk(number, case, seed, name) for number in range(CONVERSATIONS)]
        before, start_s = counted(pair), time.perf_counter()
        with ThreadPoolExecutor(CONVERSATIONS) as threads:
            list(threads.map(Talk.hold, talks, clients))
        wall_s = time.perf_counter() - start_s
        asked, hit, preempted = (b - a for a, b in zip(before, counted(pair), strict=True))
    told = totals(noted(file))
    ttft_s = sorted(each for talk in talks for each in talk.ttft_s)
    return Run(
        policy,
        asked,
        hit,
        preempted,
        statistics.mean(ttft_s),
        ttft_s[int(0.9 * len(ttft_s))],
        wall_s,
        statistics.mean(talk.prompt_tokens for talk in talks),
        told.right / told.requests if told.requests else None,
        told.error_tokens / max(1, told.found_tokens) if told.requests else None,
        os.getloadavg()[0],
    )


def counted(pair: Sequence[Trained]) -> tuple[int, int, int]:
    """Prompt tokens asked of the caches and found there, and preemptions, by the engines."""
    names = "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"
    asked, hit, preempted = (
        sum(int(metric(engine.server, f"vllm:{name}")) for engine in pair) for name in names
    )
    return asked, hit, preempted


def show(runs: Sequence[Run]) -> None:
    """Print each policy's means, and the means of its ratios to sticky in the same round."""
    print("policy        hits  of sticky  computed  ratio  TTFT s  ratio  wall s  foretold  error")
    sticky = [run for run in runs if run.policy == STICKY]
    for policy in dict.fromkeys(run.policy for run in runs):
        its = [run for run in runs if run.policy == policy]
        pairs = list(zip(its, sticky, strict=False))
        print(
            f"{policy:12} {mean([run.hits for run in its]):5.3f}",
            f"{mean([run.hits / best.hits for run, best in pairs]):10.3f}",
            f"{mean([run.computed for run in its]):9,.0f}",
            f"{mean([run.computed / best.computed for run, best in pairs]):6.2f}",
            f"{mean([run.ttft_s for run in its]):7.2f}",
            f"{mean([run.ttft_s / best.ttft_s for run, best in pairs]):6.2f}",
            f"{mean([run.wall_s for run in its]):7.0f}",
            f"{mean([run.foretold for run in its if run.foretold is not None]):9.2f}",
            f"{mean([run.error for run in its if run.error is not None]):6.3f}",
            flush=True,
        )


def kept_runs(file: Path, name: str) -> list[Any]:
    """Those of earlier times, unless other code made them."""
    part = read_figures(file).get(name) if file.exists() else None
    runs: list[Any] = [] if part is None or changed(part[KEY]) else part["runs"]
    return runs


def mean(values: Sequence[float]) -> float:
    """Not a number where there is none."""
    return statistics.mean(values) if values else float("nan")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--prompts", choices=("own", "shared"), default="own")
    options.add_argument("--cache", type=int, default=60_000, help="tokens of each engine")
    options.add_argument("--dealt", default="5,5", help="conversations of each engine, of sticky")
    options.add_argument("--only", default=",".join(POLICIES))
    options.add_argument("--runs", type=int, default=1)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    first, second = map(int, given.dealt.split(","))
    case = Case(given.prompts == "shared", (first, second))
    header = origin(Engines.REAL, CODE)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as made, engines(Path(made), given.cache) as pair:
        policies = given.only.split(",")
        for number in range(given.runs):
            for policy in policies:
                run = measured(policy, case, given.seed + number, pair, Path(made))
                runs.append(run)
                print(json.dumps(asdict(run)), flush=True)
            policies.reverse()
            show(runs)
            if given.json:  # at once, since a round may take twenty minutes
                name = f"{given.prompts} {given.cache} {given.dealt}"
                part = {
                    "runs": [*kept_runs(given.json, name), *map(asdict, runs[-len(policies) :])]
                }
                write_part(given.json, name, part, header)


if __name__ == "__main__":
    main()
