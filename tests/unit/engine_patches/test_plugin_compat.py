from __future__ import annotations

import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.plugin.compat import (
    HIDDEN_LENGTH_KEY,
    EngineView,
    admissions,
    check_end_workers,
    end_tokens,
    mark,
    preempted,
)
from engine_patches.plugin.compat_names import FEATURES, missing
from engine_patches.plugin.end_table import EndWriter, table_path
from engine_patches.plugin.settings import PlugInError
from engine_patches.power.devices import RankGpus
from loadgen.emulator.generation import HIDDEN_LENGTH
from tests.support.plugin_engine import (
    CachedRequestData,
    Coordinator,
    FakeScheduler,
    FullAttentionManager,
    KVCacheTensor,
    NewRequestData,
    Request,
    SamplingParams,
    SchedulerOutput,
)

pytestmark = pytest.mark.usefixtures("vllm")


def test_what_is_read_of_an_engine() -> None:
    scheduler = FakeScheduler(slots=7, blocks=50, rank=2)
    view = EngineView(scheduler)
    scheduler.add_request(Request("a", 10))
    scheduler.add_request(Request("b", 10))
    scheduler.finish_requests(["b"])
    assert (view.rank, view.slots) == (2, 7)
    assert view.gpus == RankGpus(1, 2)
    memory = view.memory
    assert (memory.blocks_total, memory.blocks_free, memory.watermark) == (50, 50, 0)
    assert (view.running, view.ended) == ([], {"b"})
    assert list(view.alive) == ["a"]


def test_the_bytes_of_the_kv_cache_in_every_version() -> None:
    scheduler = FakeScheduler()

    def kv_bytes(*tensors: object) -> int | None:
        scheduler.kv_cache_config.kv_cache_tensors = list(tensors)
        return EngineView(scheduler).kv_bytes

    views = [KVCacheTensor(700), KVCacheTensor(700)]
    apart = [SimpleNamespace(size=300, block_stride=0, shared_by=["a"]) for _ in "12"]
    packed = [SimpleNamespace(size=900, block_stride=64, shared_by=["a"]) for _ in "12"]
    assert [kv_bytes(*views), kv_bytes(*apart), kv_bytes(*packed), kv_bytes()] == [700, 600, 900, 0]


def test_the_cap_on_admission_goes_before_the_slots_of_the_model_runner() -> None:
    scheduler: Any = FakeScheduler(slots=7)
    scheduler.max_num_active_reqs = 5
    assert EngineView(scheduler).slots == 5


def test_the_rank_among_those_of_the_machine() -> None:
    scheduler = FakeScheduler(rank=5)
    scheduler.vllm_config.parallel_config.data_parallel_rank_local = 1
    view = EngineView(scheduler)
    assert (view.rank, view.gpus) == (5, RankGpus(1, 1))


def test_where_the_rank_s_gpus_are() -> None:
    scheduler = FakeScheduler()
    parallel = scheduler.vllm_config.parallel_config
    parallel.world_size, parallel.nnodes_within_dp = 16, 2
    parallel.assigned_physical_gpu_ids = [4, 5]
    assert EngineView(scheduler).gpus == RankGpus(16, 0, machines=2, assigned=[4, 5])
    parallel.distributed_executor_backend = "ray"
    gpus = EngineView(scheduler).gpus
    assert gpus is not None
    assert gpus.placed_by == "the executor ray"


def test_admissions_and_preemptions_of_a_step() -> None:
    output = SchedulerOutput(
        scheduled_new_reqs=[NewRequestData("new", 3)],
        scheduled_cached_reqs=CachedRequestData(["runs", "again"], {"again"}, [9, 5]),
        preempted_req_ids={"x", "y"},
    )
    assert list(admissions(output)) == [("new", 3), ("again", 5)]
    assert preempted(output) == {"x", "y"}
    assert not preempted(SchedulerOutput())


def lacks(scheduler: object) -> dict[str, str]:
    """What cannot be read of it, and why."""
    return EngineView(scheduler).lacks


