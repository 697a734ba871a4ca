"""A trained model in a real vLLM: what it answers through the router, and when it stops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

import pytest

from tests.support.engine import Installation
from tests.support.engine_steps import Step, judged, predicted_s
from tests.support.rank_steps import rank_steps, reading
from tests.support.server import Server, running_router
from tests.support.trained import Trained, answered, chats, running_trained

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trained(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    with running_trained(engine_installation, tmp_path_factory.mktemp("trained")) as engine:
        yield engine


@pytest.fixture(scope="module")
def router(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_router(tmp_path_factory.mktemp("router"), "--worker", trained.worker) as server:
        yield server


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


@pytest.mark.slow
def test_its_steps_are_learned(trained: Trained) -> None:
    """Looser than on a machine with nothing else to do, see tests/bench/bench_engine_steps.py."""
    with reading([trained.endpoint]) as log:
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
