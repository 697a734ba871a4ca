"""The scheduler classes themselves, on top of a scheduler that is not vLLM's."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from engine_patches.plugin.settings import PlugInError
from router.core.wire import BudgetMessage, decode, encode, full_endpoint
from tests.support import plugin_engine
from tests.support.plugin_engine import FakeScheduler, Request
from tests.support.plugin_stream import WAIT_S

FLAVOURS = ("EvenstepScheduler", "EvenstepAsyncScheduler")


class FakeAsyncScheduler(FakeScheduler):
    __module__ = "vllm.v1.core.sched.async_scheduler"


@pytest.fixture
def ours(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``engine_patches.scheduler``, as imported inside an engine."""
    for name, class_ in (("Scheduler", FakeScheduler), ("AsyncScheduler", FakeAsyncScheduler)):
        module = ModuleType(class_.__module__)
        setattr(module, name, class_)
        monkeypatch.setitem(sys.modules, class_.__module__, module)
    core: Any = plugin_engine.DPEngineCoreProc  # ranks that take prompt budgets watch its steps
    monkeypatch.setattr(core, "_has_global_unfinished_reqs", core._has_global_unfinished_reqs)
    yield importlib.import_module("engine_patches.scheduler")
    del sys.modules["engine_patches.scheduler"]


def ask_full(endpoint: str) -> Any:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        dealer.connect(full_endpoint(endpoint))
        dealer.send(b"")
        return decode(dealer.recv())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_scheduler_works_as_before_and_tells(ours: Any, flavour: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    scheduler = getattr(ours, flavour)(slots=2, evenstep={"snapshots": endpoint})
    for id_ in "abc":
        scheduler.add_request(Request(id_, 5))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 5, "b": 5}
    (results,) = scheduler.update_from_output(output, {"b"}).values()
    assert [one.request_id for one in results.outputs] == ["a", "b"]
    full = ask_full(endpoint)
    assert [(row.id, row.generated_tokens) for row in full.running] == [("a", 1)]
    assert (full.step, full.waiting, full.waiting_tokens, full.slots) == (1, 1, 5, 2)
    scheduler.shutdown()