def test_all_can_be_read_of_a_whole_one() -> None:
    view = EngineView(FakeScheduler())
    assert view.lacks == {}
    assert [missing(FakeScheduler(), feature) for feature in FEATURES] == [[]] * len(FEATURES)


@pytest.mark.parametrize(
    ("path", "feature"),
    [
        ("running", "state"),
        ("max_num_running_reqs", "slots"),
        ("kv_cache_manager.watermark_blocks", "watermark"),
        ("kv_cache_manager.block_pool.get_num_free_blocks", "memory"),
        ("kv_cache_config.kv_cache_tensors", "memory_check"),
        ("vllm_config.parallel_config.assigned_physical_gpu_ids", "power"),
        ("vllm_config.parallel_config.data_parallel_size", "ranks"),
    ],
)
def test_a_missing_attribute_takes_its_feature_away(path: str, feature: str) -> None:
    scheduler = FakeScheduler()
    owner, _, name = path.rpartition(".")
    delattr(attrgetter(owner)(scheduler) if owner else scheduler, name)
    (found, reason), *others = lacks(scheduler).items()
    assert (found, others) == (feature, [])
    assert reason.startswith("Scheduler.")
    assert path in reason


def test_a_whole_part_that_is_gone_takes_several_away() -> None:
    scheduler = FakeScheduler()
    del scheduler.kv_cache_manager
    view = EngineView(scheduler)
    assert view.lacks.keys() == {"memory", "watermark"}
    assert (view.kv_memory, view.readable) == (None, True)
    assert view.read("prefix_cache", lambda: 1, None, "memory") is None
    assert "block_pool.num_gpu_blocks" in view.lacks["prefix_cache"]


def test_a_rank_is_known_without_its_number_if_it_is_the_only_one() -> None:
    for ranks, rank in ((1, 0), (2, None)):
        scheduler = FakeScheduler(ranks=ranks)
        del scheduler.vllm_config.parallel_config.data_parallel_index
        view = EngineView(scheduler)
        assert (view.rank, [*view.lacks]) == (rank, ["rank", "power"])
    del scheduler.vllm_config.parallel_config
    view = EngineView(scheduler)
    assert (view.rank, view.ranks, view.lockstep) == (None, 0, True)


def test_a_kv_group_without_a_block_size_is_named() -> None:
    scheduler = FakeScheduler()
    del scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size
    assert lacks(scheduler) == {"memory": "FullAttentionManager (KV group).block_size"}


def test_arguments_that_vllm_s_memory_no_longer_takes_are_named() -> None:
    class Renamed(FullAttentionManager):
        def get_num_blocks_to_allocate(self, request_id: str, prefill_end: int) -> int:  # type: ignore[override]
            return 1

    scheduler = FakeScheduler()
    scheduler.kv_cache_manager.coordinator = Coordinator(Renamed(16))
    (reason,) = lacks(scheduler).values()
    assert reason.startswith("Renamed (KV group).get_num_blocks_to_allocate(_, _, _, _, _, _, app")


def test_a_part_that_fails_as_it_is_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FullAttentionManager):
        def get_num_blocks_to_allocate(self, *args: Any, **named: Any) -> int:
            raise OSError(5)

    scheduler = FakeScheduler()
    scheduler.kv_cache_manager.coordinator = Coordinator(Failing(16))
    scheduler.vllm_config.parallel_config.world_size = "two"
    assert lacks(scheduler).keys() == {"memory", "power"}
    assert "evenstep: memory cannot be read" in caplog.text
    assert "OSError: 5" in caplog.text


def test_an_attribute_that_raises_is_missing() -> None:
    class Broken(FakeScheduler):
        requests = property(lambda _: 1 / 0, lambda *_: None)

    assert lacks(Broken()) == {"state": "Scheduler.requests"}


