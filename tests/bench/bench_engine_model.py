"""Steps per CPU second of the engine model: one rank of 128 running requests that come and go.

python -m tests.bench.bench_engine_model [--json FILE]

A request has a prompt of 8,000 tokens, 16 kinds of which take turns, and 500 output tokens: one in
four steps ends a request and begins another. Without a cache prompts fill every step.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from loadgen.engine.engine import Engine
from loadgen.engine.engine_features import EngineFeatures
from loadgen.engine.request import EngineRequest
from loadgen.report.origin import Engines, origin
from tests.support.figure_files import write_figures

CODE = ("loadgen/engine", "tests/bench/bench_engine_model.py")
RUNNING = 128
KINDS = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 8000, 500
STEPS = 20_000
BLOCKS_OF_512 = EngineFeatures(block_tokens=512)
CASES = {
    "blocks of 512": BLOCKS_OF_512,
    "blocks of 16": EngineFeatures(),
    "no cache": EngineFeatures(prefix_caching=False),
    "three drafts": replace(BLOCKS_OF_512, acceptance=(0.7, 0.7, 0.7)),
}


def steps_per_s(features: EngineFeatures) -> float:
    """Steps of a warm engine per second of CPU."""
    engine = features.engine(RUNNING, 10**7, seed=[0], chunk=2048)
    size = features.block_tokens
    chains = [tuple((kind, n) for n in range(PROMPT_TOKENS // size)) for kind in range(KINDS)]
    numbers = count()

    def arrive(output_tokens: int = OUTPUT_TOKENS) -> None:
        number = next(numbers)
        chain = chains[number % KINDS]
        engine.add(EngineRequest(str(number), PROMPT_TOKENS, output_tokens, chain=chain))

    for place in range(RUNNING):
        arrive(1 + OUTPUT_TOKENS * place // RUNNING)
    _steps(engine, STEPS // 4, arrive)
    begun_s = time.process_time()
    _steps(engine, STEPS, arrive)
    return STEPS / (time.process_time() - begun_s)


def _steps(engine: Engine, steps: int, arrive: Callable[[], None]) -> None:
    for step in range(steps):
        engine.schedule(float(step))
        for _ in engine.advance(float(step)):
            arrive()


def main() -> None:
    """Print each case, the best of three runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {
        name: round(max(steps_per_s(features) for _ in range(3)))
        for name, features in CASES.items()
    }
    print(json.dumps(found, indent=1))
    if given.json is not None:
        physics = BLOCKS_OF_512.described()
        figures = {"running": RUNNING, "steps_per_cpu_s": found}
        write_figures(given.json, figures, origin(Engines.SIMULATED, CODE, physics))


if __name__ == "__main__":
    main()
