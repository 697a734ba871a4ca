import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine_patches.stream.publisher import HEARTBEAT_S, SnapshotPublisher, StepReport
from engine_patches.stream.rows import Row
from router.core.types import KvGroup, RunningRequest, Snapshot
from router.core.wire import decode, full_endpoint

TIMEOUT_MS = 60_000
IDLE = StepReport(step=0, time_s=100.0, step_s=0.0, slots=4)


def row(id_: str, generated: int, prompt: int = 10) -> Row:
    return (id_, prompt, generated, 0, 0, None)


class Wire:
    """A publisher, and a router's two sockets on its endpoints."""

    def __init__(self, endpoint: str) -> None:
        self.now_s = 100.0
        self.context = zmq.Context()
        self.publisher = SnapshotPublisher(
            endpoint,
            group="g",
            worker="w",
            rank=3,
            initial=IDLE,
            clock=lambda: self.now_s,
            context=self.context,
        )
        self.stream = self._connect(zmq.SUB, endpoint)
        self.stream.setsockopt(zmq.SUBSCRIBE, b"")
        self.dealer = self._connect(zmq.DEALER, full_endpoint(endpoint))
        self._await_subscription()

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.connect(endpoint)
        return socket

    def _await_subscription(self) -> None:
        """Heartbeats until one gets through, and those that are still on their way."""
        for _ in range(TIMEOUT_MS // 10):
            self.now_s += HEARTBEAT_S
            self.publisher.poll()
            if self.stream.poll(10):
                while self.next().sequence < self.publisher.sequence:
                    pass
                return
        raise AssertionError("no subscription")

    def publish(self, step: int, *rows: Row, **fields: object) -> Snapshot:
        report = StepReport(
            step=step,
            time_s=self.now_s,
            step_s=0.01,
            rows=rows,
            **fields,  # type: ignore[arg-type]
        )
        self.publisher.publish(report)
        return self.next()

    def next(self) -> Snapshot:
        return decode(self.stream.recv())

    def full(self) -> Snapshot:
        self.dealer.send(b"")
        assert self.publisher.poll(TIMEOUT_MS / 1e3) == 1
        return decode(self.dealer.recv())

    def silent(self) -> bool:
        return not self.stream.poll(50)

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(f"ipc://{tmp_path}/s")
    yield wire
    wire.close()


def test_deltas_list_what_is_new_and_tell_how_the_others_grew(wire: Wire) -> None:
    first = wire.publish(1, row("a", 1), row("b", 1))
    assert (first.kind, first.group, first.worker, first.rank) == ("delta", "g", "w", 3)
    assert [r.id for r in first.running] == ["a", "b"]
    second = wire.publish(2, row("a", 2), row("b", 3), row("c", 1))
    assert (second.kind, second.growths) == ("growth", b"\1\2")
    assert second.running == (RunningRequest("c", 10, 1, place=2),)
    third = wire.publish(3, row("a", 3), finished=("c",), preempted=("b",))
    assert (third.running, third.finished, third.preempted) == ((), ("c",), ("b",))
    assert [s.sequence - first.sequence for s in (first, second, third)] == [0, 1, 2]
    assert len({s.epoch for s in (first, second, third)}) == 1


def test_a_request_that_vanishes_unannounced_is_called_finished(wire: Wire) -> None:
    wire.publish(1, row("a", 1))
    assert wire.publish(2).finished == ("a",)


def test_a_full_one_says_all_and_repeats_the_latest_sequence(wire: Wire) -> None:
    groups = (KvGroup(16, 2, 10),)
    told = wire.publish(7, row("a", 1), waiting=2, kv_groups=groups, power_w=250.0, energy_j=9.0)
    full = wire.full()
    assert (full.kind, full.sequence, full.step, full.epoch) == (
        "full",
        told.sequence,
        7,
        told.epoch,
    )
    assert full.running == (RunningRequest("a", 10, 1, place=0),)
    assert (full.waiting, full.kv_groups, full.power_w, full.energy_j) == (2, groups, 250.0, 9.0)
    assert wire.publish(8, row("a", 2)).sequence == told.sequence + 1


def test_the_state_at_the_start_is_a_full_one(wire: Wire) -> None:
    full = wire.full()
    assert (full.kind, full.step, full.running, full.slots) == ("full", 0, (), 4)


def test_an_idle_worker_beats_once_a_second(wire: Wire) -> None:
    told = wire.publish(5)
    wire.publisher.poll()
    assert wire.silent()
    wire.now_s += HEARTBEAT_S
    wire.publisher.poll()
    beat = wire.next()
    assert (beat.kind, beat.step, beat.step_s) == ("delta", 5, 0.0)
    assert (beat.sequence, beat.time_s) == (told.sequence + 1, wire.now_s)
    wire.publisher.poll()
    assert wire.silent()
    wire.now_s -= HEARTBEAT_S / 2  # the clock is set back
    wire.publisher.poll()
    assert wire.next().time_s == wire.now_s
    wire.publisher.poll()
    assert wire.silent()


def test_a_worker_that_runs_but_does_not_step_says_nothing(wire: Wire) -> None:
    wire.publish(5, row("a", 1))
    wire.now_s += 10 * HEARTBEAT_S
    wire.publisher.poll()
    assert wire.silent()


def test_a_req_socket_is_answered_too(wire: Wire, tmp_path: Path) -> None:
    asker = wire._connect(zmq.REQ, full_endpoint(f"ipc://{tmp_path}/s"))
    asker.send(b"full, please")
    assert wire.publisher.poll(TIMEOUT_MS / 1e3) == 1
    assert decode(asker.recv()).kind == "full"
    asker.close()


def test_requests_are_answered_in_a_thread_while_steps_go_on(wire: Wire) -> None:
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            wire.publisher.poll(0.02)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for step in range(1, 200):
            wire.publish(step, row("a", step))
            wire.dealer.send(b"")
            full = decode(wire.dealer.recv())
            assert full.running == (RunningRequest("a", 10, step, place=0),)
    finally:
        stop.set()
        thread.join()


def test_nobody_listening_never_blocks(tmp_path: Path) -> None:
    context = zmq.Context()
    publisher = SnapshotPublisher(
        f"ipc://{tmp_path}/n", group="g", worker="w", rank=0, initial=IDLE, context=context
    )
    for step in range(5000):
        publisher.publish(StepReport(step, 100.0, 0.01, rows=(row("a", step),)))
    publisher.close()
    context.destroy(linger=0)
    assert publisher.sequence == 5000


def test_an_endpoint_in_use_is_said_and_leaves_no_socket(tmp_path: Path, wire: Wire) -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1", min_port=20_000, max_port=31_000)
    with pytest.raises(zmq.ZMQError, match="in use"):
        SnapshotPublisher(
            f"tcp://127.0.0.1:{port}",
            group="g",
            worker="w",
            rank=0,
            initial=IDLE,
            context=context,
        )
    taken.close(0)
    context.term()
