"""The league's latency predictor: what it learns, and whom it picks then."""

import asyncio
import importlib
import json
import random
from collections import Counter

import numpy as np
import pytest

from tests.bench.league.latency_models import (
    _XGBOOST,
    FEWEST_TO_SPLIT,
    MOST_IN_BUCKET,
    UNTRAINED_MS,
    Features,
    Model,
    Samples,
    boosted,
    forest,
    ridge,
)
from tests.bench.league.pins import PEERS
from tests.bench.league.predictor import Candidate, Predictor, Prefixes, pick, scores, sticky
from tests.bench.league.relay import Asked

BLOCK = 64


def asked(number: int, prompt: str) -> Asked:
    body = {"prompt": prompt, "max_tokens": 5, "stream": True}
    return Asked(number, "/v1/completions", json.dumps(body).encode(), 0.0, sent_s=100.0)


def engine_ms(waiting: float, prefill_tokens: float, uncached: float) -> tuple[float, float]:
    """What engines take for a prompt, and for each token."""
    return 4 + 30 * waiting + 0.05 * (prefill_tokens + uncached), 10 + 2 * waiting


class Bench:
    """A predictor before two engines that take a known time."""

    def __init__(self) -> None:
        prefixes = Prefixes(BLOCK, [1000, 1000])
        self.predictor = Predictor(["a", "b"], ridge, "emulated", prefixes, 5000.0)
        self.waiting = [0, 0]
        self._numbers = iter(range(10**6))

    def say(self, *waiting: int) -> None:
        self.waiting = list(waiting)
        for worker, value in enumerate(waiting):
            gauges = f'vllm:num_requests_waiting{{engine="{worker}"}} {float(value)}\n'
            gauges += f'vllm:kv_cache_usage_perc{{engine="{worker}"}} 0.25\n'
            self.predictor.told(worker, gauges.encode())

    async def ask(self, prompt: str) -> int:
        """One request from its beginning to its end."""
        request = asked(next(self._numbers), prompt)
        request.worker = await self.predictor.choose(request)
        features = request.own.features
        ttft_ms, tpot_ms = engine_ms(
            self.waiting[request.worker], features.prefill_tokens, request.own.prefill_tokens
        )
        request.first_s = request.sent_s + ttft_ms / 1e3
        self.predictor.on_first_token(request)
        request.events = 5
        request.last_s = request.first_s + 4 * tpot_ms / 1e3
        self.predictor.on_end(request, whole=True)
        return request.worker

    def learn(self, count: int) -> None:
        async def run() -> None:
            draw = random.Random(1)
            for _ in range(count):
                self.say(draw.randrange(4), draw.randrange(4))
                await self.ask("".join(draw.choices("abc ", k=4 * draw.randrange(10, 2000))))
            await self.predictor.train()

        asyncio.run(run())


def row(waiting: float, prefill_tokens: float = 0.0, tokens: int = 500) -> Features:
    return Features(0.25, waiting, 0, prefill_tokens, tokens, 0.0)


def test_it_learns_linear_latencies_of_both_kinds() -> None:
    bench = Bench()
    assert bench.predictor.ttft.predict([row(0).ttft_row()]) == [UNTRAINED_MS]
    bench.learn(600)
    seen = [row(0), row(3), row(1, tokens=1500)]
    ttft = bench.predictor.ttft.predict([each.ttft_row() for each in seen])
    tpot = bench.predictor.tpot.predict([each.tpot_row() for each in seen])
    expected = [engine_ms(each.waiting, 0, each.input_tokens) for each in seen]
    assert ttft == pytest.approx([first for first, _ in expected], rel=0.02)
    assert tpot == pytest.approx([second for _, second in expected], rel=0.02)


