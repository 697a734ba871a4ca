"""The load generator against a small server that answers as told, over real sockets."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from loadgen.replay.replay_command import ARRIVALS
from loadgen.replay.replay_results import Run
from loadgen.replay.replayer import Replayer, Target
from loadgen.replay.router_counters import Scrapes
from loadgen.replay.workload import Workload
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.request_classes import RequestClass
from loadgen.traces.trace import TraceRequest
from router.core.targets import Targets
from router.engines.http_client import HttpClient

EVENSTEP = str(Path(sys.executable).with_name("evenstep"))
TIMEOUT_S = 60.0

Body = dict[str, Any]


def events(tokens: int, *, usage: int | None = None, done: bool = True) -> list[bytes]:
    """A whole answer: one event per token, usage, end mark."""
    text = {"choices": [{"index": 0, "text": " a"}], "usage": None}
    counted = {"completion_tokens": tokens if usage is None else usage, "prompt_tokens": 1}
    parts = [text] * tokens + [{"choices": [], "usage": counted}]
    lines = [f"data: {json.dumps(part, separators=(',', ':'))}\n\n".encode() for part in parts]
    return [*lines, b"data: [DONE]\n\n"] if done else lines


@dataclass
class Server:
    """Answers completions by ``respond``; counts what it sees."""

    bodies: list[Body] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    open_now: int = 0
    open_most: int = 0
    metrics: str = ""
    seen: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
        await stream(writer, events(min(hidden(body), body["max_tokens"])))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                self.heads.append(head)
                length = int(head.partition("content-length: ")[2].split()[0])
                body = await reader.readexactly(length)
                await self.answer(head.split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path != "/v1/completions":
            return await plain(writer, 200, self.page(path))
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        async with self.seen:
            self.bodies.append(json.loads(body))
            self.seen.notify_all()
        try:
            return await self.respond(self.bodies[-1], writer)
        finally:
            self.open_now -= 1

    def page(self, path: str) -> bytes:
        pages = {
            "/metrics": self.metrics,
            "/v1/models": json.dumps({"data": [{"id": "tiny"}]}),
            "/version": json.dumps({"version": "9.9"}),
        }
        return pages[path].encode()

    async def requests_seen(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S), self.seen:
            await self.seen.wait_for(lambda: len(self.bodies) >= count)


def hidden(body: Body) -> int:
    return int(body["vllm_xargs"]["evenstep_output_tokens"])


async def plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def stream(writer: asyncio.StreamWriter, chunks: list[bytes], *, end: bool = True) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for chunk in chunks:
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
    if end:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    connections: list[asyncio.Task[None]] = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(server.serve(reader, writer)))

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        listener.close()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*connections)


REQUESTS = tuple(TraceRequest(5 + n, 1 + n % 4) for n in range(12))


async def replay_against(
    server: Server,
    arrivals: str = "closed:3",
    requests: tuple[TraceRequest, ...] = REQUESTS,
    stop: asyncio.Event | None = None,
    classes: Sequence[RequestClass] = (),
    **options: Any,
) -> tuple[Run, Scrapes]:
    client = HttpClient()
    workload = Workload(
        requests, Arrivals.parse(arrivals, ARRIVALS), "tiny", 100, 0, classes=classes
    )
    async with serving(server) as url:
        replayer = Replayer(client, Target(url), workload, **options)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await replayer.run(stop or asyncio.Event())
        finally:
            await client.aclose()  # the server's connections end with it


async def test_closed_loop_keeps_its_concurrency() -> None:
    class Gate(Server):
        async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
            await self.requests_seen(3)
            await super().respond(body, writer)

    server = Gate()
    run, scrapes = await replay_against(server)
    assert [result.error for result in run.results] == [None] * 12
    assert sum(result.output_tokens for result in run.results) == 30
    assert (run.sent, run.planned, run.interrupted) == (12, 12, False)
    assert server.open_most == 3
    assert [len(body["prompt"]) for body in server.bodies] == list(range(5, 17))
    assert scrapes == Scrapes()
    for result in run.results:
        assert result.first_s is not None
        assert 0 <= result.scheduled_s <= result.sent_s <= result.first_s <= result.end_s
        assert len(result.gaps_s) < result.output_tokens


async def test_open_arrivals_do_not_wait_for_answers() -> None:
    class Gate(Server):
        async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
            await self.requests_seen(12)
            await super().respond(body, writer)

    server = Gate()
    timed = tuple(TraceRequest(each.prompt_tokens, each.output_tokens, 0.01) for each in REQUESTS)
    run, _ = await replay_against(server, "poisson:100", timed, time_scale=2.0)
    assert server.open_most == 12
    assert {result.scheduled_s for result in run.results} == {0.02}
    assert all(result.sent_s >= 0.02 for result in run.results)


async def test_requests_bring_the_targets_of_their_class() -> None:
    server = Server()
    classes = (RequestClass("chat", 0.5, Targets(1.5, 0.04)), RequestClass("batch", 0.5))
    run, _ = await replay_against(server, "closed:1", REQUESTS[:2], classes=classes, time_scale=2.0)
    assert [each.class_ for each in run.results] == [*classes]
    chat, batch = (head for head in server.heads if head.startswith("post"))
    assert "x-slo-ttft-ms: 1500.000000" in chat
    assert "x-slo-tpot-ms: 40.000000" in chat
    assert "x-slo" not in batch


async def test_cap() -> None:
    run, _ = await replay_against(Server(), requests=(TraceRequest(1, 500),))
    assert [(each.output_tokens, each.error) for each in run.results] == [(100, None)]


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
ERROR = b'data: {"error":{"message":"boom"}}\n\n'


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (lambda w: stream(w, events(4)), 200, None),
        (lambda w: stream(w, events(3)), 200, "another number of tokens"),
        (lambda w: stream(w, events(4, usage=5)), 200, "another number of tokens"),
        (lambda w: stream(w, events(4, done=False)), 200, "the stream ended without [DONE]"),
        (lambda w: stream(w, [b"data: [DONE]\n\n"]), 200, "no usage event"),
        (lambda w: stream(w, [ERROR, *events(4)]), 200, "error event: boom"),
        (lambda w: plain(w, 429, b'{"error":{"message":"full"}}'), 429, "HTTP 429: full"),
        (lambda w: plain(w, 500, b"oops"), 500, "HTTP 500: oops"),
    ],
)
async def test_what_counts_as_an_error(answer: Answer, status: int, error: str | None) -> None:
    class Told(Server):
        async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
            await answer(writer)

    run, _ = await replay_against(Told(), requests=(TraceRequest(5, 4),))
    (result,) = run.results
    assert result.status == status
    assert (result.error or "").startswith(error or "")
    assert (result.error is None) == (error is None)


async def test_an_answer_that_breaks_off() -> None:
    class Breaks(Server):
        async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
            await stream(writer, events(2, done=False), end=False)
            writer.close()

    run, _ = await replay_against(Breaks(), requests=(TraceRequest(5, 4),))
    (result,) = run.results
    assert "before its answer was complete" in (result.error or "")
    assert result.first_s is not None


async def test_stopping_closes_open_streams() -> None:
    class Hangs(Server):
        async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
            if len(self.bodies) <= 2:
                return await super().respond(body, writer)
            return await stream(writer, events(1, done=False), end=False)

    server, stop = Hangs(), asyncio.Event()
    running = asyncio.create_task(replay_against(server, stop=stop))
    await server.requests_seen(5)
    stop.set()
    run, _ = await running
    assert run.interrupted
    assert [result.error for result in run.results] == [None, None]
    assert run.sent == 5


async def test_windows_and_scrapes() -> None:
    class Counts(Server):
        def page(self, path: str) -> bytes:
            steps = len(self.bodies)
            return f'evenstep_barrier_steps_total{{group="g",pool="empty"}} {steps}\n'.encode()

    run, scrapes = await replay_against(Counts(), "closed:1", warmup=0.25)
    assert run.steady is not None
    assert run.results[2].end_s <= run.steady.start_s <= run.results[3].end_s
    assert run.steady.end_s == run.results[-1].sent_s
    assert run.whole.end_s >= run.results[-1].end_s
    steps = [
        found["g"]["empty"].steps
        for found in (scrapes.start, scrapes.warm, scrapes.drain, scrapes.end)
        if found is not None
    ]
    assert len(steps) == 4
    assert (steps[0], steps[3]) == (0, 12)
    assert steps == sorted(steps)


async def test_too_short_for_a_steady_window() -> None:
    run, _ = await replay_against(Server(), "closed:12", warmup=0.5)
    assert run.steady is None


async def evenstep(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        EVENSTEP, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_command_reports() -> None:
    server = Server()
    async with serving(server) as url:
        options = ("--requests", "20", "--arrivals", "closed:4", "--time-scale", "2")
        code, out, err = await evenstep("replay", "--url", url, *options, "--json", "-")
    assert (code, len(server.bodies)) == (0, 20)
    report = json.loads(out)
    assert (report["completed"], report["failed"], report["lost"]) == (20, 0, 0)
    assert report["cluster"] is None
    assert report["versions"]["server"] == "9.9"
    assert (report["model_id"], report["max_tokens"]) == ("tiny", 3206)
    assert (report["request_rate"], report["max_concurrency"]) == ("inf", 4)
    assert (report["base_url"], report["time_scale"]) == (url, 2)
    assert datetime.fromisoformat(report["date"]).tzinfo == UTC
    assert "replay --url" in report["command"]
    assert "No cluster figures" in err


async def test_command_tells_how_many_of_a_class_met_their_targets() -> None:
    async with serving(Server()) as url:
        options = ("--requests", "8", "--classes", "chat:.5:60,batch:.5")
        code, out, err = await evenstep("replay", "--url", url, *options, "--json", "-")
    report = json.loads(out)
    assert (code, report["met_by_class"]) == (0, {"batch": 1.0, "chat": 1.0})
    assert report["request_goodput"] == report["request_throughput"] > 0
    assert report["classes"] == "chat:.5:60,batch:.5"
    assert "Targets met: batch 100.0%, chat 100.0%." in err


async def test_command_writes_a_file_and_fails_with_its_requests(tmp_path: Path) -> None:
    class Full(Server):
        async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
            await plain(writer, 429, b"{}")

    async with serving(Full()) as url:
        file = tmp_path / "report.json"
        code, out, _ = await evenstep(
            "replay", "--url", url, "--requests", "3", "--json", str(file)
        )
    assert code == 1
    assert "rejected" in out
    assert json.loads(file.read_text())["rejected"] == 3


async def test_command_interrupted() -> None:
    class Hangs(Server):
        async def respond(self, body: Body, writer: asyncio.StreamWriter) -> None:
            await stream(writer, events(1, done=False), end=False)

    server = Hangs()
    async with serving(server) as url:
        process = await asyncio.create_subprocess_exec(
            EVENSTEP, "replay", "--url", url, "--json", "-", stdout=asyncio.subprocess.PIPE
        )
        await server.requests_seen(64)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await process.communicate()
    assert process.returncode == 130
    report = json.loads(out)
    assert (report["interrupted"], report["sent"], report["completed"]) == (True, 64, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://127.0.0.1:9"), "--url: cannot connect to http://127.0.0.1:9"),
        (("--url", "127.0.0.1:8000"), "--url: '127.0.0.1:8000' is no base URL; write http://"),
        (("--trace", "none.csv"), "none.csv: No such file"),
        (("--arrivals", "closed"), "--arrivals: 'closed' is unknown"),
        (("--arrivals", "trace", "--url", "http://127.0.0.1:9"), "--url: cannot connect"),
        (("--time-scale", "0"), "--time-scale: 0.0 is not above 0"),
        (("--classes", "chat"), "--classes takes NAME:SHARE"),
        (("--classes", "chat:1:1", "--goodput", "ttft:1"), "both say what is good"),
        (("--classes", "chat:1:1", "--time-scale", "2"), "--classes needs --time-scale 1"),
        (("--api-key-file", "none"), "cannot read the key file none"),
        (("--json", "no/x.json", "--url", "http://127.0.0.1:9"), "--json: cannot write no/x.json"),
    ],
)
async def test_command_refuses_bad_input(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = await evenstep("replay", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


async def test_api_key_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await plain(writer, 200, b"{}")
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1"
        code, _, err = await evenstep("replay", "--url", url, "--api-key-file", str(key))
    assert code == 2
    assert "names no model; give one by --model" in err
    assert b"authorization: Bearer secret\r\n" in heads[0]
