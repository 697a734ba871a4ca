"""A proxy's request to the deciding process, which ends before it has answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from router.engines.http_client import HttpClient
from router.processes.forward import Whole
from router.processes.remote_dispatcher import GONE_S, RemoteDispatcher
from router.proxy.answers import Answer
from tests.support.scripted import until

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Port:
    """Knows whether it is there."""

    def __init__(self) -> None:
        self.present = asyncio.Event()
        self.present.set()

    @property
    def here(self) -> bool:
        return self.present.is_set()

    async def back(self) -> None:
        await self.present.wait()

    async def gone(self) -> None:
        await asyncio.Event().wait()


class Client:
    gone = False

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def answer(self, answer: Answer) -> None:
        self.answers.append(answer)


class Decider:
    """Answers, or keeps what it was asked to itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = 0
        self.mute = False
        self.writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield
        finally:
            server.close()
            for writer in self.writers:
                writer.close()
            self.writers.clear()
            self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        while await reader.read(65536):
            self.asked += 1
            if not self.mute:
                writer.write(ANSWER)


def asking(path: Path) -> tuple[HttpClient, Port, dict[str, Any]]:
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "raw_path": b"/v1/models",
        "query_string": b"",
        "headers": [],
    }
    return HttpClient(socket=str(path)), Port(), scope


async def served(client: HttpClient, port: Port, scope: dict[str, Any]) -> Answer:
    """What a client is answered."""
    told = Client()
    whole = Whole(client, cast(RemoteDispatcher, port), scope, b"")
    await asyncio.wait_for(whole.serve(cast(Any, told)), 30)
    (answer,) = told.answers
    return answer


@pytest.mark.parametrize("known", [False, True], ids=["new connection", "kept connection"])
async def test_one_that_goes_before_it_has_answered(tmp_path: Path, known: bool) -> None:
    decider = Decider(tmp_path / "decider.sock")
    client, port, scope = asking(decider.path)
    async with decider.listening():
        if known:
            assert (await served(client, port, scope)).status == 200
        before, decider.mute = decider.asked, True
        asked = asyncio.create_task(served(client, port, scope))
        await until(lambda: decider.asked == before + 1)
        port.present.clear()
    await asyncio.sleep(0.3)
    assert not asked.done(), "it waits for the next one"
    decider.mute = False
    async with decider.listening():
        port.present.set()
        assert (await asked).body == b"ok"
    assert decider.asked == before + 2


async def test_one_that_is_there_and_refuses_is_not_asked_for_long(tmp_path: Path) -> None:
    client, port, scope = asking(tmp_path / "nobody.sock")
    async with asyncio.timeout(GONE_S):  # as long as for one that is gone, it does not wait
        answer = await served(client, port, scope)
    assert answer.status == 503
    assert (b"retry-after", b"1") in answer.headers


async def test_the_next_one_goes_as_well(tmp_path: Path) -> None:
    decider = Decider(tmp_path / "decider.sock")
    client, port, scope = asking(decider.path)
    decider.mute = True
    async with decider.listening():
        asked = asyncio.create_task(served(client, port, scope))
        await until(lambda: decider.asked == 1)
        port.present.clear()
    await asyncio.sleep(0.3)
    async with decider.listening():
        port.present.set()
        await until(lambda: decider.asked == 2)
        port.present.clear()
    assert (await asked).status == 503
    assert decider.asked == 2


class Held:
    """An answer that somebody is to close."""

    status = 200
    headers = ()
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("turns", range(1, 8))
async def test_an_answer_that_comes_as_its_client_leaves_is_closed(turns: int) -> None:
    come, held = asyncio.get_running_loop().create_future(), Held()

    class Engine:
        asked = False

        async def request(self, *_: object) -> Held:
            self.asked = True
            await come
            return held

    class Reading(Whole):
        async def _answer(self, *_: object) -> None:
            await asyncio.Event().wait()

    engine, client = Engine(), Client()
    _, port, scope = asking(Path("unused"))
    whole = Reading(cast(HttpClient, engine), cast(RemoteDispatcher, port), scope, b"")
    serving = asyncio.create_task(whole.serve(cast(Any, client)))
    await until(lambda: engine.asked)
    come.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    client.gone = True
    serving.cancel()
    await asyncio.wait((serving,))
    assert held.closed