@pytest.mark.parametrize("places", [0, 3])
def test_it_tells_how_many_adapters_may_run_at_once(
    ours: Any, places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plugin_engine.LoRAConfig(places) if places else None
    monkeypatch.setattr(FakeScheduler, "lora_config", config)
    endpoint = f"ipc://{tmp_path}/s"
    scheduler = ours.EvenstepScheduler(evenstep={"snapshots": endpoint})
    scheduler.add_request(Request("a", 5))
    scheduler.update_from_output(scheduler.schedule(), set())
    full = ask_full(endpoint)
    assert (full.step, full.max_loras, full.unreported) == (1, places, ())
    scheduler.shutdown()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_settings_that_cannot_be_used_keep_the_engine_from_starting(
    ours: Any, flavour: str
) -> None:
    with pytest.raises(PlugInError, match=r"evenstep has no key 'endpoint'; known: snapshots"):
        getattr(ours, flavour)(evenstep={"endpoint": "tcp://127.0.0.1:5600"})


def test_a_rank_of_a_group_counts_the_steps_that_it_only_joins(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = plugin_engine.DPEngineCoreProc
    monkeypatch.setattr(core, "execute_dummy_batch", core.execute_dummy_batch)
    endpoint = f"ipc://{tmp_path}/s"
    scheduler = ours.EvenstepScheduler(ranks=2, evenstep={"snapshots": endpoint})
    assert core().execute_dummy_batch() == "computed for the others"
    scheduler.add_request(Request("a", 5))
    output = scheduler.schedule()
    scheduler.update_from_output(output, set())
    assert ask_full(endpoint).step == 2
    scheduler.shutdown()


def test_a_rank_of_a_group_tells_the_count_that_all_share(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = plugin_engine.DPEngineCoreProc
    for name in ("execute_dummy_batch", "run_busy_loop"):
        monkeypatch.setattr(core, name, getattr(core, name))
    endpoint = f"ipc://{tmp_path}/s"
    scheduler = ours.EvenstepScheduler(ranks=2, evenstep={"snapshots": endpoint})
    engine = core()
    told = []

    def step() -> None:
        scheduler.update_from_output(scheduler.schedule(), set())
        full = ask_full(endpoint)
        told.append((full.step, full.wave, full.wave_step))

    scheduler.add_request(Request("a", 5))
    engine.run_busy_loop(step, engine.execute_dummy_batch, step)
    engine.run_busy_loop(step)
    assert told == [(1, 0, 1), (3, 0, 3), (4, 1, 1)]
    scheduler.shutdown()


def test_a_budget_comes_over_the_channel_and_bounds_steps(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    scheduler = ours.EvenstepScheduler(evenstep={"snapshots": endpoint})
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        dealer.connect(full_endpoint(endpoint))

        def asked() -> Any:
            dealer.send(b"")
            return decode(dealer.recv())

        first = asked()
        assert first.prompt_budget == 0
        told = BudgetMessage("r", first.epoch, first.time_s, 70)
        elsewhere = replace(told, router="x", epoch="another engine", tokens=7)
        for message in (told, elsewhere, replace(told, router="y", tokens=0)):
            dealer.send(encode(message))
        dealer.send(b"no budget")
        asked()  # all are read

        bounds: list[int] = []
        fake = FakeScheduler.schedule

        def schedule(self: Any) -> Any:
            bounds.append(self.max_num_scheduled_tokens)
            return fake(self)

        monkeypatch.setattr(FakeScheduler, "schedule", schedule)
        scheduler.add_request(Request("a", 5))
        scheduler.update_from_output(scheduler.schedule(), set())
        assert bounds == [70]
        assert asked().prompt_budget == 70
    scheduler.shutdown()


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose group of ranks may grow while it runs."""
    init = FakeScheduler.__init__

    def begin(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        self.vllm_config.parallel_config.enable_elastic_ep = True

    monkeypatch.setattr(FakeScheduler, "__init__", begin)


@pytest.mark.usefixtures("growing")
def test_where_no_budget_can_be_kept_an_engine_takes_none(
    ours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    with caplog.at_level("INFO"):
        scheduler = ours.EvenstepScheduler(evenstep={"snapshots": endpoint})
    full = ask_full(endpoint)
    assert (full.prompt_budget, full.unreported) == (None, ())
    assert (
        "cannot bound the prompts of a step here: evenstep.prompt_budget does not work with "
        in (caplog.text)
    )
    scheduler.shutdown()


@pytest.mark.usefixtures("growing")
def test_where_no_budget_can_be_kept_an_engine_that_is_told_to_take_one_does_not_start(
    ours: Any, tmp_path: Path
) -> None:
    settings = {"snapshots": f"ipc://{tmp_path}/s", "prompt_budget": True}
    with pytest.raises(PlugInError, match=r"does not work with --enable-elastic-ep"):
        ours.EvenstepScheduler(evenstep=settings)


def test_an_engine_that_is_told_to_takes_no_budget(ours: Any, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    scheduler = ours.EvenstepScheduler(evenstep={"snapshots": endpoint, "prompt_budget": False})
    full = ask_full(endpoint)
    assert (full.prompt_budget, full.unreported) == (None, ())
    scheduler.shutdown()


def test_ranks_whose_idle_steps_cannot_be_counted_say_so(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["vllm.v1.engine.core"], "DPEngineCoreProc")
    endpoint = f"ipc://{tmp_path}/s"
    scheduler = ours.EvenstepScheduler(ranks=2, evenstep={"snapshots": endpoint})
    full = ask_full(endpoint)
    assert (full.ranks, full.prompt_budget) == (2, None)
    assert full.unreported == ("prompt_budget", "idle_steps", "shared_steps")
    scheduler.shutdown()


def test_without_the_running_requests_an_engine_serves_and_tells_no_state(
    ours: Any, tmp_path: Path
) -> None:
    class Renamed:
        """vLLM's scheduler has other names, and other arguments."""

        def __init__(self, **config: Any) -> None:
            self.vllm_config = FakeScheduler(**config).vllm_config
            self.admitted: list[str] = []

        def schedule(self, *args: Any) -> int:
            return len(self.admitted)

        def add_request(self, request: str) -> None:
            self.admitted.append(request)

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

        def shutdown(self, *, now: bool) -> bool:
            return now

    class Ours(ours.EvenstepMixin, Renamed):  # type: ignore[misc]
        """The plug-in on it."""

    endpoint = f"ipc://{tmp_path}/s"
    scheduler = Ours(evenstep={"snapshots": endpoint})
    scheduler.add_request("a")
    assert scheduler.schedule() == 1
    assert scheduler.update_from_output(1, 2, more=3) == ((1, 2), {"more": 3})
    full = ask_full(endpoint)
    assert (full.kind, full.running) == ("stateless", ())
    assert {"state", "slots", "memory"} < {*full.unreported}
    assert scheduler.shutdown(now=True)


def test_an_engine_whose_settings_or_rank_are_not_told_serves_without_a_stream(
    ours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FakeScheduler.__init__
    for path in ("", "parallel_config"):

        def cut(self: Any, *, path: str = path, **config: Any) -> None:
            made(self, **config)
            delattr(self.vllm_config, path) if path else delattr(self, "vllm_config")

        monkeypatch.setattr(FakeScheduler, "__init__", cut)
        caplog.clear()
        scheduler = ours.EvenstepScheduler(evenstep={"snapshots": f"ipc://{tmp_path}/s"})
        scheduler.add_request(Request("a", 5))
        output = scheduler.schedule()
        assert scheduler.update_from_output(output)[0].outputs
        assert scheduler.evenstep is None
        scheduler.shutdown()
        reason = "rank (Scheduler.vllm_config.parallel" if path else "settings (Scheduler.vllm_conf"
        assert reason in caplog.text


def test_admission_that_cannot_work_keeps_the_engine_from_starting(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"snapshots": f"ipc://{tmp_path}/s", "admission": {"policy": "headroom"}}
    monkeypatch.delattr(Request, "num_output_placeholders")
    with pytest.raises(PlugInError, match=r"evenstep\.admission cannot work with vLLM 0\.32\.0"):
        ours.EvenstepScheduler(evenstep=settings)
