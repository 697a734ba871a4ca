"""``evenstep replay``: send a trace to a router or an engine, measured at the client."""

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
from loadgen.run.options import command_of, flag, same_named
from loadgen.traces.trace import BUNDLED, Trace, load_trace
from router.access.key_files import first_key
from router.commands.json_output import STDOUT, json_option, write_json
from router.core.errors import ConfigError, UpstreamError
from router.engines.http_client import HttpClient

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


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


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Command line of ``evenstep replay``."""

    url: Annotated[str, flag("base URL of a router or an OpenAI-compatible engine", "URL")] = (
        "http://127.0.0.1:8000"
    )
    trace: Annotated[str, flag(f"trace file, or a bundled one: {', '.join(BUNDLED)}", "FILE")] = (
        "burstgpt"
    )
    arrivals: Annotated[
        str,
        flag(
            "N clients that wait for answers; a rate per engine second; the trace's own times",
            "closed:N|poisson:RATE|trace",
        ),
    ] = "closed:64"
    requests: Annotated[int | None, flag("how many; default: the trace's number", "N", least=1)] = (
        None
    )
    seed: Annotated[int, flag("of sample, arrival times and prompts", "S")] = 0
    max_tokens: Annotated[
        int | None, flag("of every request; default: the trace's longest", "CAP", least=1)
    ] = None
    model: Annotated[str | None, flag("default: the first of /v1/models", "NAME")] = None
    time_scale: Annotated[float, flag("wall seconds per engine second, as in emulate", "X")] = 1.0
    warmup: Annotated[
        float, typer.Option(min=0, max=0.9, metavar="F", help="fraction that completes at first")
    ] = 0.1
    goodput: Annotated[str | None, flag("bounds of a good request", "ttft:MS,tpot:MS,e2el:MS")] = (
        None
    )
    reveal_lengths: Annotated[
        bool, flag("max_tokens is the length, for engines that need that", name="--reveal-lengths")
    ] = False
    api_key_file: Annotated[Path | None, flag("file with the server's API key", "FILE")] = None
    json_file: Annotated[str | None, json_option("write the report; - is stdout")] = None

    def settings(self) -> ReplaySettings:
        """Check the options and load what they name.

        Raises:
            ConfigError: invalid option; named in the message.
            InputError: no such trace or key file.
        """
        loaded = load_trace(self.trace)
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: {self.url!r} is no base URL; write http://HOST:PORT")
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if self.api_key_file is not None:
            headers = ((b"authorization", b"Bearer " + first_key(str(self.api_key_file)).encode()),)
        return ReplaySettings(
            **same_named(self, ReplaySettings)
            | {
                "target": Target(self.url.rstrip("/").removesuffix("/v1"), headers),
                "trace": loaded,
                "arrivals": Arrivals.parse(self.arrivals),
                "cap_tokens": self.max_tokens or loaded.max_output_tokens,
                "time_scale": checked_time_scale(self.time_scale),
                "goodput_ms": parse_goodput(self.goodput),
            }
        )


@command_of(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Send the requests of a trace to a router or an engine, and measure.

    Times are engine seconds: wall seconds divided by the time scale. Exit 1 if a request failed.
    """
    report = uvloop.run(_measure(options.settings()))
    Console(stderr=options.json_file == STDOUT).print(replay_table(report))
    write_json(report, options.json_file)
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
