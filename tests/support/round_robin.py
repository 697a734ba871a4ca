"""A plain proxy, as what balances a cluster today: connections go to the servers in turn."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from itertools import cycle


@contextlib.contextmanager
def round_robin(ports: Sequence[int]) -> Iterator[str]:
    """Pass connections on to these ports of 127.0.0.1; yields the proxy's URL."""
    loop = asyncio.new_event_loop()
    turns = cycle(ports)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", next(turns))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, downstream))
            tasks.create_task(copy(upstream, writer))

    server = loop.run_until_complete(asyncio.start_server(pass_on, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
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
