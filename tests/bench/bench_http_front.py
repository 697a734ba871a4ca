"""What the limits and checks of a request cost: CPU of a server with them, and with uvicorn's own.

    python tests/bench/bench_http_front.py [--requests 10000] [--rounds 9] [--json FILE]

Two servers of the same small application, which answers without a router behind it, so that the
difference is as large as it can be; both asked in turns, over eight connections.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loadgen.report.origin import Engines, origin
from router.http.listening import listen, server_config
from router.http.port import HttpLimits
from tests.support.figure_files import write_figures
from tests.support.server import Server, free_port, running

CODE = ("router/http", "tests/bench/bench_http_front.py")
_BODY = b'{"model": "tiny", "prompt": "' + b"x" * 400 + b'", "max_tokens": 16}'
_FIELDS = (
    b"Host: 127.0.0.1:8000",
    b"Accept: application/json",
    b"Content-Type: application/json",
    b"User-Agent: OpenAI/Python 1.40.0",
    b"X-Stainless-Lang: python",
    b"X-Stainless-Retry-Count: 0",
    b"Authorization: Bearer 0123456789abcdef",
    b"Accept-Encoding: gzip, deflate",
    b"Connection: keep-alive",
    b"Content-Length: %d" % len(_BODY),
)
_REQUEST = b"\r\n".join((b"POST /v1/completions HTTP/1.1", *_FIELDS, b"", _BODY))
_ANSWER = b'{"choices": []}'
_CONNECTIONS = 8
_TICKS = os.sysconf("SC_CLK_TCK")


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """The application: reads the body, and answers."""
    while scope["method"] == "POST" and (await receive()).get("more_body"):
        pass
    length = (b"content-length", b"%d" % len(_ANSWER))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": _ANSWER})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--serve", choices=("plain", "limited"))
    options.add_argument("--port", type=int)
    options.add_argument("--json", type=Path, help="file for what was measured")
    given = options.parse_args()
    if given.serve:
        serve(given.port, limited=given.serve == "limited")
        return
    with two_servers() as servers:
        found: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(given.rounds + 1):
            for name, server in servers.items():
                before = cpu_s(server)
                asyncio.run(ask(server.port, given.requests))
                found[name].append(cpu_s(server) - before)
    plain, limited = (sorted(found[name][1:]) for name in ("plain", "limited"))
    scale = 10_000 / given.requests
    pairs = [b - a for a, b in zip(found["plain"][1:], found["limited"][1:], strict=True)]
    for name, values in (("uvicorn's", plain), ("limited", limited)):
        print(f"{name:>10}: {median(values) * scale:.3f} CPU s per 10k requests")
    print(
        f"difference: {median(pairs) * scale:+.3f} (pairs {min(pairs) * scale:+.3f} to "
        f"{max(pairs) * scale:+.3f}), {median(pairs) * scale * 100:+.1f} us a request"
    )
    if given.json:
        pairs_us = sorted(round(pair * scale * 100, 1) for pair in pairs)
        figures = {"requests": given.requests, "more_us_per_request": pairs_us}
        write_figures(given.json, figures, origin(Engines.EMULATED, CODE))


def serve(port: int, *, limited: bool) -> None:
    """Serve until a signal."""
    with listen("127.0.0.1", port, "--port") as listener:
        config = server_config(answer, HttpLimits(), lifespan="off")
        if not limited:
            config.http_protocol_class = HttpToolsProtocol
        uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def two_servers() -> Iterator[dict[str, Server]]:
    """Both, on ports of their own."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in ("plain", "limited"):
            port = free_port()
            command = [sys.executable, __file__, "--serve", name, "--port", str(port)]
            servers[name] = stack.enter_context(running(command, port, Path(os.devnull)))
        yield servers


def cpu_s(server: Server) -> float:
    """CPU that a server has taken."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def ask(port: int, requests: int) -> None:
    """So many requests, over a few connections."""
    await asyncio.gather(*(_ask(port, requests // _CONNECTIONS) for _ in range(_CONNECTIONS)))


async def _ask(port: int, requests: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(requests):
        writer.write(_REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(len(_ANSWER))
    writer.close()


if __name__ == "__main__":
    main()
