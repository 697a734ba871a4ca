from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.faults import FAULT_KINDS
from tests.support.emulated import TIMEOUT_S, client, control, emulated, eventually, reading

ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 90_000, "ignore_eos": True, "stream": True}
EVENT_END = b"\n\n\r\n"
SHORT = {"prompt": [1], "max_tokens": 3}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[EmulatedFleet]:
    async with emulated(tmp_path, workers=2, kv_tokens=100_000) as fleet:
        yield fleet


class Stream:
    """An endless stream, read off a bare socket: asyncio's streams drop what a reset overtakes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""

    @classmethod
    async def open(cls, fleet: EmulatedFleet, rank: int = 0) -> Stream:
        connection = socket.socket()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", fleet.listeners[rank].port))
        body = json.dumps(ENDLESS)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(connection, (head + body).encode())
        stream = cls(connection)
        await stream.event()
        return stream

    async def event(self) -> None:
        """Wait for one more event, all of it."""
        seen = self.received.count(EVENT_END)
        while self.received.count(EVENT_END) == seen:
            assert await self._read(), "the stream ended"

    async def reset(self) -> bytes:
        """All that was received up to a reset, which must come."""
        try:
            while await self._read():
                pass
        except ConnectionResetError:
            return self.received
        raise AssertionError("the stream ended without a reset")

    async def _read(self) -> bytes:
        reading = asyncio.get_running_loop().sock_recv(self.connection, 65536)
        chunk = await asyncio.wait_for(reading, TIMEOUT_S)
        self.received += chunk
        return chunk

    def close(self) -> None:
        self.connection.close()


async def inject(fleet: EmulatedFleet, kind: str, rank: int = 0, **fields: Any) -> None:
    answer = await control(fleet, f"/workers/{rank}/fault", kind=kind, **fields)
    assert answer.json() == {"rank": rank, "fault": kind}


async def restore(fleet: EmulatedFleet, rank: int = 0) -> None:
    answer = await control(fleet, f"/workers/{rank}/restore")
    assert answer.json() == {"rank": rank, "fault": None}


async def works(fleet: EmulatedFleet, rank: int = 0) -> bool:
    async with client(fleet, rank) as http:
        answer = await http.post("/v1/completions", json=SHORT)
    return answer.status_code == 200


async def test_kill_resets_forgets_and_comes_back_as_a_new_epoch(fleet: EmulatedFleet) -> None:
    async with reading(fleet) as reader:
        stream = await Stream.open(fleet)
        # More messages than the next epoch has when the reader has connected again.
        await eventually(lambda: fleet.workers[0].step > 200, "many steps")
        before = await reader.full()
        assert len(before.running) == 1
        await inject(fleet, "kill")
        await stream.reset()
        with pytest.raises(httpx.ConnectError):
            await works(fleet)
        assert await works(fleet, rank=1)
        assert not fleet.workers[0].model.engine.unfinished
        await restore(fleet)
        assert await works(fleet)
        while (after := await reader.next()).epoch == before.epoch:
            pass
        assert (await reader.full()).running == ()
        assert after.sequence < before.sequence
        stream.close()


async def test_kill_in_the_middle_of_an_event(fleet: EmulatedFleet) -> None:
    stream = await Stream.open(fleet)
    await inject(fleet, "kill", mid_event=True)
    tail = (await stream.reset()).rpartition(EVENT_END)[2]
    assert b'data: {"id":"cmpl-' in tail
    assert b"\n\n" not in tail
    stream.close()


async def test_a_hang_stalls_the_whole_barrier(fleet: EmulatedFleet) -> None:
    stream = await Stream.open(fleet, rank=1)
    await inject(fleet, "hang")
    steps = fleet.describe()["steps"]
    async with client(fleet) as http:
        health = asyncio.create_task(http.get("/health"))
        late = asyncio.create_task(http.post("/v1/completions", json=SHORT))
        async with client(fleet, rank=1) as other:
            assert (await other.get("/health")).status_code == 200
        assert fleet.describe()["steps"] in (steps, int(str(steps)) + 1)
        assert not health.done()
        await restore(fleet)
        assert (await health).status_code == 200
        assert (await late).status_code == 200
    await stream.event()
    stream.close()


async def test_alone_a_hang_stalls_only_itself(tmp_path: Path) -> None:
    async with emulated(tmp_path, workers=2, barrier=False) as fleet:
        await inject(fleet, "hang")
        assert await works(fleet, rank=1)


async def test_a_hung_worker_can_be_killed(fleet: EmulatedFleet) -> None:
    await inject(fleet, "hang")
    async with client(fleet) as http:
        health = asyncio.create_task(http.get("/health"))
        await inject(fleet, "kill")
        with pytest.raises(httpx.TransportError):
            await health
    await restore(fleet)
    assert await works(fleet)


async def test_refuse_lets_streams_go_on(fleet: EmulatedFleet) -> None:
    stream = await Stream.open(fleet)
    await inject(fleet, "refuse")
    with pytest.raises(httpx.ConnectError):
        await works(fleet)
    await stream.event()
    await restore(fleet)
    assert await works(fleet)
    stream.close()


async def test_slow_divides_the_speed(fleet: EmulatedFleet) -> None:
    await inject(fleet, "slow", factor=5)
    async with reading(fleet, rank=1) as reader:
        stream = await Stream.open(fleet, rank=1)
        while (await reader.next()).step_s == 0:
            pass
        assert (await reader.next()).step_s == pytest.approx(5e-3)
        await restore(fleet)
        while (await reader.next()).step_s != pytest.approx(1e-3):
            pass
        stream.close()


@pytest.mark.parametrize("status", [500, 429])
async def test_error_answers_completions_with_a_status(fleet: EmulatedFleet, status: int) -> None:
    await inject(fleet, "error", status=status)
    async with client(fleet) as http:
        answer = await http.post("/v1/completions", json=SHORT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert (await http.get("/health")).status_code == 200
    await restore(fleet)
    assert await works(fleet)


async def test_garbage_is_not_http(fleet: EmulatedFleet) -> None:
    await inject(fleet, "garbage")
    with pytest.raises(httpx.RemoteProtocolError):
        await works(fleet)
    await restore(fleet)
    assert await works(fleet)


async def test_a_new_fault_replaces_the_old_one(fleet: EmulatedFleet) -> None:
    await inject(fleet, "refuse")
    await inject(fleet, "error")
    async with client(fleet) as http:
        assert (await http.post("/v1/completions", json=SHORT)).status_code == 500


async def test_what_the_fault_port_refuses(fleet: EmulatedFleet) -> None:
    unknown = await control(fleet, "/workers/0/fault", kind="melt")
    assert unknown.status_code == 400
    assert all(kind in unknown.json()["error"]["message"] for kind in FAULT_KINDS)
    for path, body, status in (
        ("/workers/0/fault", {"kind": "slow", "factor": -1}, 400),
        ("/workers/0/fault", {"kind": "slow", "speed": 1}, 400),
        ("/workers/0/fault", {"kind": "corrupt", "mid_event": True}, 400),
        ("/workers/0/fault", {}, 400),
        ("/workers/7/fault", {"kind": "kill"}, 404),
        ("/workers/0/melt", {}, 404),
    ):
        assert (await control(fleet, path, **body)).status_code == status
    assert fleet.workers[0].fault is None


async def test_the_fleet_page(fleet: EmulatedFleet) -> None:
    stream = await Stream.open(fleet)
    await eventually(lambda: fleet.workers[0].step > 3, "some steps")
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"{fleet.control.url}/fleet")).json()
    assert page["emulated"] is True
    assert page["steps"] > 3
    assert page["lateness"].keys() == {"p50", "p99", "max"}
    assert [worker["running"] for worker in page["workers"]] == [1, 0]
    assert page["workers"][0]["load_tokens"] > 3
    assert page["energy_j"] == pytest.approx(sum(w["energy_j"] for w in page["workers"]))
    stream.close()
