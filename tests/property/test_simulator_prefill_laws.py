"""What holds for every simulation with prefill workers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.engine.kv_handoff import TransferTime
from loadgen.engine.prefill_settings import PrefillTime
from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_command import ARRIVALS
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_results import DecodeResult
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.prefill_workers import PrefillConfig
from loadgen.traces.arrivals import Arrivals
from router.core.types import Dispatch
from tests.property.test_simulator_laws import (
    MEANS,
    REQUESTS,
    SIZES,
    check_served_once,
    config_of,
    stream_of,
)
from tests.support.paper import PAPER

LONGEST_PROMPT = 60
PREFILLS = st.builds(
    PrefillConfig,
    workers=st.integers(1, 3),
    time=st.builds(PrefillTime, st.sampled_from([0.0, 0.05, 2.0]), st.sampled_from([0.0, 1e-3])),
    chunk=st.sampled_from([1, 7, 64, 1000]),
    kv_tokens=st.sampled_from([0, LONGEST_PROMPT, 100]),
    transfer=st.builds(TransferTime, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 1e-2])),
)
AT_ONCE = PrefillConfig(3, PrefillTime(0.0, 0.0), transfer=TransferTime(0.0, 0.0))


@pytest.mark.parametrize("policy", ["fcfs", "bfio", "least_tokens"])
@given(REQUESTS, PREFILLS, st.fixed_dictionaries(SIZES), st.fixed_dictionaries(MEANS))
@settings(max_examples=25, deadline=None)  # the first one compiles
def test_everybody_is_served_once_whatever_the_memory(
    policy: str,
    rows: list[tuple[int, int, float, int]],
    prefill: PrefillConfig,
    sizes: dict[str, int],
    means: dict[str, int],
) -> None:
    result = check_served_once(config_of(policy, prefill=prefill, **sizes, **means), rows)

    check_parts(result)
    check_memory(result, prefill)


@given(REQUESTS, PREFILLS, st.fixed_dictionaries(SIZES))
@settings(max_examples=25)
def test_instant_dispatch_binds_prompts_as_they_are_computed(
    rows: list[tuple[int, int, float, int]], prefill: PrefillConfig, sizes: dict[str, int]
) -> None:
    config = config_of("jsq", prefill=prefill, dispatch=Dispatch.INSTANT, **sizes)
    result = simulate(config, stream=stream_of(rows))

    assert (result.completed, result.max_pool_wait_steps) == (len(rows), 0)
    check_parts(result)
    check_memory(result, prefill)


def check_parts(result: DecodeResult) -> None:
    """Parts of the TTFT are no less than nothing, and add up to it."""
    found = result.prefill
    assert found is not None
    parts = (
        *(found.prefill_queue_mean_s, found.prefill_mean_s, found.handoff_wait_mean_s),
        *(found.kv_transfer_mean_s, found.first_step_mean_s),
    )
    assert all(part is not None and part >= 0 for part in parts)
    assert sum(part or 0.0 for part in parts) == pytest.approx(result.ttft_mean_s)


def check_memory(result: DecodeResult, prefill: PrefillConfig) -> None:
    """What is kept never exceeds the memory; shares are shares."""
    found = result.prefill
    assert found is not None
    rounded = 1 + 1e-9  # a mean of equal numbers
    assert 0 <= found.prefill_kept_mean_tokens <= found.prefill_kept_max_tokens * rounded
    if prefill.kv_tokens:
        assert found.prefill_kept_max_tokens <= prefill.workers * prefill.kv_tokens
    shares = found.prefill_busy_share, found.prefill_stalled_share
    assert min(shares) >= 0
    assert sum(shares) <= 1 + 1e-9


@pytest.mark.parametrize("policy", ["bfio", "least_tokens"])
@pytest.mark.parametrize("dispatch", Dispatch)
@given(REQUESTS, st.fixed_dictionaries(SIZES))
@settings(max_examples=15)
def test_prefill_that_takes_no_time_changes_nothing(
    policy: str,
    dispatch: Dispatch,
    rows: list[tuple[int, int, float, int]],
    sizes: dict[str, int],
) -> None:
    config = config_of(policy, dispatch=dispatch, **sizes)
    without = simulate(config, stream=stream_of(rows))
    with_ = simulate(replace(config, prefill=AT_ONCE), stream=stream_of(rows))

    assert figures(with_) == figures(without)


@pytest.mark.parametrize("arrivals", ["full", "poisson:900"])
def test_prefill_that_takes_no_time_changes_no_load(arrivals: str) -> None:
    config = DecodeConfig(
        policy="bfio",
        lengths=LawLengths.parse("geometric:100,40"),
        workers=4,
        slots=8,
        pool=16,
        steps=300,
        warmup=50,
        arrivals=Arrivals.parse(arrivals, ARRIVALS),
        **PAPER,
    )
    with_ = simulate(replace(config, prefill=AT_ONCE))

    assert figures(with_) == figures(simulate(config))
    assert figures(simulate(replace(config, prefill=AT_ONCE))) == figures(with_)


def figures(result: DecodeResult) -> dict[str, object]:
    """Those of the decode side."""
    report = replace(result, prefill=None).report()
    del report["parameters"]
    return report
