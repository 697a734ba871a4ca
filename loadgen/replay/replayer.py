"""Load generator: sends a workload to an OpenAI-compatible server over real HTTP."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from loadgen.replay.replay_results import RequestResult, Run, Window
from loadgen.replay.router_counters import Scrape, Scrapes, parse_metrics
from loadgen.replay.stream import UNREADABLE, CompletionStream, error_message
from loadgen.replay.workload import Workload
from loadgen.traces.request_classes import ALL, RequestClass
from loadgen.traces.trace import TraceRequest
from router.core.errors import UpstreamError
from router.core.targets import Targets
from router.engines.http_client import HttpClient

HTTP_OK = 200
SCRAPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of the requests."""

    url: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


async def _get(client: HttpClient, target: Target, path: str) -> bytes:
    """Empty for an HTTP error."""
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            response = await client.request("GET", target.url, path, target.headers)
            body = await response.read()
    except TimeoutError as error:
        raise UpstreamError(f"no answer from {target.url} in {SCRAPE_TIMEOUT_S:g} s") from error
    return body if response.status == HTTP_OK else b""


async def get_json(client: HttpClient, target: Target, path: str) -> object:
    """The server's JSON answer; None for other content. UpstreamError: it cannot be reached."""
    body = await _get(client, target, path)
    try:
        found: object = msgspec.json.decode(body)
    except UNREADABLE:
        return None
    return found


async def scrape(client: HttpClient, target: Target) -> Scrape | None:
    """Read the counters of an Evenstep router; None if there are none."""
    try:
        body = await _get(client, target, "/metrics")
    except UpstreamError:
        return None
    return parse_metrics(body.decode(errors="replace")) or None


async def receive(
    client: HttpClient,
    url: str,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    stream: CompletionStream,
    now: Callable[[], float],
) -> tuple[int, str | None]:
    """Send a completion and feed its answer to ``stream``; its status, and what is wrong with it.

    UpstreamError: the server cannot be reached, or the answer broke off.
    """
    response = await client.request("POST", url, "/v1/completions", headers, body)
    try:
        if response.status != HTTP_OK:
            message = error_message(await response.read())
            return response.status, f"HTTP {response.status}: {message}"
        async for chunk in response:
            stream.feed(chunk, now())
    finally:
        response.close()
    return response.status, None


class Replayer:
    """Sends one workload once.

    Times are wall seconds; an engine second of the arrivals is ``time_scale`` of them. The steady
    window begins when a fraction ``warmup`` of the requests has completed.
    """

    def __init__(
        self,
        client: HttpClient,
        target: Target,
        workload: Workload,
        time_scale: float = 1.0,
        warmup: float = 0.1,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._client = client
        self._target = target
        self._workload = workload
        self._time_scale = time_scale
        self._warm_count = warmup * len(workload.requests)
        self._on_end = on_end
        self._headers = [(b"content-type", b"application/json"), *target.headers]
        self._queue: Iterator[tuple[TraceRequest, bytes, RequestClass]] = iter(())
        self._results: list[RequestResult] = []
        self._sent = 0
        self._start_s = 0.0
        self._warm_s: float | None = None
        self._drain_s: float | None = None
        self._scrapes: dict[str, asyncio.Task[Scrape | None]] = {}

    async def run(self, stop: asyncio.Event) -> tuple[Run, Scrapes]:
        """Send all requests and wait for all answers; ``stop`` ends both."""
        workload = self._workload
        classes = workload.classes or [ALL] * len(workload.requests)
        self._queue = zip(workload.requests, workload.bodies(), classes, strict=True)
        start = await scrape(self._client, self._target)
        self._start_s = time.monotonic()
        sending = self._closed() if workload.arrivals.kind == "closed" else self._open()
        interrupted = await _unless(stop, sending)
        end_s = self._now()
        end = await scrape(self._client, self._target)
        scrapes = Scrapes(start, await self._scrape_of("warm"), await self._scrape_of("drain"), end)
        steady = None
        if self._warm_s is not None and self._drain_s is not None and self._warm_s < self._drain_s:
            steady = Window(self._warm_s, self._drain_s)
        run = Run(
            results=self._results,
            planned=len(workload.requests),
            sent=self._sent,
            whole=Window(0.0, end_s),
            steady=steady,
            interrupted=interrupted,
            start_unix_s=time.time() - self._now(),
        )
        return run, scrapes

    def _now(self) -> float:
        return time.monotonic() - self._start_s

    async def _closed(self) -> None:
        async def client() -> None:
            for each in self._queue:
                await self._exchange(*each, self._now())

        clients = min(int(self._workload.arrivals.value), len(self._workload.requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as group:
            for request, body, class_ in self._queue:
                scheduled_s = (request.arrival_s or 0.0) * self._time_scale
                if (wait_s := scheduled_s - self._now()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._exchange(request, body, class_, scheduled_s))

    async def _exchange(
        self, request: TraceRequest, body: bytes, class_: RequestClass, scheduled_s: float
    ) -> None:
        sent_s = self._now()
        self._sent += 1
        if self._sent == len(self._workload.requests):
            self._drain_s = sent_s
            self._scrape_soon("drain")
        stream, headers = CompletionStream(), [*self._headers, *_targets(class_)]
        status: int | None = None
        try:
            status, error = await receive(
                self._client, self._target.url, headers, body, stream, self._now
            )
        except UpstreamError as problem:
            error = str(problem)
        self._results.append(
            RequestResult(
                prompt_tokens=request.prompt_tokens,
                output_tokens=stream.output_tokens or 0,
                cached_tokens=stream.cached_tokens,
                scheduled_s=scheduled_s,
                sent_s=sent_s,
                first_s=stream.first_s,
                end_s=self._now(),
                gaps_s=stream.gaps_s,
                status=status,
                error=error or self._complaint(request, stream),
                class_=class_,
            )
        )
        self._on_end()
        if self._warm_s is None and len(self._results) >= self._warm_count:
            self._warm_s = self._now()
            self._scrape_soon("warm")

    def _complaint(self, request: TraceRequest, stream: CompletionStream) -> str | None:
        if stream.error is not None:
            return stream.error
        if not stream.done:
            return "the stream ended without [DONE]"
        if stream.output_tokens is None:
            return "no usage event"
        if stream.output_tokens != self._workload.expected_tokens(request):
            return "another number of tokens than the request's hidden length"
        return None

    def _scrape_soon(self, name: str) -> None:
        self._scrapes[name] = asyncio.create_task(scrape(self._client, self._target))

    async def _scrape_of(self, name: str) -> Scrape | None:
        return await self._scrapes[name] if name in self._scrapes else None


def _targets(class_: RequestClass) -> Iterator[tuple[bytes, bytes]]:
    """Headers with the targets of a class."""
    wanted = class_.targets or Targets()
    for name, seconds in ((b"x-slo-ttft-ms", wanted.ttft_s), (b"x-slo-tpot-ms", wanted.tpot_s)):
        if seconds is not None:
            yield name, b"%.6f" % (1000 * seconds)


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Return whether ``stop`` was set first."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return False
        return True
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
