"""What one emulated worker publishes: its state, and its KV events."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from engine_patches.stream.publisher import StepReport
from engine_patches.stream.rows import ReportedRows
from loadgen.emulator.binding import bound
from loadgen.emulator.emulated_worker import EmulatedWorker
from loadgen.emulator.emulator_settings import EmulatorSettings
from loadgen.emulator.generation import parse_completion
from loadgen.emulator.kv_events import BlockStored, KvEvents
from loadgen.emulator.state_stream import StateStream
from loadgen.engine.engine_features import EngineFeatures
from loadgen.engine.stepping import StepGroup
from router.core.errors import ConfigError
from router.core.state.feed import Feed
from router.core.types import RunningRequest
from tests.support.core import snapshot
from tests.support.server import free_port


class Router:
    """Counts tokens by what a worker reports."""

    def __init__(self) -> None:
        self.feed, self.rows = Feed(), ReportedRows([])
        self.messages = self.tokens = 0
        self.feed.apply(snapshot("full", 0), 0.0)

    def publish(self, report: StepReport) -> None:
        rows, ended, growths = self.rows.change(report.rows, report.finished, report.preempted)
        self.messages += 1
        message = snapshot(
            "delta",
            self.messages,
            *(RunningRequest(*row) for row in rows),
            finished=ended,
            preempted=tuple(report.preempted),
        )
        if growths:
            message = msgspec.structs.replace(message, kind="growth", growths=growths)
        self.feed.apply(message, 0.0)
        self.tokens += self.feed.step_grown + self.feed.step_firsts


def emulated_worker(
    stream: StateStream | None = None, **settings: Any
) -> tuple[EmulatedWorker, StepGroup]:
    stream = stream or StateStream(None, group="g", worker="w", rank=0)
    worker = EmulatedWorker(0, EmulatorSettings(workers=1, **settings), stream, {})
    return worker, worker.settings.step_group([worker.model])


def submit(worker: EmulatedWorker, prompt: list[int], tokens: int) -> Any:
    body = msgspec.json.encode({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True})
    wire: Any = SimpleNamespace(send=lambda *_: None)
    generation = parse_completion(body, worker.settings.limits)
    return worker.submit(generation, str(len(prompt)), wire)


@pytest.mark.parametrize("acceptance", [(), (1.0, 1.0), (0.7, 0.5, 0.3)])
def test_a_router_counts_each_token(acceptance: tuple[float, ...]) -> None:
    router, stream = Router(), StateStream("", group="g", worker="w", rank=0)
    vars(stream)["_publisher"] = router
    features = EngineFeatures(acceptance=acceptance)
    worker, group = emulated_worker(stream, slots=8, features=features)
    for number in range(6):
        submit(worker, [number] * (30 + number), 10 + number)
    submit(worker, [9], 1)
    while group.unfinished:
        step = group.begin(0.0)
        (ended,) = group.finish(step, 0.0)
        worker.report_step(step.parts[0], ended, step.number, step.seconds)
    counts = [one.generated_tokens for _, one in router.feed.departures]
    assert sorted(counts) == [1, *range(10, 16)]
    assert router.tokens == worker.model.engine.generated_total == 76


def test_blocks_of_an_abandoned_answer_have_their_tokens() -> None:
    worker, group = emulated_worker(
        features=EngineFeatures(block_tokens=4), kv_events_port=free_port()
    )
    events: Any = worker.kv_events
    told: list[BlockStored] = []
    events.publish = lambda batch: told.extend(map(events._told, batch))
    answer = submit(worker, list(range(9)), 3)
    step = group.begin(0.0)
    worker.abandon(answer)
    worker.report_step(step.parts[0], group.finish(step, 0.0)[0], step.number, step.seconds)
    assert [(len(one.block_hashes), one.token_ids) for one in told] == [(2, list(range(8)))]
    assert not worker._abandoned


async def test_kv_events_begin_once_their_port_is_free() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    before = context.socket(zmq.PUB)
    before.bind(endpoint)
    events = KvEvents(endpoint, 0, 4, lambda _: None)
    starting = asyncio.ensure_future(events.start())
    await asyncio.sleep(0)
    assert not starting.done()
    before.close()
    await starting
    events.stop()


async def test_what_cannot_be_bound_is_told_at_once() -> None:
    events = KvEvents("tcp://192.0.2.1:1", 0, 4, lambda _: None)
    with pytest.raises(ConfigError, match=r"cannot publish KV events at tcp://192\.0\.2\.1:1 \("):
        await events.start()


async def test_a_port_that_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def taken() -> None:
        tries.append(1)
        raise zmq.ZMQError(zmq.EADDRINUSE)

    monkeypatch.setattr("loadgen.emulator.binding._REBIND_WAIT_S", 0.0)
    with pytest.raises(ConfigError, match=r"no port \("):
        await bound(taken, "no port")
    assert len(tries) == 101
