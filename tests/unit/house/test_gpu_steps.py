"""What is kept of an engine's steps, and how it is started on a GPU."""

import json
from pathlib import Path

import pytest

from tests.gpu.fit import Point
from tests.gpu.measure import PROMPTS, Sizes, names
from tests.gpu.serving import CHUNK_TOKENS, Machine, _gpu, engine_environment
from tests.gpu.steps import NeverSeenError, is_whole, output_tokens, summary
from tests.support.rank_steps import RankStep


def step(number: int, power_w: float | None) -> RankStep:
    return RankStep(number, 0.01 * number, 100 + number, 5, 0, 68, power_w, prompt_tokens=64)


def test_a_point_has_medians_and_the_power_of_the_later_half() -> None:
    steps = [step(n, 100.0 * n) for n in (1, 2, 3, 4)]
    assert summary(steps) == Point(5, 102.5, 0.025, 4, 350.0, 64)
    assert summary([step(1, 100.0), step(2, None)]).power_w is None


def test_no_step_of_the_kind_is_no_point() -> None:
    with pytest.raises(NeverSeenError):
        summary([])


def test_a_batch_decodes_until_its_last_prompt_has_had_its_steps() -> None:
    assert output_tokens(32, 1024, 100) == 100 + 4 + 32


@pytest.mark.parametrize(
    ("computed", "decoded", "wanted"),
    [(1024, 32, True), (1024, 31, False), (1000, 32, False), (CHUNK_TOKENS - 32, 32, True)],
)
def test_a_prompt_that_fills_the_step_is_whole_with_what_has_room_beside_the_batch(
    computed: int, decoded: int, wanted: bool
) -> None:
    prompt = CHUNK_TOKENS if computed > 1024 else 1024
    seen = RankStep(0.0, 0.1, 9999, 33, 1, computed + decoded, prompt_tokens=computed)
    assert is_whole(seen, prompt, 32) is wanted
    assert not is_whole(seen, prompt, 0)


def test_every_prompt_is_measured_alone_and_beside_the_batch() -> None:
    sizes = Sizes(prompts=(256, 512), mixed=(32, 1024))
    beside = [f"{tokens} beside {batch}" for batch in (0, 32) for tokens in (256, 512)]
    assert names(PROMPTS, sizes) == beside


def test_an_engine_on_a_gpu_schedules_asynchronously_and_asks_for_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Machine(Path("/python"), "llama-3-8b", False, ("--further",), tmp_path, "5f1e")
    command = where.command(("--max-num-seqs", "8"))
    assert where.scheduler.endswith(".EvenstepAsyncScheduler")
    assert "--async-scheduling" in command
    assert command[-1] == "--further"
    model = json.loads((tmp_path / "llama-3-8b" / "config.json").read_text())
    assert model["num_hidden_layers"] == 32

    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    told = engine_environment(where)
    assert (told["CUDA_VISIBLE_DEVICES"], told["VLLM_USE_FLASHINFER_SAMPLER"]) == ("3", "0")
    assert told["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("visible", "asked"),
    [(None, "0"), ("", "0"), ("3", "3"), ("3,4", "3"), ("GPU-a, GPU-b", "GPU-a")],
)
def test_the_gpu_of_a_measurement_is_the_first_that_engines_see(
    visible: str | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text('#!/bin/sh\necho "H200 asked by $4, 139 GiB, 570.1"\necho "another, 1, 2"\n')
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _gpu() == (f"H200 asked by {asked}, 139 GiB", "570.1")
    query.unlink()
    assert _gpu() == ("unknown", "unknown")
