"""``evenstep observe``: measures imbalance under live traffic, without routing."""

import asyncio
import logging
import signal
import sys
import time
from contextlib import ExitStack
from typing import Annotated, Any, TextIO

import typer

from router.commands.json_output import STDOUT, json_option, write_json
from router.commands.options import flag
from router.config.flags import ConfigFile, given_settings, with_flags
from router.config.serve_settings import ServeSettings
from router.core.errors import ConfigError
from router.core.state.group import Group
from router.observe.observed import Share, total

_SETTINGS = (
    "workers",
    "secret_key_file",
    "admin_port",
    "admin_host",
    "admin_key_file",
    "record",
    "power_levels",
    "step_time",
    "snapshot_stale_s",
    "log_level",
)
_SOURCES = {
    "modelled": "modelled",
    "measured": "as the engines have timed it",
    "both": "as engines have timed it, else modelled",
}


def observe(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    seconds: Annotated[float | None, flag("How long; unset: until Ctrl-C.", "S", 0.1)] = None,
    every: Annotated[float, flag("Time between two lines.", "S", 0.1)] = 5.0,
    json_file: Annotated[
        str | None, json_option("Write the report at the end; - is stdout.")
    ] = None,
    **_: object,
) -> None:
    """Measure what the barrier costs while another system balances; nothing is routed.

    The command receives the state that engines with the plug-in publish, each worker's from its
    snapshots=. A line per group shows the imbalance and the share of the workers' time spent
    waiting for the fullest one. The report at the end covers the whole time.
    """
    settings = given_settings(context, config)
    if not settings.workers:
        example = "--worker http://127.0.0.1:8001,snapshots=tcp://127.0.0.1:5600"
        raise ConfigError(f"no workers: give each one that steps with the others, as in {example}")
    for spec in settings.workers:
        if spec.snapshots is None:
            raise ConfigError(
                f"worker {spec.id} has no snapshots=ENDPOINT: observe knows engines by the state "
                "that the plug-in publishes there"
            )
    out = sys.stderr if json_file == STDOUT else sys.stdout
    report, last_lines = _observe(settings, seconds, every, out)
    write_json(report, json_file)
    for line in last_lines:
        typer.echo(line, file=out)


with_flags(observe, _SETTINGS)


def _observe(
    settings: ServeSettings, seconds: float | None, every_s: float, out: TextIO
) -> tuple[dict[str, Any], list[str]]:
    import uvloop

    from router.http.listening import listen, url
    from router.logs import start_logging
    from router.observe.observer import Observer, group_report

    start_logging(settings.log_level)
    stopped = asyncio.Event()

    def show(group: str, measured: Share) -> None:
        try:
            line = _line(observer.groups[group], measured)
            typer.echo(f"{time.strftime('%H:%M:%S')}  {group}: {line}", file=out)
        except BrokenPipeError:  # the reader of the pipe is gone
            stopped.set()

    async def run(observer: Observer, admin: Any) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        if seconds is not None:
            loop.call_later(seconds, stopped.set)
        await observer.run(stopped, every_s, show, admin)

    with ExitStack() as sockets:
        admin = None
        if settings.admin_port is not None:
            admin = listen(settings.admin_host, settings.admin_port, "--admin-port")
            sockets.enter_context(admin)
            logging.getLogger(__name__).info("status page: %s", url(admin))
        observer = Observer(settings)
        began_s = time.monotonic()
        uvloop.run(run(observer, admin))
    groups = {name: group_report(group) for name, group in observer.groups.items()}
    report = {"seconds": time.monotonic() - began_s, "requests": observer.requests}
    last_lines = []
    for name, group in observer.groups.items():
        line = f"all      {name}: {_line(group, total(group))}"
        if (found := group.fitted) is not None:
            line += (
                f"; a step takes {found.formula} of the slowest, which explains "
                f"{found.explained:.0%} of how it varies"
            )
        last_lines.append(line)
    return {**report, "groups": groups}, last_lines


def _line(group: Group, measured: Share) -> str:
    if measured.steps or group.live_workers():
        return sentence(measured)
    return "no steps; no snapshots arrive: do the engines run, and is snapshots= theirs?"


def sentence(measured: Share) -> str:
    """Format a measurement as one line."""
    if not measured.steps:
        return "no steps"
    loads = (
        f"{measured.steps:,} steps of {1000 * (measured.step_s or 0):.1f} ms, "
        f"load {measured.load_tokens:,.0f} tokens, fullest {measured.max_load_tokens:,.0f}, "
        f"imbalance {measured.imbalance_tokens:,.0f}"
    )
    if measured.barrier is False:
        return (
            f"{loads}; workers do not step together ({measured.together_share:.0%} of the steps by "
            "all that were busy): none waits for another"
        )
    idle = "not known yet (steps together, at loads that differ, tell it)"
    if measured.idle_share is not None:
        source = _SOURCES[measured.idle_share_source]
        idle = f"{measured.idle_share:.1%} of the workers' time, {source}"
    return f"{loads}; waiting for the fullest: {idle}"
