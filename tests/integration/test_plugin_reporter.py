"""The plug-in's stream over real sockets, fed by a scheduler that is not vLLM's."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.end_table import EndWriter, table_path
from engine_patches.plugin.reporter import Reporter
from engine_patches.plugin.settings import PlugInError, Settings
from engine_patches.power.source import PowerReading
from engine_patches.stream.publisher import HEARTBEAT_S, UNREAD_MESSAGES
from router.core.state.feed import Feed
from router.core.types import KvGroup
from router.core.wire import decode
from tests.support.core import part
from tests.support.plugin_engine import (
    Coordinator,
    FakeScheduler,
    FullAttentionManager,
    Request,
    SchedulerOutput,
    SlidingWindowManager,
)
from tests.support.plugin_stream import WAIT_S, Engine, Routers, ask_full
from tests.support.server import free_port, wait_until

pytestmark = pytest.mark.usefixtures("vllm")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(Settings(f"ipc://{tmp_path}/s", group="g", worker="w"), rank=0)
    yield engine
    engine.reporter.close()


def test_a_router_follows_steps(engine: Engine, routers: Routers) -> None:
    stream = routers.subscribed(engine.reporter.endpoint)
    dealer = routers.asker(engine.reporter.endpoint)
    engine.add_request(Request("a", 20))
    engine.add_request(Request("b", 6, cached_tokens=4))
    engine.step()
    first = decode(stream.recv())
    rows = [(r.id, r.generated_tokens, r.cached_tokens, r.prefill_left) for r in first.running]
    assert rows == [("a", 0, 0, 12), ("b", 1, 4, 0)]
    assert (first.group, first.worker, first.rank, first.ranks) == ("g", "w", 0, 1)
    assert first.slots == 4
    assert (first.step, first.step_s, first.waiting) == (1, 0.5, 0)
    assert (first.scheduled_prefill_tokens, first.scheduled_decode_tokens) == (10, 0)
    assert first.kv_groups == (KvGroup(4, 4, 100),)
    assert first.admissible_kv_tokens == 96 * 4

    engine.now_s += 1.0
    engine.step(finish={"b"})
    second = decode(stream.recv())
    assert [r.id for r in second.running] == ["a"]
    assert (second.finished, second.step_s) == (("b",), 1.5)
    assert (second.scheduled_prefill_tokens, second.scheduled_decode_tokens) == (8, 1)

    engine.step()
    engine.step(preempt={"a"})
    preempted = [decode(stream.recv()) for _ in "34"][-1]
    assert (preempted.preempted, preempted.preemptions_total) == (("a",), 1)
    assert (preempted.waiting, preempted.waiting_tokens) == (1, 21)
    full = ask_full(dealer)
    assert (full.kind, full.running, full.sequence) == ("full", (), preempted.sequence)


def test_a_fault_while_routers_are_answered_is_told(
    engine: Engine,
    routers: Routers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = routers.subscribed(engine.reporter.endpoint)

    def fails() -> bool:
        raise OSError("no more descriptors")

    monkeypatch.setattr(engine.reporter._publisher, "_answer_one", fails)
    wait_until(lambda: engine.reporter.failed, WAIT_S, "it has failed")
    engine.now_s += HEARTBEAT_S
    assert decode(stream.recv()).kind == "stateless"
    assert caplog.text.count("the state stream ends here") == 1


def test_steps_in_which_only_the_other_ranks_compute_are_counted(
    engine: Engine, routers: Routers
) -> None:
    stream = routers.subscribed(engine.reporter.endpoint)
    engine.add_request(Request("a", 20))
    engine.step()
    engine.reporter.idled()
    engine.now_s += 3.0
    engine.reporter.idled()
    engine.step()
    told = [decode(stream.recv()) for _ in "12"]
    assert [(one.step, one.step_s) for one in told] == [(1, 0.5), (4, 0.5)]


def test_a_step_scheduled_ahead_keeps_its_number(engine: Engine, routers: Routers) -> None:
    stream = routers.subscribed(engine.reporter.endpoint)
    engine.add_request(Request("a", 5))
    first = engine.schedule()
    engine.reporter.scheduled(first, 0.0)
    second = engine.schedule()
    engine.reporter.scheduled(second, 0.0)
    for output in (first, second):
        engine.reporter.idled()
        engine.reporter.stepped(engine.update_from_output(output), output)
    assert [decode(stream.recv()).step for _ in "12"] == [1, 2]


def test_the_groups_of_a_hybrid_model_share_one_pool(tmp_path: Path, routers: Routers) -> None:
    scheduler = FakeScheduler(blocks=100)
    scheduler.kv_cache_manager.watermark_blocks = 15
    window = SlidingWindowManager(16, most=3, sliding_window=16)
    scheduler.kv_cache_manager.coordinator = Coordinator(FullAttentionManager(4), window)
    reporter = Reporter(EngineView(scheduler), Settings(f"ipc://{tmp_path}/s"))
    full = ask_full(routers.asker(reporter.endpoint))
    sliding = KvGroup(16, 0, 100, "sliding", 16, most_entering=3, most_held=2)
    assert full.kv_groups == (KvGroup(4, 0, 100), sliding)
    assert (full.admissible_blocks, full.admissible_kv_tokens) == (85, (85 - 3) * 4)
    reporter.close()


def test_a_full_snapshot_after_a_gap(engine: Engine, routers: Routers) -> None:
    dealer = routers.asker(engine.reporter.endpoint)
    for number in range(4):
        engine.add_request(Request(str(number), 5 + number))
    for _ in range(5):
        engine.step()
    full, feed = ask_full(dealer), Feed()
    feed.apply(full, 0.0)
    assert feed.load_tokens == sum(one.num_tokens for one in engine.running) == 46
    assert not feed.full_wanted


def test_an_empty_step_says_what_an_abort_changed(engine: Engine, routers: Routers) -> None:
    stream = routers.subscribed(engine.reporter.endpoint)
    engine.add_request(Request("a", 5))
    engine.step()
    engine.finish_requests(["a"])
    engine.step()
    engine.step()
    run, aborted = decode(stream.recv()), decode(stream.recv())
    assert (aborted.finished, aborted.step, aborted.step_s) == (("a",), run.step, 0.0)
    idle = decode(stream.recv())  # the step in between said nothing: a heartbeat
    assert (idle.finished, idle.sequence) == ((), aborted.sequence + 1)
    assert idle.time_s >= aborted.time_s + HEARTBEAT_S


def test_an_empty_step_says_which_blocks_are_held(engine: Engine, routers: Routers) -> None:
    stream = routers.subscribed(engine.reporter.endpoint)
    pool = engine.kv_cache_manager.block_pool
    for free in (60, 60, 100):  # held for another engine, that fetches them in the end
        pool.get_num_free_blocks = lambda free=free: free
        engine.step()
    told = [decode(stream.recv()) for _ in "12"]
    assert [(one.kv_groups, one.step_s) for one in told] == [
        ((KvGroup(4, 40, 100),), 0.0),
        ((KvGroup(4, 0, 100),), 0.0),
    ]


def test_a_subscriber_that_does_not_read_delays_nothing(engine: Engine, routers: Routers) -> None:
    stream = routers.connect(zmq.SUB, engine.reporter.endpoint)
    stream.setsockopt(zmq.RCVHWM, 10)
    dealer = routers.asker(engine.reporter.endpoint)
    for number in range(4):
        engine.add_request(Request(str(number), 5))
    for _ in range(6 * UNREAD_MESSAGES):
        engine.step()
    assert not engine.reporter.failed
    assert ask_full(dealer).sequence >= 6 * UNREAD_MESSAGES
    kept = 0
    with contextlib.suppress(zmq.Again):
        while stream.recv(zmq.NOBLOCK):
            kept += 1
    assert kept <= 3 * UNREAD_MESSAGES


def test_a_fault_never_reaches_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.add_request(Request("a", 5))
    stream = engine.kv_cache_manager.block_pool
    monkeypatch.setattr(stream, "get_num_free_blocks", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            engine.step()
    assert engine.reporter.failed
    assert [r.getMessage() for r in caplog.records] == [
        "evenstep: the state stream ends here; the engine goes on without it"
    ]
    assert engine.running[0].num_output_tokens == 3


class Meter:
    """Of one GPU."""

    lost = False
    memory_hidden = False

    def cross_check(self, kv_bytes: int, blocks: int) -> tuple[bool, str]:
        if self.memory_hidden:
            raise OSError
        return kv_bytes < 0, f"{blocks} blocks"

    def read(self, now_s: float) -> PowerReading:
        if self.lost:
            raise OSError
        return PowerReading(300.0, 12.0)


def test_power_and_energy_are_told_while_they_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routers: Routers
) -> None:
    meter = Meter()
    monkeypatch.setattr("engine_patches.plugin.reporter.open_source", lambda *_: meter)
    reporter = Reporter(EngineView(FakeScheduler()), Settings(f"ipc://{tmp_path}/s"))
    dealer = routers.asker(reporter.endpoint)

    def told(power_w: float | None, energy_j: float | None) -> bool:
        full = ask_full(dealer)
        return (full.power_w, full.energy_j) == (power_w, energy_j)

    wait_until(lambda: told(300.0, 12.0), WAIT_S, "power and energy are told")
    meter.lost = True
    wait_until(lambda: told(None, None), WAIT_S, "they are told no more")
    assert not reporter.failed
    reporter.close()


def test_a_driver_that_hangs_keeps_no_router_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routers: Routers
) -> None:
    hanging, back = threading.Event(), threading.Event()

    class HangingMeter(Meter):
        reads = 0

        def read(self, now_s: float) -> PowerReading:
            self.reads += 1
            if self.reads > 1:
                hanging.set()
                back.wait()
            return super().read(now_s)

    monkeypatch.setattr("engine_patches.plugin.reporter.open_source", lambda *_: HangingMeter())
    reporter = Reporter(EngineView(FakeScheduler()), Settings(f"ipc://{tmp_path}/s"))
    dealer = routers.asker(reporter.endpoint)
    assert hanging.wait(WAIT_S)
    assert ask_full(dealer).power_w == 300.0
    reporter.close()
    back.set()


def test_end_probabilities_are_told(tmp_path: Path, routers: Routers) -> None:
    writer = EndWriter(table_path(tmp_path.name, 0), 4)
    settings = Settings(f"ipc://{tmp_path}/s", end_signal=True)
    engine = Engine(settings, instance=tmp_path.name)
    stream = routers.subscribed(engine.reporter.endpoint)
    engine.add_request(Request("a", 5))
    row = writer.enter(engine.waiting[0].sampling_params.extra_args["evenstep_request"])
    for _ in range(3):
        engine.step()
        writer.probabilities[row] = 0.5
    told = [[one.end_probability for one in decode(stream.recv()).running] for _ in "123"]
    assert told == [[None], [0.5], []]
    engine.reporter.close()


def test_a_probability_waits_for_a_step_that_is_told(tmp_path: Path, routers: Routers) -> None:
    writer = EndWriter(table_path(tmp_path.name, 0), 4)
    engine = Engine(Settings(f"ipc://{tmp_path}/s", end_signal=True), instance=tmp_path.name)
    stream = routers.subscribed(engine.reporter.endpoint)
    engine.add_request(Request("a", 5))
    row = writer.enter(engine.waiting[0].sampling_params.extra_args["evenstep_request"])
    engine.step()
    writer.probabilities[row] = 0.5
    engine.reporter.stepped({}, SchedulerOutput())  # says nothing: nothing was computed
    engine.step()
    told = [[one.end_probability for one in decode(stream.recv()).running] for _ in "12"]
    assert told == [[None], [0.5]]
    engine.reporter.close()


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (False, "evenstep: 101 blocks"),
        (True, "evenstep: NVML does not tell how much memory the engine holds"),
    ],
)
def test_memory_that_is_not_there_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hidden: bool,
    said: str,
) -> None:
    meter = Meter()
    meter.memory_hidden = hidden
    monkeypatch.setattr("engine_patches.plugin.reporter.open_source", lambda *_: meter)
    Reporter(EngineView(FakeScheduler()), Settings(f"ipc://{tmp_path}/s")).close()
    assert caplog.records[0].getMessage() == said


def test_closing_twice_leaves_no_thread(engine: Engine) -> None:
    engine.reporter.close()
    engine.reporter.close()
    assert "evenstep" not in [thread.name for thread in threading.enumerate()]


def test_a_busy_port_is_said(engine: Engine) -> None:
    port = free_port(2)
    blocked = Settings(f"tcp://127.0.0.1:{port}")
    first = Reporter(EngineView(FakeScheduler()), blocked)
    with pytest.raises(PlugInError, match=f"cannot bind tcp://127.0.0.1:{port}"):
        Reporter(EngineView(FakeScheduler()), blocked)
    first.close()


def test_what_routers_have_queued_is_told_apart(engine: Engine, routers: Routers) -> None:
    dealer = routers.asker(engine.reporter.endpoint)
    for id_ in (*map(part, range(6)), "theirs"):
        engine.add_request(Request(id_, 1))
    engine.step()
    full = ask_full(dealer)
    assert (full.waiting, full.waiting_routed) == (3, 2)
