"""Plain proxies: connections go to the servers in turn, or to the rank that a header names."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import cycle

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.contextmanager
def round_robin(ports: Sequence[int]) -> Iterator[str]:
    """Pass connections on to these ports of 127.0.0.1; yields the proxy's URL."""
    turns = cycle(ports)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", next(turns))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, downstream))
            tasks.create_task(copy(upstream, writer))

    with _listening(pass_on) as url:
        yield url


@contextlib.contextmanager
def ranks_behind(ports: Sequence[int]) -> Iterator[str]:
    """One URL for all ranks, as vLLM's internal data parallelism has it: a header says which."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        names = [line.lower() for line in head.split(b"\r\n")]
        ranks = [line[-1:] for line in names if line.startswith(b"x-data-parallel-rank:")]
        port = ports[int(ranks[0]) if ranks else 0]
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        # One request for each connection, so that every one is sent where it says.
        forth.write(head.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        await asyncio.gather(copy(reader, forth), copy(back, writer))

    with _listening(serve) as url:
        yield url


@contextlib.contextmanager
def _listening(serve: Serve) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    starting = asyncio.start_server(serve, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result(60)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one of both is gone, then let go of the other."""
    with contextlib.suppress(ConnectionError), contextlib.closing(writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


async def _end(server: asyncio.Server) -> None:
    server.close()
    connections = asyncio.all_tasks() - {asyncio.current_task()}
    for each in connections:
        each.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
