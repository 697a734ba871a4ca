"""Bytes per token, learned."""

import random

import pytest

from router.core.events import (
    Arrived,
    Dispatched,
    FeedStale,
    PromptCounted,
    SnapshotReceived,
    WorkerUp,
)
from router.core.state.cluster import Cluster
from router.core.state.rates import TokenRate
from router.core.types import Request, WorkerSpec
from tests.support.core import part, running, snapshot, token


def test_before_anything_is_told_a_token_has_four_bytes() -> None:
    rate = TokenRate()
    rate.learn(0, 7)
    rate.learn(7, 0)
    assert rate.bytes_per_token == 4
    assert [rate.tokens(size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize("truth", [1.0, 2.5, 6.0])
def test_estimates_converge_to_the_tokenizers_and_add_up_to_the_load(truth: float) -> None:
    rng = random.Random(1)
    rate = TokenRate()
    prompts = [rng.randint(20, 4000) for _ in range(300)]
    for size in prompts:
        rate.learn(size, round(size / (truth * rng.uniform(0.7, 1.3))))
    assert sum(map(rate.tokens, prompts)) == pytest.approx(sum(prompts) / truth, rel=0.1)


def test_another_kind_of_text_is_learned_anew() -> None:
    rate = TokenRate()
    for truth in (5, 2):
        for _ in range(1000):
            rate.learn(1000, 1000 // truth)
    assert rate.bytes_per_token == pytest.approx(2, rel=0.02)


def test_a_group_learns_from_what_its_engines_show_of_its_own_texts() -> None:
    cluster = Cluster([WorkerSpec("a", "")])
    cluster.apply(WorkerUp("a"))
    rate = cluster.groups["default"].token_rate
    texts = {1: 4000, 2: 0, 3: 4000}
    for number, text_bytes in texts.items():
        sent = Request(token(number), "default", 1000, text_bytes=text_bytes)
        cluster.apply(Arrived(sent))
        if number < 3:
            cluster.apply(Dispatched(sent.id, "a"))
    shown = [running(part(number), 2000) for number in texts]
    cluster.apply(SnapshotReceived("a", snapshot("full", 1, *shown), 0.0))
    learned = TokenRate()
    learned.learn(4000, 2000)
    assert rate.bytes_per_token == learned.bytes_per_token


def test_each_prompt_is_learned_once_however_often_it_is_told() -> None:
    cluster = Cluster([WorkerSpec("a", "")])
    rate = cluster.groups["default"].token_rate
    sent = Request(token(1), "default", 1000, slots=2, text_bytes=4000)
    shown = [running(part(1, index), 2000) for index in (0, 1)]
    counted = PromptCounted(sent.id, 2000)
    for event in (
        WorkerUp("a"),
        Arrived(sent),
        counted,  # on no worker: said of an attempt that has failed
        Dispatched(sent.id, "a"),
        SnapshotReceived("a", snapshot("full", 1, *shown), 0.0),
        SnapshotReceived("a", snapshot("delta", 2, preempted=(part(1),)), 1.0),
        SnapshotReceived("a", snapshot("delta", 3, shown[0]), 2.0),
        FeedStale("a"),
        SnapshotReceived("a", snapshot("full", 4, *shown), 9.0),
        counted,
    ):
        cluster.apply(event)
    learned = TokenRate()
    for _ in shown:
        learned.learn(4000, 2000)
    assert rate.bytes_per_token == learned.bytes_per_token


def test_an_answer_counts_its_prompt() -> None:
    cluster = Cluster([WorkerSpec("a", "")])
    sent = Request(token(1), "default", 1000, text_bytes=4000)
    for event in (Arrived(sent), Dispatched(sent.id, "a"), PromptCounted(sent.id, 2000)):
        cluster.apply(event)
    learned = TokenRate()
    learned.learn(4000, 2000)
    assert cluster.groups["default"].token_rate.bytes_per_token == learned.bytes_per_token
