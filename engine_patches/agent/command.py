"""``evenstep agent``: publishes GPU power on hosts whose engines run without the plug-in."""

import logging
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from engine_patches.agent.power_publisher import Door, PowerPublisher, publish
from engine_patches.agent.ranks import Rank, RanksError, read_ranks
from engine_patches.plugin.settings import PlugInError
from engine_patches.power.nvml import Notices, NvmlSource
from engine_patches.power.source import PowerSource
from router.commands.json_output import STDOUT, json_option, write_json
from router.core.errors import ConfigError, InputError
from router.core.wire import is_curve_key

_ENDPOINT = re.compile(r"tcp://[\w.:%\[\]*-]+:\d+|ipc://.+")
_LEAST_S, _MOST_S = 0.1, 5.0


def agent(
    gpus: Annotated[
        str | None,
        typer.Option(metavar="GPU,...", help="indices or UUIDs; without --ranks-of each is a rank"),
    ] = None,
    ranks_of: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORKER=GPU[+GPU]", help="GPUs of a worker by its id in the router, repeatable"
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="tcp://HOST:PORT or ipc://PATH to publish on"),
    ] = None,
    interval: Annotated[
        float, typer.Option(metavar="S", help="time between readings, 0.1 to 5")
    ] = 1.0,
    secret_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CURVE key pair of evenstep keygen, beyond loopback"),
    ] = None,
    allowed_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="public CURVE key of a router that may listen, repeatable"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one reading and exit")] = False,
    json_file: Annotated[
        str | None, json_option("with --once, write the reading; - is stdout")
    ] = None,
) -> None:
    """Read the power of GPUs and publish it for routers whose workers have power=ENDPOINT.

    Power that cannot be read is told as unknown, and tried again every 30 s.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        ranks = read_ranks(gpus, ranks_of or ())
    except RanksError as error:
        raise InputError(str(error)) from None
    notices = Notices()
    sources = {rank: NvmlSource(rank.gpus, notices) for rank in ranks}
    if once:
        _print_once(sources, json_file)
        return
    if json_file is not None:
        raise ConfigError("--json goes with --once")
    door = _door(bind, secret_key_file, allowed_key or ())
    if not _LEAST_S <= interval <= _MOST_S:
        raise ConfigError(f"--interval {interval:g} must be {_LEAST_S:g} to {_MOST_S:g} seconds")
    _run(sources, door, interval)


def _print_once(sources: Mapping[Rank, PowerSource], json_file: str | None) -> None:
    rows: list[dict[str, Any]] = []
    for number, (rank, source) in enumerate(sources.items()):
        power_w = source.read(time.monotonic()).power_w
        rows.append({"worker": rank.worker, "rank": number, "gpus": rank.gpus, "power_w": power_w})
    if json_file != STDOUT:
        for row in rows:
            told = "unknown" if row["power_w"] is None else f"{row['power_w']:.1f} W"
            typer.echo(f"{row['worker'] or row['rank']} (GPU {'+'.join(row['gpus'])}): {told}")
    write_json({"time_s": time.time(), "ranks": rows}, json_file)


def _door(bind: str | None, secret_key_file: Path | None, allowed: Sequence[str]) -> Door:
    if bind is None:
        raise ConfigError("give --bind ENDPOINT, as in --bind tcp://127.0.0.1:5700, or --once")
    if not _ENDPOINT.fullmatch(bind):
        raise ConfigError(f"--bind {bind!r} should be tcp://HOST:PORT or ipc://PATH")
    for key in allowed:
        if not is_curve_key(key):
            raise ConfigError(
                f"--allowed-key {key!r} should be a public CURVE key of 40 characters, as "
                "evenstep keygen prints it"
            )
    return Door(bind, None if secret_key_file is None else str(secret_key_file), tuple(allowed))


def _run(sources: Mapping[Rank, PowerSource], door: Door, interval_s: float) -> None:
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    try:
        publisher = PowerPublisher(door)
    except PlugInError as error:
        raise ConfigError(str(error)) from None
    logging.getLogger(__name__).info("power on %s, ranks: %d", door.endpoint, len(sources))
    try:
        publish(publisher, sources, time.monotonic, time.time, lambda: ending.wait(interval_s))
    finally:
        publisher.close()