def test_then_the_faster_engine_is_picked_and_before_that_any() -> None:
    async def chosen(bench: Bench) -> Counter[int]:
        bench.say(3, 0)
        for engine in bench.predictor.engines:
            engine.requests += 1  # else the idle one comes first
        return Counter([await bench.ask(f"{turn} " * 100) for turn in range(100)])

    before = asyncio.run(chosen(Bench()))
    assert min(before.values()) > 30
    bench = Bench()
    bench.learn(300)
    after = asyncio.run(chosen(bench))
    assert after[1] > 95


def test_counts_of_requests_and_prompts_end_with_them() -> None:
    bench = Bench()

    async def run() -> None:
        first, second = asked(1, "a" * 4 * BLOCK), asked(2, "b" * 4 * BLOCK)
        first.worker = await bench.predictor.choose(first)
        second.worker = await bench.predictor.choose(second)
        # The first engine is not idle any more.
        assert {first.worker, second.worker} == {0, 1}
        engine = bench.predictor.engines[first.worker]
        assert (engine.requests, engine.prefill_tokens) == (1, BLOCK)
        first.first_s = 100.5
        bench.predictor.on_first_token(first)
        assert (engine.requests, engine.prefill_tokens) == (1, 0)
        bench.predictor.on_end(first, whole=False)
        bench.predictor.on_end(second, whole=False)
        left = [(each.requests, each.prefill_tokens) for each in bench.predictor.engines]
        assert left == [(0, 0), (0, 0)]

    asyncio.run(run())
    told = bench.predictor.evidence()
    assert (told["ttft_samples"], told["tpot_samples"]) == (1, 0)


def test_a_prompt_goes_where_it_was_sent_before() -> None:
    bench = Bench()
    prompt = "".join(random.Random(3).choices("abc", k=40 * BLOCK))

    async def run() -> set[int]:
        return {await bench.ask(prompt + f"{turn}" * 4) for turn in range(20)}

    assert len(asyncio.run(run())) == 1
    told = bench.predictor.evidence()
    assert told["matched_share"] == pytest.approx(19 / 20 * 10 / 11)


def candidate(worker: int, prefix: float, ttft_ms: float, tpot_ms: float = 9.0) -> Candidate:
    return Candidate(worker, prefix, 1, ttft_ms, tpot_ms)


def test_an_engine_with_the_prompt_is_left_when_it_is_that_much_slower() -> None:
    holder, other = candidate(0, 0.9, 5100.0), candidate(1, 0.2, 50.0)
    assert sticky([holder, other], 0.8, 5000.0) == [holder, other]
    assert sticky([holder, other], 0.8, 5100.0) == [holder]
    assert sticky([holder, other], 0.95, 5100.0) == [holder, other]


def test_without_filters_latency_alone_decides() -> None:
    slow, fast = candidate(0, 1.0, 400.0), candidate(1, 0.0, 50.0)
    draw = random.Random(0)
    assert {pick([slow, fast], 5000.0, draw) for _ in range(20)} == {0}
    assert Counter(pick([slow, fast], None, draw) for _ in range(100))[1] > 95


def test_scores_weigh_both_latencies() -> None:
    best, middle, worst = candidate(0, 0, 10, 5), candidate(1, 0, 20, 5), candidate(2, 0, 30, 10)
    assert scores([best, middle, worst]) == [1.01, 0.61, 0.01]
    assert scores([best, middle]) == [1.01, 0.01]  # by the first token alone
    assert scores([best, best]) == [0.51, 0.51]


def test_an_idle_engine_comes_first() -> None:
    idle = Candidate(2, 0.0, 0, 900.0, 90.0)
    draw = random.Random(0)
    assert {pick([candidate(0, 0, 1.0), idle], 5000.0, draw) for _ in range(20)} == {2}


def test_prefixes_forget_an_engines_oldest_blocks() -> None:
    prefixes = Prefixes(2, [3, 3])
    first, second = prefixes.blocks([1, 2, 3, 4, 5], ""), prefixes.blocks([1, 2, 9], "")
    assert len(first) == 3
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert prefixes.blocks([1, 2], "salt")[0] != first[0]
    prefixes.add(1, first)
    assert prefixes.matches(first) == [0, 1]
    assert prefixes.matches(second) == [0, 0.5]
    prefixes.add(1, second)  # the four blocks are one too many
    assert prefixes.matches(second) == [0, 1]
    assert prefixes.matches(first) == [0, 1 / 3]


