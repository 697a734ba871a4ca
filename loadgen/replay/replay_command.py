"""``evenstep replay``: send a trace to a router or an engine, measured at the client."""

import asyncio
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast

import typer
import uvloop
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from loadgen.replay.replay_results import Report, parse_goodput, summarize
from loadgen.replay.replayer import Replayer, Target, get_json
from loadgen.replay.router_counters import cluster_report
from loadgen.replay.workload import Workload, checked_time_scale, plan
from loadgen.report.numbers import number, plain_table
from loadgen.run.options import command_of
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.request_classes import FORM, RequestClass, deal, parse_classes
from loadgen.traces.trace import BUNDLED, load_trace
from router.access.key_files import first_key
from router.commands.json_output import STDOUT, json_option, write_json
from router.commands.options import flag
from router.core.errors import ConfigError, UpstreamError
from router.engines.http_client import HttpClient

ARRIVALS = "closed:N|poisson:RATE|trace"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


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
            ARRIVALS,
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
    classes: Annotated[
        str | None,
        flag("classes of requests: share, seconds to the first and each further token", FORM),
    ] = None
    reveal_lengths: Annotated[
        bool, flag("max_tokens is the length, for engines that need that", name="--reveal-lengths")
    ] = False
    api_key_file: Annotated[Path | None, flag("file with the server's API key", "FILE")] = None
    json_file: Annotated[str | None, json_option("write the report; - is stdout")] = None


