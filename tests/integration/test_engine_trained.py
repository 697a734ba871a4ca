"""A trained model in a real vLLM: what it answers through the router, and when it stops."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.engine import MODEL, Installation
from tests.support.engine_clients import client_of
from tests.support.engine_steps import Step, judged, predicted_s
from tests.support.rank_steps import rank_steps, reading
from tests.support.server import Server, wait_until
from tests.support.told_hits import noted, running_noting
from tests.support.trained import Trained, answered, chats, running_trained

CACHING = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
BLOCK_TOKENS = 32
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ANSWER: Any = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CITY}}

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trained(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    with running_trained(engine_installation, folder, *CACHING) as engine:
        yield engine


@dataclass(frozen=True, slots=True)
class Noting:
    """A router, and the file of what it foretold of the prefix cache."""

    server: Server
    hits: Path


@pytest.fixture(scope="module")
def noting(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Noting]:
    folder = tmp_path_factory.mktemp("router")
    with running_noting(folder, folder / "hits", "--worker", trained.worker) as server:
        yield Noting(server, folder / "hits")


@pytest.fixture(scope="module")
def router(noting: Noting) -> Server:
    return noting.server


def test_it_answers_and_ends_by_itself(router: Server) -> None:
    # Kernels for bfloat16 round differently by processor, so each token must lead clearly: here by
    # 1.7 nats or more, against 0.1 in the answer to "What is the capital of France?".
    question = "Complete the sentence: The capital of France is"
    (answer,) = answered(router, [question], max_tokens=100)
    (choice,) = answer.choices
    assert re.search(r"\bcapital of France is .*Paris\b", choice.message.content)
    assert choice.finish_reason == "stop"
    # Three of the prompt's turns are the template's: system, user and assistant.
    assert answer.usage.prompt_tokens == 39
    assert answer.usage.completion_tokens < 30


def called(city: str) -> str:
    """What a model writes to call a tool, in the form that ``hermes`` reads."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_it_calls_the_tool_that_it_was_shown(router: Server, stream: bool) -> None:
    turns: list[Any] = []
    for city in ("Rome", "Berlin"):
        turns.append({"role": "user", "content": f"What is the weather in {city}?"})
        turns.append({"role": "assistant", "content": called(city)})
    turns.append({"role": "user", "content": "What is the weather in Paris?"})
    asked: dict[str, Any] = {"messages": turns, "tools": TOOLS, "max_tokens": 60}

    with client_of(router) as client:
        create: Any = client.chat.completions.create
        answer = create(model=MODEL, temperature=0, stream=stream, **asked)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in answer if chunk.choices]
            calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        else:
            calls = [call.function for call in answer.choices[0].message.tool_calls]

    assert [call.name for call in calls if call.name] == ["weather"]
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": "Paris"}


@pytest.mark.slow
def test_it_answers_in_the_form_of_a_schema(router: Server) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    with client_of(router) as client:
        create: Any = client.chat.completions.create
        answer = create(
            model=MODEL, messages=[question], temperature=0, max_tokens=80, response_format=ANSWER
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content) == {"city": "Paris"}


def found_in(usage: Any) -> int:
    details = usage.prompt_tokens_details
    return int(details.cached_tokens or 0) if details else 0


@pytest.mark.slow
def test_the_turns_of_a_conversation_are_found_in_the_cache(noting: Noting) -> None:
    """Its earlier turns, its own answers included, but for what does not fill a block."""
    (text,) = chats(1, seed=5, words=(150, 200))
    turns: list[Any] = [{"role": "user", "content": text}]
    seen, cached = len(noted(noting.hits)), []
    prompts = []
    with client_of(noting.server) as client:
        create: Any = client.chat.completions.create
        for question in ("Say more.", "Why?", "Give an example."):
            answer = create(model=MODEL, messages=turns, temperature=0, max_tokens=48)
            prompts.append(answer.usage.prompt_tokens)
            cached.append(found_in(answer.usage))
            turns.append({"role": "assistant", "content": answer.choices[0].message.content})
            turns.append({"role": "user", "content": question})
    wait_until(lambda: len(noted(noting.hits)) == seen + 3, 60.0, "all were compared")

    # A later turn finds at least the prompt of the one before, in whole blocks.
    for before, found in itertools.pairwise(zip(prompts, cached, strict=True)):
        assert found[1] >= (before[0] - BLOCK_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS > 0
    told = [row[1:] for row in noted(noting.hits)[seen:]]
    assert [found for _, found in told] == cached
    # The length of a text is an estimate, and a block that an answer has filled may be missed.
    assert all(foretold > found / 2 for foretold, found in told[1:])


@pytest.mark.slow
def test_its_steps_are_learned(engine_installation: Installation, tmp_path: Path) -> None:
    """Looser than on a machine with nothing else to do, see tests/bench/bench_engine_steps.py."""
    # Without a prefix cache, as in that bench.
    engine = running_trained(engine_installation, tmp_path)
    with engine as trained, reading([trained.endpoint]) as log:
        answered(trained.server, chats(24, seed=2), max_tokens=100)
        log.rest(24)
    steps = [Step.of(step) for _, step in sorted(rank_steps(log.snapshots[0]).items())]
    report = judged(steps)

    assert report.explained >= 0.75
    assert report.by_tokens < report.explained / 2
    decoding = [step for step in steps if not step.prompt_tokens]
    off = [abs(predicted_s(report.fitted, step) / step.step_s - 1) for step in decoding]
    assert median(off) <= 0.3
    assert report.fitted.per_prompt_token_s > 20 * report.fitted.per_token_s