def test_engines_with_waiting_requests_have_a_model_of_their_own_once_there_is_enough() -> None:
    def trained(count: int) -> list[float]:
        samples = Samples()
        draw = random.Random(2)
        for index in range(2 * count):
            features = Features(draw.random(), index % 2, 0, 0.0, 100 + index % 7, 0.0)
            tokens = features.input_tokens
            latency_ms = 3.0 * tokens if features.waiting else 1000.0 - tokens
            samples.add(features, features.ttft_row(), latency_ms)
        model = Model(ridge)
        model.train({queued: samples.taken(queued) for queued in (None, False, True)})
        rows = [Features(0.5, waiting, 0, 0.0, 106, 0.0).ttft_row() for waiting in (0, 1)]
        return model.predict(rows)

    assert trained(FEWEST_TO_SPLIT) == pytest.approx([894, 318], rel=1e-3)
    assert trained(FEWEST_TO_SPLIT - 1)[0] != pytest.approx(894, rel=1e-3)


def test_a_full_bucket_forgets_its_oldest() -> None:
    samples = Samples()
    for index in range(MOST_IN_BUCKET + 10):
        samples.add(row(0), [float(index)], 1.0)
    samples.add(row(1), [-1.0], 1.0)
    assert len(samples) == MOST_IN_BUCKET + 1
    assert samples.taken(queued=False)[0].min() == 10
    assert samples.taken(queued=True)[0].tolist() == [[-1.0]]
    assert len(samples.taken()[1]) == len(samples)


@pytest.mark.skipif(not PEERS["predictor"].installed, reason="XGBoost has not been installed")
def test_trees_say_what_xgboost_says() -> None:
    draw = np.random.default_rng(0)
    x = draw.uniform(0, 100, (400, 9)).round(1)
    y = x[:, 0] * (x[:, 1] > 40) + 3 * x[:, 2] + draw.normal(0, 1, 400)
    fit = boosted(str(PEERS["predictor"].libraries))
    xgboost = importlib.import_module("xgboost")
    own = xgboost.train(dict(_XGBOOST), xgboost.DMatrix(x, label=y), num_boost_round=200)
    assert fit(x, y)(x[:50]) == pytest.approx(own.inplace_predict(x[:50]), rel=1e-4)
    assert fit(x, y)(x) == pytest.approx(y, abs=25)


def test_a_tree_is_followed_to_its_leaf() -> None:
    def tree(left: list[int], right: list[int], of: list[int], at: list[float]) -> object:
        names = ("left_children", "right_children", "split_indices", "split_conditions")
        return dict(zip(names, (left, right, of, at), strict=True))

    trees = [
        tree([1, -1, 3, -1, -1], [2, -1, 4, -1, -1], [1, 0, 0, 0, 0], [5.0, 10.0, 2.0, 20.0, 30.0]),
        tree([-1], [-1], [0], [0.25]),
    ]
    model = {"learner_model_param": {"base_score": "[1E0]"}}
    saved = {"learner": {**model, "gradient_booster": {"model": {"trees": trees}}}}
    rows = np.array([[0.0, 4.0], [1.0, 5.0], [2.0, 6.0]])
    assert forest(saved)(rows).tolist() == [11.25, 21.25, 31.25]


def test_ridge_bears_columns_without_information() -> None:
    flat = ridge(np.full((9, 3), 7.0), np.full(9, 4.0))
    assert flat(np.array([[1.0, 2.0, 3.0]])) == pytest.approx([4.0])
    x = np.array([[float(index), 7.0, 2.0 * index] for index in range(50)])
    predict = ridge(x, 3 * x[:, 0] + 1)
    assert predict(np.array([[60.0, 7.0, 120.0]])) == pytest.approx([181], rel=1e-3)