@command_of(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Send the requests of a trace to a router or an engine, and measure.

    Times are engine seconds: wall seconds divided by the time scale. Exit 1 if a request failed.
    """
    report = uvloop.run(_measure(options))
    Console(stderr=options.json_file == STDOUT).print(replay_table(report))
    write_json(report, options.json_file)
    if report["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    if report["completed"] != report["num_prompts"]:
        raise typer.Exit(EXIT_FAILED)


async def _measure(options: ReplayOptions) -> Report:
    trace = load_trace(options.trace)
    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {options.url!r} is no base URL; write http://HOST:PORT")
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if options.api_key_file is not None:
        headers = ((b"authorization", b"Bearer " + first_key(str(options.api_key_file)).encode()),)
    target = Target(options.url.rstrip("/").removesuffix("/v1"), headers)
    arrivals = Arrivals.parse(options.arrivals, ARRIVALS)
    time_scale = checked_time_scale(options.time_scale)
    goodput_ms = parse_goodput(options.goodput)
    classes = _classes(options)
    client = HttpClient(connect_timeout_s=10.0)
    try:
        model = await _model(client, target, options.model)
        requests = plan(trace, arrivals, options.requests, options.seed)
        workload = Workload(
            requests,
            arrivals,
            model,
            options.max_tokens or trace.max_output_tokens,
            options.seed,
            options.reveal_lengths,
            deal(classes, len(requests), options.seed),
        )
        versions = {"evenstep": version("evenstep"), "python": platform.python_version()}
        match await get_json(client, target, "/version"):
            case {"version": str(text)}:
                versions["server"] = text
        with _progress(len(workload.requests)) as advance, _stop_signals() as stop:
            replayer = Replayer(
                client, target, workload, time_scale, warmup=options.warmup, on_end=advance
            )
            run, scrapes = await replayer.run(stop)
    finally:
        await client.aclose()
    poisson, closed = arrivals.kind == "poisson", arrivals.kind == "closed"
    conditions: Report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["evenstep", *sys.argv[1:]]),
        "versions": versions,
        "base_url": target.url,
        "endpoint": "/v1/completions",
        "model_id": model,
        "trace": trace.name,
        "trace_format": trace.format,
        "arrivals": str(arrivals),
        "request_rate": arrivals.value if poisson else "inf",
        "max_concurrency": int(arrivals.value) if closed else None,
        "seed": options.seed,
        "max_tokens": None if options.reveal_lengths else workload.cap_tokens,
        "lengths_revealed": options.reveal_lengths,
        "warmup": options.warmup,
        "classes": options.classes,
    }
    report = summarize(run, conditions, time_scale, goodput_ms)
    return report | {"cluster": cluster_report(scrapes)}


def _classes(options: ReplayOptions) -> Sequence[RequestClass]:
    if options.classes is None:
        return ()
    if options.goodput is not None:
        raise ConfigError("--goodput and --classes both say what is good: give one of them")
    if options.time_scale != 1:
        raise ConfigError(
            "--classes needs --time-scale 1: engines that are slowed down tell of steps in their "
            "own seconds, clients wait in others, and a target would mean both"
        )
    return parse_classes(options.classes)


async def _model(client: HttpClient, target: Target, name: str | None) -> str:
    """The given name, or that of the server's first model."""
    try:
        listed = await get_json(client, target, "/v1/models")
    except UpstreamError as error:
        raise ConfigError(f"--url: {error}; start a server there, or correct the URL") from error
    if name is not None:
        return name
    match listed:
        case {"data": [{"id": str(first)}, *_]}:
            return first
    raise ConfigError(f"--url: {target.url}/v1/models names no model; give one by --model")


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
    for each in signals:
        loop.add_signal_handler(each, stop.set)
    try:
        yield stop
    finally:
        for each in signals:
            loop.remove_signal_handler(each)


LATENCIES = (
    ("TTFT", "ttft"),
    ("TPOT", "tpot"),
    ("ITL, between arrivals", "itl"),
    ("end to end", "e2el"),
    ("client's lateness", "lateness"),
)


def replay_table(report: Report) -> RenderableType:
    """Tables of the requests, the latencies and the cluster's figures, then notes."""
    steady = cast(Report, report["steady"] or {})
    table = plain_table("", "whole run", "steady")
    for label, key in (("requests", "num_prompts"), ("completed", "completed")):
        table.add_row(label, number(report[key]))
    for label in ("failed", "rejected", "lost"):
        if report[label]:
            table.add_row(label, number(report[label]), style="red")
    table.add_row("duration, engine s", number(report["duration"]), number(steady.get("duration")))
    for label, key in (
        ("output tok/s", "output_throughput"),
        ("total tok/s", "total_token_throughput"),
        ("requests/s", "request_throughput"),
        ("good requests/s", "request_goodput"),
        ("mean admitted prompt, tokens", "mean_admitted_prompt_tokens"),
        ("cached, share of prompt tokens", "cached_prompt_share"),
    ):
        if report[key] is not None:
            table.add_row(label, number(report[key]), number(steady.get(key)))
    parts = ("mean", "median", "p99")
    latencies = plain_table("engine ms", *parts)
    for label, name in LATENCIES:
        latencies.add_row(label, *(number(report[f"{part}_{name}_ms"]) for part in parts))
    return Group(table, latencies, *_cluster(report), *map(Text, _notes(report)))


def _cluster(report: Report) -> list[Table]:
    cluster = cast(Report | None, report["cluster"])
    if cluster is None:
        return []
    table = plain_table("cluster", "whole run", "steady")
    windows = [cast(Report, cluster[name] or {}) for name in ("whole", "steady")]
    for label, key in (
        ("imbalance, tokens", "avg_imbalance_tokens"),
        ("mean load, tokens", "mean_load_tokens"),
        ("max load, tokens", "max_load_tokens"),
        ("idle share", "idle_share"),
        ("energy, J/token", "energy_j_per_output_token"),
    ):
        table.add_row(label, *(number(window.get(key)) for window in windows))
    return [table]


def _notes(report: Report) -> list[str]:
    notes = [f"Times are wall seconds / {report['time_scale']:g}. Seed {report['seed']}."]
    if met := cast(Mapping[str, float], report["met_by_class"]):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in met.items())
        notes.append(f"Targets met: {shares}.")
    if report["cluster"] is None:
        notes.append(
            "No cluster figures: the server is no Evenstep router that is told of its workers' "
            "steps (snapshots= of a worker)."
        )
    elif others := (cluster := cast(Report, report["cluster"]))["other_groups"]:
        named = ", ".join(cast(list[str], others))
        notes.append(f"Cluster figures are those of group {cluster['group']}, without {named}.")
    if report["steady"] is None:
        notes.append("Too short for a steady window.")
    if report["lengths_revealed"]:
        notes.append("Every request revealed its output length.")
    if report["interrupted"]:
        notes.append("Interrupted: the figures are those of what had ended.")
    errors = cast(dict[str, int], report["errors"])
    notes.extend(f"{count} x {message}" for message, count in errors.items())
    return notes
