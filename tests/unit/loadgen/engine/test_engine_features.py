import re
from fractions import Fraction

import numpy as np
import pytest

from loadgen.engine.engine_features import EngineFeatures, Window, parse_drafts, parse_window
from loadgen.engine.kv_layers import KvLayers
from loadgen.engine.request import EngineRequest
from loadgen.engine.schedule import Drafts
from router.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "acceptance"),
    [("2,.7", (0.7, 0.7)), ("3,.8,.6,.4", (0.8, 0.6, 0.4)), ("1,1", (1.0,))],
)
def test_drafts(text: str, acceptance: tuple[float, ...]) -> None:
    assert parse_drafts(text) == acceptance


@pytest.mark.parametrize(
    "text",
    ["", "3", "0,.5", "2,.5,.5,.5", "2,1.5", "1.5,.5", "a,b", "65,.5", "1e18,.5", "-1e18,.5"],
)
def test_drafts_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--speculate"):
        parse_drafts(text)


def test_windows() -> None:
    assert parse_window("1024,5/6") == Window(1024, Fraction(5, 6))
    assert parse_window("512") == Window(512, Fraction(1))
    assert parse_window("512,.75") == Window(512, Fraction(3, 4))
    assert parse_window("512,1.0") == Window(512, Fraction(1))
    features = EngineFeatures(window=Window(1024, Fraction(5, 6)), acceptance=(0.5,))
    assert features.layers == KvLayers(16, 1, 5, 1024, 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-5", "10,0", "10,7/6", "10,1/0", "a", "10,b", "10,.", "10,1/2,3"),
        *("10,1e99999999", "99999999999999999999999,1/2", "10,1/99999", "9" * 5000),
    ],
)
def test_windows_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--window"):
        parse_window(text)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"block_tokens": 0}, "--block-tokens must be from 1 to 1e+06, got 0"),
        ({"block_tokens": 10**9}, "--block-tokens must be from 1 to 1e+06, got 1000000000"),
        ({"prompt_budget": 0}, "--prompt-budget must be from 1 to 1e+09, got 0"),
        (
            {"long_prefill_token_threshold": 0},
            "--long-prefill-token-threshold must be from 1 to 1e+09, got 0",
        ),
        ({"prefill_every": 0}, "--prefill-every must be from 1 to 1e+09, got 0"),
        ({"window": Window(10, Fraction(1))}, "give --no-prefix-caching"),
    ],
)
def test_features_that_are_refused(fields: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(option)):
        EngineFeatures(**fields)  # type: ignore[arg-type]


def test_what_is_on_is_told() -> None:
    assert str(EngineFeatures()) == "prefix caching, blocks of 16 tokens"
    features = EngineFeatures(
        prefix_caching=False,
        prompt_budget=512,
        long_prefill_token_threshold=256,
        prefill_every=4,
        acceptance=(0.7, 0.7),
        window=Window(1024, Fraction(5, 6)),
    )
    assert str(features) == (
        "no prefix caching, blocks of 16 tokens, at most 512 prompt tokens a step, "
        "at most 256 of one request, prompts in one of 4 steps, 2 drafts a step, "
        "a window of 1024 tokens in 5/6 of the layers"
    )
    assert features.described() == {
        "prefix_caching": False,
        "block_tokens": 16,
        "prompt_budget": 512,
        "long_prefill_token_threshold": 256,
        "prefill_every": 4,
        "draft_acceptance": [0.7, 0.7],
        "window": {"tokens": 1024, "share_of_layers": "5/6"},
    }


def test_a_position_of_a_draft_needs_those_before_it() -> None:
    drafts = Drafts([0.8, 0.5], np.random.default_rng(1))
    accepted = np.array(drafts.accepted(40_000))
    shares = [float(np.mean(accepted >= least)) for least in (1, 2)]
    assert shares == pytest.approx([0.8, 0.4], abs=0.01)
    assert accepted.max() == 2


def test_a_window_bounds_memory_and_reading() -> None:
    features = EngineFeatures(
        prefix_caching=False, block_tokens=1, window=Window(10, Fraction(1, 2))
    )
    engine = features.engine(1, 100, seed=[0])
    engine.add(EngineRequest("a", 50, 5))
    engine.schedule()
    assert engine.batch_tokens == (50 + 10) / 2
    # One token more, as a window straddles a block more than it fills.
    assert engine.used_tokens == -(-(50 + 11) // 2)


def test_a_step_computes_no_more_of_one_prompt_than_the_threshold() -> None:
    features = EngineFeatures(long_prefill_token_threshold=30)
    engine = features.engine(4, 1000, seed=[0], chunk=100)
    engine.add(EngineRequest("long", 70, 9))
    engine.add(EngineRequest("short", 20, 9))
    computed = []
    while engine.unfinished:
        computed.append(engine.schedule().prefill_tokens)
        engine.advance()
    assert computed[:4] == [30 + 20, 30, 10, 0]


def test_a_step_computes_no_more_than_its_batch() -> None:
    features = EngineFeatures(acceptance=(0.5,) * 7)
    engine = features.engine(8, 4000, seed=[0], chunk=65)
    for number in range(12):
        engine.add(EngineRequest(f"{number}", 40, 60))
    while engine.unfinished:
        step = engine.schedule()
        assert step.prefill_tokens + step.decode_tokens <= 65
        free = engine._room().prompt_tokens_left
        decoding = sum(not each.prefill_left for each in engine.running)
        assert free <= 65 - 8 * decoding
        engine.advance()