def test_a_missing_class_or_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        pass

    monkeypatch.setattr(sys.modules["vllm.v1.request"], "Request", Bare)
    monkeypatch.delattr(sys.modules["vllm.v1.core.sched.output"], "NewRequestData")
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", None)
    found = lacks(FakeScheduler())
    assert "Request.num_prompt_tokens" in found["state"]
    assert found["cached_tokens"] == "vllm.v1.core.sched.output.NewRequestData"
    assert found["memory_check"] == "vllm.v1.kv_cache_interface.KVCacheTensor"


def test_a_method_that_takes_something_else_is_named() -> None:
    class Changed(FakeScheduler):
        __module__ = "vllm.v1.core.sched.scheduler"

        def add_request(self, other: Any) -> None:
            pass

    class Ours(Changed):
        __module__ = "engine_patches.scheduler"

        def add_request(self, request: Any) -> None:
            pass

    assert lacks(Ours()) == {"state": "Scheduler.add_request(request)"}


def test_a_method_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotOfVllm(FakeScheduler):
        __module__ = "elsewhere"

    monkeypatch.setattr(FakeScheduler, "__module__", "elsewhere")
    assert "Scheduler.schedule(), Scheduler.add_request(request)" in lacks(NotOfVllm())["state"]


def test_what_is_missing_is_said_once_with_the_version(caplog: pytest.LogCaptureFixture) -> None:
    scheduler: Any = FakeScheduler()
    EngineView(scheduler).say()
    assert caplog.records == []
    del scheduler.max_num_running_reqs
    EngineView(scheduler).say()
    (line,) = [one.getMessage() for one in caplog.records]
    assert "of vLLM 0.32.0 the plug-in cannot read: slots (Scheduler.max_num_active_reqs" in line
    assert "Tested versions: 0.26, " in line


def test_a_request_is_marked_for_the_workers() -> None:
    shared = SamplingParams(extra_args={"x": 1})
    request, other = SimpleNamespace(sampling_params=shared), SimpleNamespace(sampling_params=None)
    mark(request, 7)
    mark(other, 8)
    assert request.sampling_params.extra_args == {"x": 1, "evenstep_request": 7}
    assert (shared.extra_args, other.sampling_params) == ({"x": 1}, None)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, ()),
        ({"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 4, "stop_token_ids": [3, 4]}, (4, 3)),
        ({"eos_token_id": 2, "stop_token_ids": [3], "ignore_eos": True}, (3,)),
    ],
)
def test_tokens_that_end_a_request(settings: dict[str, Any], tokens: tuple[int, ...]) -> None:
    assert end_tokens(SamplingParams(**settings)) == tokens


def test_the_hidden_length_has_one_name() -> None:
    assert HIDDEN_LENGTH_KEY == HIDDEN_LENGTH


def test_the_end_signal_needs_its_logits_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = FakeScheduler()
    with pytest.raises(
        PlugInError, match=r"--logits-processors engine_patches\.end_signal:EndSignal"
    ):
        EngineView(scheduler).open_ends()
    monkeypatch.delattr(SamplingParams, "ignore_eos")
    assert missing(scheduler, "end_signal") == ["SamplingParams.ignore_eos"]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"distributed_executor_backend": "ray"}, r"--distributed-executor-backend uni or mp, not"),
        ({"world_size": 4, "tensor_parallel_size": 2}, r"leave out --pipeline-parallel-size and"),
        ({"enable_batch_sharded_sampling": True}, r"leave out --enable-batch-sharded-sampling"),
    ],
)
def test_the_end_signal_is_refused_where_its_workers_could_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scheduler = FakeScheduler()
    table = EndWriter(table_path("fake", 0), 4)
    vars(scheduler.vllm_config.parallel_config).update(parallel)
    with pytest.raises(PlugInError, match=message):
        EngineView(scheduler).open_ends()
    with pytest.raises(PlugInError, match=message):
        check_end_workers(scheduler.vllm_config)
    vars(scheduler.vllm_config.parallel_config).update(
        distributed_executor_backend="mp",
        world_size=4,
        tensor_parallel_size=4,
        enable_batch_sharded_sampling=False,
    )
    assert EngineView(scheduler).open_ends().changed() == {}
    assert len(table.numbers) == 4
