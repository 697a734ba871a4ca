"""One engine under KV pressure in virtual time: figures by hand, scenarios, what can go wrong."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from engine_patches.admission import read_admission
from loadgen.engine.request import EngineRequest
from loadgen.simulator.admission.admission_results import AdmissionResult
from loadgen.simulator.admission.admission_simulation import (
    AdmissionConfig,
    EndlessError,
    EvictionKind,
    Order,
    simulate_admission,
)
from loadgen.simulator.admission.predictions import Prediction
from loadgen.simulator.admission.scenarios import (
    SCENARIOS,
    Lognormal,
    Requests,
    Scenario,
    scenario_of,
)
from router.core.errors import ConfigError
from router.core.step_time import StepTime

OFF = read_admission({"policy": "off"})
SECOND = StepTime(1.0)


@dataclass(frozen=True)
class Listed:
    """Requests as they are written down: (arrival, prompt, output)."""

    rows: tuple[tuple[float, int, int], ...]
    cap_tokens: int = 50

    def draw(self, rate: float, count: int, seed: int) -> Requests:
        arrival_s, prompts, outputs = (np.array(column) for column in zip(*self.rows, strict=True))
        return Requests(arrival_s.astype(float), prompts, outputs, np.zeros_like(prompts))


def scenario(
    *rows: tuple[float, int, int], kv_tokens: int = 100, cost: StepTime = SECOND
) -> Scenario:
    return Scenario("listed", "", kv_tokens, cost, Listed(rows), 1.0, len(rows))


def run(*rows: tuple[float, int, int], **options: object) -> AdmissionResult:
    kv_tokens, cost = options.pop("kv_tokens", 100), options.pop("cost", SECOND)
    assert isinstance(kv_tokens, int)
    assert isinstance(cost, StepTime)
    listed = scenario((0, 1, 1), *rows, kv_tokens=kv_tokens, cost=cost)
    return simulate_admission(AdmissionConfig(OFF, listed, **options))  # type: ignore[arg-type]


def test_latency_counts_from_the_arrival_and_leaves_out_the_first() -> None:
    result = run((10.5, 4, 3), (11.5, 4, 1))

    assert result.completed == 3
    assert result.latency_mean_s == pytest.approx(((13.5 - 10.5) + (12.5 - 11.5)) / 2)
    assert result.ttft_mean_s == 1
    assert result.end_s == 13.5
    assert result.throughput_tok_s == pytest.approx(4 / (13.5 - 0.15 * 11.5))
    assert result.kv_used_max == (5 + 4) / 100
    assert result.kv_used_mean == pytest.approx((4 + 9 + 6) / (13.5 - 0.15 * 11.5) / 100)


@pytest.mark.parametrize(
    ("kind", "end_s", "computed"), [(EvictionKind.KEEP, 17.0, 5), (EvictionKind.RESTART, 18.0, 4)]
)
def test_who_is_evicted_keeps_its_tokens_or_begins_anew(
    kind: EvictionKind, end_s: float, computed: int
) -> None:
    """4 and 4, 5 and 5 > 9: the second, with a token, waits until the first has ended, at 14 s."""
    rows, pressed = ((10, 4, 4), (10, 4, 4)), {"kv_tokens": 9, "eviction": kind}
    result = run(*rows, **pressed)
    costly = run(*rows, **pressed, cost=StepTime(1.0, per_prompt_token_s=0.5))

    assert result.preemptions == 1
    assert result.evictions_per_1k == 500
    assert result.end_s == end_s
    assert result.throughput_tok_s == pytest.approx(8 / (end_s - 1.5))
    assert result.completed == 3
    assert costly.end_s == end_s + (4 + 4 + computed) * 0.5


def test_the_watermark_is_kept_free_beside_others_alone() -> None:
    together = run((10, 42, 2), (10, 42, 2))
    apart = run((10, 42, 2), (10, 42, 2), watermark=0.2)
    alone = run((10, 90, 2), watermark=0.2)

    assert (together.end_s, apart.end_s, alone.end_s) == (12, 14, 12)


def test_the_watermark_is_a_number_of_blocks() -> None:
    """Of 6 blocks 30 % are one: beside 3 there is room for 2, which become 3."""
    rows = ((10, 33, 2), (10, 32, 2))
    blocks = {"block_tokens": 16, "kv_tokens": 100}

    assert run(*rows, **blocks, watermark=0.3).end_s == 12
    assert run(*rows, **blocks, watermark=0.4).end_s == 14


def test_told_is_what_both_the_watermark_and_the_policy_would_let_in() -> None:
    policy = read_admission({"policy": "headroom", "headroom": 0.1})
    engine = AdmissionConfig(policy, scenario((0, 1, 1)), watermark=0.2).engine()

    assert engine.admissible_blocks == 100
    engine.add(EngineRequest("first", 40, 2))
    engine.schedule()
    assert engine.admissible_blocks == 100 - 40 - 20


def test_memory_is_held_in_blocks() -> None:
    """Blocks of 16 tokens, 6 of them; 15, 16 and then 17 tokens; 17 and 17 are 4 blocks."""
    result = run((10, 15, 3), (10, 17, 1), block_tokens=16, kv_tokens=100)

    assert result.kv_used_max == 48 / 100
    assert result.kv_used_mean == pytest.approx((48 + 16 + 32) / (13 - 1.5) / 100)
    apart = run((10, 33, 2), (10, 49, 2), block_tokens=16, kv_tokens=111)
    assert apart.end_s == 14
    with pytest.raises(ConfigError, match="--kv-tokens 95 is too small"):
        run((10, 81, 1), block_tokens=16, kv_tokens=95)


def test_prompts_first_pauses_those_that_decode() -> None:
    rows = ((10, 4, 3), (11, 4, 3))
    cost = StepTime(1.0, per_request_s=0.1, per_prompt_token_s=0.5)

    together = run(*rows, cost=cost)
    apart = run(*rows, cost=cost, order=Order.PREFILL_FIRST)

    # A prompt alone takes 3.1 s, beside one that decodes 3.2; then 1.2 for two, 1.1 for one.
    assert together.end_s == pytest.approx(10 + 3.1 + 3.2 + 1.2 + 1.1)
    assert apart.end_s == pytest.approx(10 + 3.1 + 3.1 + 1.2 + 1.2)


def test_a_prompt_in_chunks_holds_all_its_memory_from_the_first_on() -> None:
    """Chunks of 4, 4 and 2 of a prompt; then one token beside a chunk of 3, and one of 1."""
    cost = StepTime(1.0, per_prompt_token_s=0.5)
    listed = scenario((0, 10, 2), (8, 4, 1), cost=cost)
    result = simulate_admission(AdmissionConfig(OFF, replace(listed, slots=3, chunk=4)))

    assert result.latency_mean_s == 8 + 2.5 + 1.5 - 8
    assert result.end_s == 12
    assert result.kv_used_mean == pytest.approx((10 * 5 + 15 * 2.5 + 4 * 1.5) / 10.8 / 100)


def test_steps_cost_nothing_for_the_first_kv_tokens_where_it_is_piecewise() -> None:
    cost = StepTime(1.0, per_token_s=0.1)

    assert run((10, 20, 1), cost=cost).end_s == pytest.approx(13)
    assert run((10, 20, 1), cost=cost, free_tokens=15).end_s == pytest.approx(11.5)
    assert run((10, 20, 1), cost=cost, free_tokens=50).end_s == pytest.approx(11)


def test_who_comes_in_the_last_step_of_all_others_is_served() -> None:
    assert run((10.0, 4, 1), (10.5, 4, 1)).completed == 3


def test_memory_is_held_while_those_who_hold_it_pause() -> None:
    """As printed, two enter and then pause for half a minute, with 5 tokens each."""
    strict = {"policy": "wait", "strict": True, "thresholds": [2]}
    config = AdmissionConfig(read_admission(strict), scenario((0, 4, 2), (0, 4, 2)))

    with pytest.warns(UserWarning, match="strict"):
        result = simulate_admission(config)

    assert result.end_s == 31
    assert result.kv_used_mean == pytest.approx((8 + 29 * 10 + 10) / 31 / 100)
    assert result.step_mean_s == 1


def test_all_are_cleared_again_and_again() -> None:
    """Two of 4 and 7 tokens fit as they enter, and never together to their end."""
    listed = scenario((0, 4, 7), (0, 4, 7), kv_tokens=12)
    settings = {"policy": "alpha_beta", "alpha": 0.1}

    ended = simulate_admission(AdmissionConfig(read_admission({**settings, "beta": 0.5}), listed))
    assert ended.completed == 2
    assert ended.preemptions > 0
    assert ended.parameters["eviction"] == "restart", "though keep is the default"
    with pytest.raises(EndlessError, match="again and again"):
        simulate_admission(AdmissionConfig(read_admission({**settings, "beta": 1.0}), listed))


def test_hardly_any_ends() -> None:
    settings = read_admission({"policy": "alpha_beta", "alpha": 0.0, "beta": 0.5})
    crowd = scenario(*[(0, 1, 40)] * 60, kv_tokens=60)

    with pytest.raises(EndlessError, match="20 times the output of all requests was thrown away"):
        simulate_admission(AdmissionConfig(settings, crowd))


@pytest.mark.parametrize(
    ("settings", "completions"),
    [
        ({"policy": "off"}, (2.98, 3.02)),
        ({"policy": "wait", "thresholds": [4], "headroom": 0.0, "adaptive": False}, (3.98, 4.02)),
    ],
)
def test_example_2(settings: dict[str, object], completions: tuple[float, float]) -> None:
    """arXiv 2504.11320: greedy admission ends 3 an iteration, at most 4 entries each end 4."""
    config = AdmissionConfig(
        read_admission(settings),
        replace(scenario_of("example2"), requests=4000),
        eviction=EvictionKind.RESTART,
    )
    result = simulate_admission(config)

    assert completions[0] <= result.throughput_req_s <= completions[1]
    assert result.completed == 4000


def test_headroom_under_pressure() -> None:
    """The order of magnitude that a few hundred requests can show."""
    chat = replace(scenario_of("chat70b"), requests=2500)
    own = simulate_admission(AdmissionConfig(OFF, chat))
    ours = simulate_admission(AdmissionConfig(read_admission({"policy": "headroom"}), chat))

    assert ours.evictions_per_1k < own.evictions_per_1k / 10
    assert ours.throughput_tok_s > own.throughput_tok_s
    assert ours.latency_mean_s < own.latency_mean_s


@pytest.mark.parametrize("name", SCENARIOS)
def test_requests_are_the_same_again_and_fit(name: str) -> None:
    found = SCENARIOS[name]
    one, again = (found.source.draw(found.rate, 3000, seed=1) for _ in range(2))
    faster = found.source.draw(2 * found.rate, 3000, seed=1)

    for field in ("arrival_s", "prompt_tokens", "output_tokens", "kinds"):
        assert np.array_equal(getattr(one, field), getattr(again, field))
    assert np.array_equal(one.output_tokens, faster.output_tokens)
    assert faster.arrival_s[-1] < 0.51 * one.arrival_s[-1]
    assert (np.diff(one.arrival_s) >= 0).all()
    assert len(one.arrival_s) / one.arrival_s[-1] == pytest.approx(found.rate, rel=0.1)
    assert min(one.prompt_tokens.min(), one.output_tokens.min()) >= 1
    assert one.output_tokens.max() <= found.source.cap_tokens
    assert (one.prompt_tokens + one.output_tokens).max() <= found.kv_tokens


@pytest.mark.parametrize(
    ("name", "prompt_mean", "prompt_median", "output_mean", "output_median"),
    [("chat70b", 40.6, 11, 85.3, 45), ("reason32b", 320, 200, 1300, 650)],
)
def test_lengths_of_a_scenario_have_its_means(
    name: str, prompt_mean: float, prompt_median: float, output_mean: float, output_median: float
) -> None:
    """Medians grow as all that was cut off is made up for, by a sixth at most."""
    found = scenario_of(name)
    requests = found.source.draw(found.rate, 20_000, seed=0)

    assert requests.prompt_tokens.mean() == pytest.approx(prompt_mean, rel=0.01)
    assert requests.output_tokens.mean() == pytest.approx(output_mean, rel=0.01)
    assert 0.95 < np.median(requests.prompt_tokens) / prompt_median < 7 / 6
    assert 0.95 < np.median(requests.output_tokens) / output_median < 7 / 6


def test_lengths_have_the_mean_and_stay_below_the_limit() -> None:
    lengths = Lognormal(85.3, 45, 1000).draw(np.random.default_rng(0), 20_000)

    assert lengths.mean() == pytest.approx(85.3, rel=0.01)
    assert np.median(lengths) == pytest.approx(45, rel=0.1)
    assert (lengths.min(), lengths.max()) == (1, 1000)


def test_predictions() -> None:
    outputs = np.array([1, 10, 100, 1000])

    assert Prediction.parse("exact").hints(outputs, 1000, 0) == [1, 10, 100, 1000]
    assert Prediction.parse("cap").hints(outputs, 1000, 0) == [None] * 4
    assert Prediction.parse("quantile:0.9").hints(outputs, 1000, 0) == [None] * 4
    noisy = Prediction.parse("lognormal:0.8").hints(np.full(5000, 100), 1000, 0)
    assert np.median(np.array(noisy)) == pytest.approx(100, rel=0.05)
    assert np.std(np.log(np.array(noisy, dtype=float))) == pytest.approx(0.8, rel=0.05)
    assert max(Prediction("lognormal", 5.0).hints(outputs, 1000, 0)) <= 1000  # type: ignore[type-var, operator]
    for text in ("exact", "cap", "quantile:0.9999999", "lognormal:0.12345678"):
        assert str(Prediction.parse(text)) == text
    told = [Prediction.parse(text).setting for text in ("exact", "cap", "quantile:0.9999999")]
    assert told == ["hint", "cap", "quantile:0.9999999"]
    for wrong in ("exactly", "quantile:1", "quantile:x", "lognormal:-1", "lognormal:6", "cap:1"):
        with pytest.raises(ConfigError, match="--predict"):
            Prediction.parse(wrong)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rate must be from 1e-06 to 1e\\+06"):
        AdmissionConfig(OFF, replace(scenario_of("chat70b"), rate=0.0))
    with pytest.raises(ConfigError, match=r"--requests must be from 1 to .*, got 1000"):
        AdmissionConfig(OFF, replace(scenario_of("chat70b"), requests=10**400))
    with pytest.raises(ConfigError, match="--watermark"):
        AdmissionConfig(OFF, scenario_of("chat70b"), watermark=1.0)
    with pytest.raises(ConfigError, match="--free-tokens must be at least 0, got -1"):
        AdmissionConfig(OFF, scenario_of("chat70b"), free_tokens=-1)
    with pytest.raises(ConfigError, match="must be above --max-num-seqs"):
        AdmissionConfig(OFF, replace(scenario_of("chat70b"), chunk=256))
    with pytest.raises(ConfigError, match="unknown scenario 'chat'; did you mean chat70b"):
        scenario_of("chat")
    with pytest.raises(ConfigError, match="--kv-tokens 9 is too small"):
        run((10, 8, 3), kv_tokens=9)
