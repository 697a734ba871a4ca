"""``evenstep replay``: send a trace to a router or an engine, measured at the client."""

from __future__ import annotations

import asyncio
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.replay.replay_results import Conditions, Report, Run, parse_goodput, summarize
from loadgen.replay.replay_table import replay_table
from loadgen.replay.replayer import Replayer, Target, get_json
from loadgen.replay.router_counters import Scrapes, cluster_report
from loadgen.replay.workload import Arrivals, Workload, checked_time_scale, plan
from loadgen.traces.trace import BUNDLED, Trace, load_trace
from router.access.key_files import first_key
from router.commands.json_output import STDOUT, json_option, write_json
from router.core.errors import ConfigError, UpstreamError
from router.engines.http_client import HttpClient

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

Url = Annotated[
    str, typer.Option(metavar="URL", help="base URL of a router or an OpenAI-compatible engine")
]
TraceFile = Annotated[
    str, typer.Option(metavar="FILE", help=f"trace file, or a bundled one: {', '.join(BUNDLED)}")
]
ArrivalsText = Annotated[
    str,
    typer.Option(
        metavar="closed:N|poisson:RATE|trace",
        help="N clients that wait for answers; a rate per engine second; the trace's own times",
    ),
]
Requests = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="how many; default: the trace's number")
]
Seed = Annotated[int, typer.Option(metavar="S", help="of sample, arrival times and prompts")]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="CAP", help="of every request; default: the trace's longest"),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="default: the first of /v1/models")]
TimeScale = Annotated[
    float, typer.Option(metavar="X", help="wall seconds per engine second, as in emulate")
]
Warmup = Annotated[
    float, typer.Option(min=0, max=0.9, metavar="F", help="fraction that completes at first")
]
Goodput = Annotated[
    str | None, typer.Option(metavar="ttft:MS,tpot:MS,e2el:MS", help="bounds of a good request")
]
Reveal = Annotated[
    bool,
    typer.Option("--reveal-lengths", help="max_tokens is the length, for engines that need that"),
]
KeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="file with the server's API key")
]
JsonFile = Annotated[str | None, json_option("write the report; - is stdout")]


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Command line of ``evenstep replay``, checked."""

    target: Target
    trace: Trace
    arrivals: Arrivals
    requests: int | None
    seed: int
    cap_tokens: int
    model: str | None
    time_scale: float
    warmup: float
    goodput_ms: dict[str, float]
    reveal_lengths: bool


def replay(
    url: Url = "http://127.0.0.1:8000",
    trace: TraceFile = "burstgpt",
    arrivals: ArrivalsText = "closed:64",
    requests: Requests = None,
    seed: Seed = 0,
    max_tokens: MaxTokens = None,
    model: Model = None,
    time_scale: TimeScale = 1.0,
    warmup: Warmup = 0.1,
    goodput: Goodput = None,
    reveal_lengths: Reveal = False,
    api_key_file: KeyFile = None,
    json_file: JsonFile = None,
) -> None:
    """Send the requests of a trace to a router or an engine, and measure.

    Times are engine seconds: wall seconds divided by the time scale. Exit 1 if a request failed.
    """
    loaded = load_trace(trace)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} is no base URL; write http://HOST:PORT")
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if api_key_file is not None:
        headers = ((b"authorization", b"Bearer " + first_key(str(api_key_file)).encode()),)
    settings = ReplaySettings(
        target=Target(url.rstrip("/").removesuffix("/v1"), headers),
        trace=loaded,
        arrivals=Arrivals.parse(arrivals),
        requests=requests,
        seed=seed,
        cap_tokens=max_tokens or loaded.max_output_tokens,
        model=model,
        time_scale=checked_time_scale(time_scale),
        warmup=warmup,
        goodput_ms=parse_goodput(goodput),
        reveal_lengths=reveal_lengths,
    )
    report = uvloop.run(_measure(settings))
    Console(stderr=json_file == STDOUT).print(replay_table(report))
    write_json(report, json_file)
    if report["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    if report["completed"] != report["num_prompts"]:
        raise typer.Exit(EXIT_FAILED)


async def _measure(settings: ReplaySettings) -> Report:
    client = HttpClient(connect_timeout_s=10.0)
    try:
        model = await _model(client, settings)
        server = await get_json(client, settings.target, "/version")
        workload = Workload(
            plan(settings.trace, settings.arrivals, settings.requests, settings.seed),
            settings.arrivals,
            model,
            settings.cap_tokens,
            settings.seed,
            settings.reveal_lengths,
        )
        run, scrapes = await _replay(client, settings, workload)
    finally:
        await client.aclose()
    kind, value = settings.arrivals.kind, settings.arrivals.value
    versions = {"evenstep": version("evenstep"), "python": platform.python_version()}
    match server:
        case {"version": str(text)}:
            versions["server"] = text
    report = summarize(
        run,
        Conditions(
            model=workload.model,
            url=settings.target.url,
            trace=settings.trace.name,
            trace_format=settings.trace.format,
            arrivals=str(settings.arrivals),
            seed=settings.seed,
            time_scale=settings.time_scale,
            warmup=settings.warmup,
            max_tokens=None if settings.reveal_lengths else settings.cap_tokens,
            reveal_lengths=settings.reveal_lengths,
            command=shlex.join(["evenstep", *sys.argv[1:]]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            rate_per_s=value if kind == "poisson" else None,
            concurrency=int(value) if kind == "closed" else None,
            goodput_ms=settings.goodput_ms,
            versions=versions,
        ),
    )
    return report | {"cluster": cluster_report(scrapes)}


async def _model(client: HttpClient, settings: ReplaySettings) -> str:
    try:
        listed = await get_json(client, settings.target, "/v1/models")
    except UpstreamError as error:
        raise ConfigError(f"--url: {error}; start a server there, or correct the URL") from error
    if settings.model is not None:
        return settings.model
    match listed:
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise ConfigError(f"--url: {settings.target.url}/v1/models names no model; give one by --model")


async def _replay(
    client: HttpClient, settings: ReplaySettings, workload: Workload
) -> tuple[Run, Scrapes]:
    with _progress(len(workload.requests)) as advance, _stop_signals() as stop:
        replayer = Replayer(
            client,
            settings.target,
            workload,
            time_scale=settings.time_scale,
            warmup=settings.warmup,
            on_end=advance,
        )
        return await replayer.run(stop)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as progress:
        task = progress.add_task("replay", total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Ctrl-C and SIGTERM set the event instead of ending the process."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
