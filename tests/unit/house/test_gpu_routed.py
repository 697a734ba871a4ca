"""What is sent through a router before one engine, and the figures that are made of it."""

import json
from dataclasses import replace
from typing import Any

import msgspec

from loadgen.traces.trace_files import BLOCK_TOKENS
from router.core.types import Snapshot
from tests.gpu.routed import (
    LATENCIES,
    SMALL,
    Traffic,
    bounds,
    budget_figures,
    conversations,
    mixture,
    names,
    repeated,
)
from tests.gpu.serving import prompt


def step(number: int, prompt_tokens: int, budget: int, step_s: float = 0.01) -> Snapshot:
    told = Snapshot("delta", "g", "w", 0, "epoch", number, number, 1.0, step_s)
    return msgspec.structs.replace(
        told, scheduled_prefill_tokens=prompt_tokens, prompt_budget=budget
    )


def test_each_run_is_the_first_of_its_pair_in_turn() -> None:
    three = ["1 without", "1 with", "2 with", "2 without", "3 without", "3 with"]
    assert names(replace(SMALL, pairs=3)) == three


def test_one_prompt_of_so_many_is_long_and_has_an_answer_of_one_token() -> None:
    rows = mixture(Traffic(requests=9, every=3, short=5, long=800, answer=7))
    short, long = (5, 7), (800, 1)
    assert [(row["input_length"], row["output_length"]) for row in rows] == 3 * [short, short, long]
    assert len({tuple(row["hash_ids"]) for row in rows}) == 9


def test_each_turn_begins_as_the_one_before_of_its_conversation_alone() -> None:
    traffic = replace(SMALL, talks=3, turns=3, added=2, question=10)
    rows = conversations(traffic)
    assert [row["input_length"] for row in rows] == [
        blocks * BLOCK_TOKENS + 10 for blocks in (2, 2, 2, 4, 4, 4, 6, 6, 6)
    ]
    held: set[tuple[int, ...]] = set()
    found = 0
    for row in rows:
        begun = [tuple(row["hash_ids"][:end]) for end in range(1, len(row["hash_ids"]) + 1)]
        found += sum(each in held for each in begun)
        held.update(begun)
    assert found * BLOCK_TOKENS == repeated(traffic)
    assert found == 3 * (2 + 4)


def test_a_step_above_its_budget_is_counted() -> None:
    told = [step(1, 0, 64), step(2, 64, 64), step(3, 65, 64, 0.5), step(4, 900, 0)]
    assert bounds(told) == {
        "steps_with_prompts": 3,
        "bounded_steps": 2,
        "steps_above_budget": 1,
        "median_budget_tokens": 64,
        "most_prompt_tokens": 900,
        "longest_step_s": 0.5,
    }


def test_ratios_are_those_of_whole_pairs() -> None:
    def run(value: float) -> dict[str, Any]:
        return dict.fromkeys(LATENCIES, value)

    runs = {"1 without": run(10.0), "1 with": run(5.0), "2 with": run(8.0)}
    assert budget_figures({}) is None
    assert budget_figures({"2 with": run(8.0)}) is None
    found = budget_figures(runs)
    assert found is not None
    assert (found["pairs"], found["p99_tpot_ms"]) == (1, {"without": 10, "with": 5, "ratio": 0.5})

    found = budget_figures({**runs, "2 without": run(32.0)})
    assert found is not None
    assert found["pairs"] == 2
    assert found["mean_ttft_ms"] == {"without": 21, "with": 6.5, "ratio": 0.375}
    json.dumps(found)


def test_no_two_prompts_of_an_engine_begin_alike() -> None:
    numbers = [*range(300), 101**2, 101**2 + 1, 101**3]
    assert len({tuple(prompt(16, number)[:4]) for number in numbers}) == len(numbers)
    assert len(prompt(3, 1)) == 3
