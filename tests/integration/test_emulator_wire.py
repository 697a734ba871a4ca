"""Answers that go wrong on their way, and the fleet's own record of what it sent."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.faults import Fault
from loadgen.emulator.sent import Sent
from tests.support.emulated import TIMEOUT_S, client, emulated
from tests.support.sent import read_sent

BODY = {"prompt": [1, 2], "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[EmulatedFleet]:
    async with emulated(
        tmp_path, workers=1, snapshots=(), answers=tmp_path / "answers.jsonl"
    ) as fleet:
        yield fleet


class Asked:
    """A request on a bare socket, and what has come back."""

    def __init__(self, fleet: EmulatedFleet, **body: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", fleet.listeners[0].port))
        self.socket.setblocking(False)
        text = json.dumps(BODY | {"stream": True} | body)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\n"
            f"content-length: {len(text)}\r\n\r\n"
        )
        self.socket.send((head + text).encode())
        self.received = b""

    async def until(self, satisfied: Callable[[bytes], bool]) -> bytes:
        """Read until this holds, or to the end of the connection."""
        while not satisfied(self.received):
            reading = asyncio.get_running_loop().sock_recv(self.socket, 65536)
            chunk = await asyncio.wait_for(reading, TIMEOUT_S)
            if not chunk:
                break
            self.received += chunk
        return self.received

    @property
    def words(self) -> str:
        """Text of the whole events."""
        whole = self.received.rpartition(b"\n\n")[0]
        return "".join(json.loads(text) for text in re.findall(rb'"text":("[^"]*")', whole))


async def recorded(fleet: EmulatedFleet) -> Sent:
    """The only line of the record, once it is there."""
    assert fleet.settings.answers is not None
    async with asyncio.timeout(TIMEOUT_S):
        while not (lines := read_sent(fleet.settings.answers)):  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
    (sent,) = lines
    assert sent.began_s <= sent.ended_s
    return sent


@pytest.mark.parametrize("mid_event", [False, True])
@pytest.mark.parametrize("kind", ["close", "stall"])
async def test_a_stream_that_stops(fleet: EmulatedFleet, kind: str, mid_event: bool) -> None:
    await fleet.inject(0, Fault(kind, after_events=2, mid_event=mid_event))
    asked = Asked(fleet)
    if kind == "stall":
        end = rb"(\n\n\r\n.*){2}" + (rb"\w+\r\ndata: [^\n]+$" if mid_event else b"$")
        await asked.until(lambda got: re.search(end, got, re.DOTALL) is not None)
        await fleet.restore(0)
    else:
        await asked.until(lambda _: False)
    assert asked.received.endswith(b"\n\n\r\n") is not mid_event
    asked.socket.close()
    sent = await recorded(fleet)
    assert (sent.request, sent.rank, sent.status, sent.complete) == ("mine", 0, 200, False)
    assert sent.tokens[0] >= 2
    (text,) = sent.texts
    # One that stalls goes on until it notices that its client has left.
    assert text.startswith(asked.words) if kind == "stall" else text == asked.words


async def test_a_reset_in_mid_stream(fleet: EmulatedFleet) -> None:
    await fleet.inject(0, Fault("reset", after_events=1))
    asked = Asked(fleet)
    with pytest.raises(ConnectionResetError):
        await asked.until(lambda _: False)
    asked.socket.close()
    sent = await recorded(fleet)
    assert not sent.complete
    assert sent.texts[0].startswith(asked.words)


async def test_garbage_in_mid_stream(fleet: EmulatedFleet) -> None:
    await fleet.inject(0, Fault("corrupt", after_events=2))
    asked = Asked(fleet)
    got = await asked.until(lambda got: b"garbage" in got)
    assert re.search(rb"\n\n\r\n\x00\xff\x16\x03garbage", got)
    asked.socket.close()
    assert (await recorded(fleet)).texts == (asked.words,)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_head_without_an_end(fleet: EmulatedFleet, stream: bool) -> None:
    await fleet.inject(0, Fault("endless_head", bytes_per_s=100_000))
    asked = Asked(fleet, stream=stream)
    got = await asked.until(lambda got: got.count(b"\r\n") > 20)
    assert got.startswith(b"HTTP/1.1 200 OK\r\nx-endless: .")
    assert b"\r\n\r\n" not in got
    asked.socket.close()
    assert (await recorded(fleet)).tokens == (0,)


async def test_a_slow_drip_is_whole_in_the_end(fleet: EmulatedFleet) -> None:
    await fleet.inject(0, Fault("drip", bytes_per_s=1000))
    asked = Asked(fleet)
    await asked.until(lambda got: b"data: " in got)
    assert not asked.received.endswith(b"\n\n\r\n")
    sent = await recorded(fleet)
    assert sent.complete
    await fleet.restore(0)
    await asked.until(lambda got: got.endswith(b"0\r\n\r\n"))
    assert (sent.texts, sent.tokens) == ((asked.words,), (6,))
    asked.socket.close()


async def test_a_hang_in_the_middle_of_an_event(fleet: EmulatedFleet) -> None:
    asked = Asked(fleet, max_tokens=90_000)
    await asked.until(lambda got: b"data: " in got)
    await fleet.inject(0, Fault("hang", mid_event=True))
    await asked.until(lambda got: re.search(rb"\r\ndata: [^\n]+$", got) is not None)
    await fleet.restore(0)
    assert not fleet.workers[0].hung
    asked.socket.close()
    sent = await recorded(fleet)
    assert sent.texts[0].startswith(asked.words)


async def test_an_error_says_when_to_come_again(fleet: EmulatedFleet) -> None:
    await fleet.inject(0, Fault("error", status=429, retry_after_s=2, delay_s=0.01))
    async with client(fleet) as http:
        answer = await http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    sent = await recorded(fleet)
    assert (sent.request, sent.status, sent.complete, sent.texts) == ("mine", 429, False, ())


async def test_what_is_whole_is_recorded_with_every_choice(fleet: EmulatedFleet) -> None:
    async with client(fleet) as http:
        answer = await http.post("/v1/completions", json=BODY | {"n": 2})
    sent = await recorded(fleet)
    assert (sent.complete, sent.tokens) == (True, (6, 6))
    assert list(sent.texts) == [choice["text"] for choice in answer.json()["choices"]]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path, line = tmp_path / "answers", msgspec.json.encode(Sent("a", 0, 1.0, 2.0, 200))
    path.write_bytes(line + b"\n" + line[:9])
    assert read_sent(path) == [Sent("a", 0, 1.0, 2.0, 200)]
