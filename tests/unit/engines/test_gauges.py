"""vLLM's metrics as text."""

import pytest

from router.core.state.foreign_load import Gauges
from router.engines.gauges import of_rank, read_gauges

TWO_RANKS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {odd} \\"name\\""} 3.0
vllm:num_requests_running{engine="1",model_name="a {odd} \\"name\\""} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="200"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="200"} 1.0
process_open_fds 3.0
"""
FIRST, SECOND = Gauges(3, 2, 0.5, 1600), Gauges(1, 0, 0.25, 1600)


def test_each_rank_of_an_engine_is_told_apart() -> None:
    ranks = read_gauges(TWO_RANKS)
    assert ranks == {0: FIRST, 1: SECOND}
    assert (of_rank(ranks, 1), of_rank(ranks, 2)) == (SECOND, None)
    assert FIRST.load_tokens == 800


def test_a_worker_without_a_rank_is_the_whole_engine() -> None:
    assert of_rank(read_gauges(TWO_RANKS), None) == Gauges(4, 2, 0.375, 3200)


def test_an_engine_of_one_rank_is_found_whatever_its_number() -> None:
    text = 'vllm:num_requests_running{model_name="m"} 2\n'
    assert of_rank(read_gauges(text), 5) == Gauges(2)
    text += 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="None"} 1.0\n'
    assert of_rank(read_gauges(text), None) == Gauges(2)


@pytest.mark.parametrize("text", ["", "up 1\n", 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'])
def test_an_engine_that_does_not_tell(text: str) -> None:
    assert of_rank(read_gauges(text), 0) is None


def test_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        read_gauges('vllm:num_requests_running{engine="0"} many\n')


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300"])
@pytest.mark.parametrize(
    "name", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
)
def test_what_no_engine_has(name: str, value: str) -> None:
    told = 'vllm:num_requests_running{engine="0"} 1\n'
    with pytest.raises(ValueError, match=f"vllm:{name} is"):
        read_gauges(f'{told}vllm:{name}{{engine="0"}} {value}\n')


def test_a_cache_beyond_all_bounds_is_of_the_largest_size() -> None:
    config = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{10**30}"}} 1\n'
    gauges = of_rank(read_gauges(f"vllm:num_requests_running{{}} 1\n{config}"), None)
    assert gauges is not None
    assert gauges.kv_tokens == 1 << 32


@pytest.mark.parametrize(("said", "caches"), [("True", True), ("False", False)])
def test_an_engine_says_whether_it_caches_prefixes(said: str, caches: bool) -> None:
    text = f'vllm:cache_config_info{{enable_prefix_caching="{said}",engine="0"}} 1.0\n'
    ranks = read_gauges(f'{text}vllm:num_requests_running{{engine="0"}} 2\n')
    for found in (of_rank(ranks, 0), of_rank(ranks, None)):
        assert found is not None
        assert found.caches_prefixes == caches
