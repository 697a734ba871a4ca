"""``evenstep diagnose``: does balancing matter on this cluster?"""

import math
from pathlib import Path
from typing import Annotated, Any

import httpx
from rich.console import Console

from loadgen.diagnose.analysis.before_after import compare
from loadgen.diagnose.analysis.window import Span, window_of
from loadgen.diagnose.diagnosis import diagnose_window, report
from loadgen.diagnose.diagnosis_table import diagnosis_table
from loadgen.replay.workload import checked_time_scale
from loadgen.report.origin import KEY, Engines, origin
from loadgen.run.options import chosen
from loadgen.traces.recordings import load_recording
from router.access.key_files import first_key
from router.commands.json_output import STDOUT, json_option, write_json
from router.commands.options import flag
from router.config.given_files import read_json
from router.core.errors import ConfigError, InputError
from router.core.policies.policy_table import POLICIES
from router.recording.lines import Recording, read

CODE = ("loadgen/diagnose", "loadgen/simulator/decode", "router/core")
_MINUTE_S = 60.0
_LONGEST_S = 3600.0


def diagnose(
    url: Annotated[str | None, flag("Admin port of evenstep serve or observe.", "URL")] = None,
    key_file: Annotated[str | None, flag("With the key that the admin port wants.", "FILE")] = None,
    recording: Annotated[Path | None, flag("In its place: what --record wrote.", "FILE")] = None,
    seconds: Annotated[float | None, flag("How long [60; of a file: all of it].", "S")] = None,
    start: Annotated[float, flag("Of a file: seconds left out first.", "S")] = 0.0,
    group: Annotated[str | None, flag("Which group [the busiest].", "NAME")] = None,
    price: Annotated[float | None, flag("Of a kWh, in any currency.", "P")] = None,
    before: Annotated[
        Path | None, flag("--json of before a switch: prediction and measurement.", "FILE")
    ] = None,
    policies: Annotated[
        str | None, flag("To simulate, beside the one in force [all].", "NAME,…")
    ] = None,
    time_scale: Annotated[float, flag("Wall per engine second, as in emulate.", "X")] = 1.0,
    seed: Annotated[int, flag("Of the simulations.", "N", least=0)] = 0,
    json_file: Annotated[str | None, json_option("Write the diagnosis; - is stdout.")] = None,
) -> None:
    """Say whether balancing matters on a cluster, what it would win, or why it would not.

    Listens to a running router or observer, or reads a recording. Nothing is changed.
    """
    span = _span(url, seconds, start, time_scale)
    _checked("--price", price, least=0.0)
    simulated = list(POLICIES)
    if policies is not None:
        simulated = chosen("--policies", "policy", policies, POLICIES)
    earlier = None if before is None else earlier_report(before)
    if url is not None and recording is None:
        assert span.listened_s is not None
        note = f"Listening to {url} for {span.listened_s:g} s, then simulating."
        Console(stderr=True).print(note, highlight=False)
        key = None if key_file is None else first_key(key_file)
        source = recording_from(url, span.listened_s, key)
    elif recording is not None and url is None:
        source = load_recording(recording)
    else:
        raise ConfigError("give --url of an admin port, or --recording of a file: one of them")
    diagnosis = diagnose_window(window_of(source, span, group), price, simulated, seed)
    compared = None
    if earlier is not None:
        window = diagnosis.window
        in_force = None
        if window.policy is not None and window.dispatch is not None:
            in_force = window.policy, window.dispatch.value
        compared = compare(earlier, diagnosis.found, in_force, str(before))
    Console(stderr=json_file == STDOUT).print(diagnosis_table(diagnosis, compared))
    if json_file is not None:
        write_json({KEY: origin(Engines.UNKNOWN, CODE), **report(diagnosis, compared)}, json_file)


def _span(url: str | None, seconds: float | None, start_s: float, time_scale: float) -> Span:
    _checked("--seconds", seconds, least=1.0)
    _checked("--start", start_s, least=0.0)
    checked_time_scale(time_scale)
    if url is None:
        return Span(start_s, math.inf if seconds is None else seconds, time_scale)
    if start_s:
        raise ConfigError("--start is of a file: leave it out with --url")
    listened_s = _MINUTE_S if seconds is None else seconds
    if listened_s > _LONGEST_S:
        raise ConfigError(f"--seconds: {listened_s:g} is more than an hour; record to a file")
    return Span(0.0, math.inf, time_scale, listened_s)


def _checked(option: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:
        raise ConfigError(f"{option} must be a number from {least:g} up, got {value:g}")


_CONNECT_S = 5.0
# The stream is silent while nothing happens.
_GRACE_S = 30.0


def recording_from(url: str, seconds: float, key: str | None = None) -> Recording:
    """Record the stream of a router or an observer.

    ConfigError: nothing listens there, or it is no admin port. InputError: it is no recording.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} is no URL; write http://HOST:PORT of an admin port")
    address = f"{url.rstrip('/')}/recording"
    try:
        timeout = httpx.Timeout(seconds + _GRACE_S, connect=_CONNECT_S)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        asked = {"seconds": f"{seconds:g}"}
        with httpx.stream("GET", address, params=asked, headers=headers, timeout=timeout) as answer:
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                raise ConfigError(f"--url: {address} wants a key: give --key-file")
            if answer.status_code != httpx.codes.OK:
                raise ConfigError(
                    f"--url: {address} answers {answer.status_code}; give the admin port of "
                    "evenstep serve or observe (--admin-port)"
                )
            lines = b"".join(answer.iter_bytes()).splitlines(keepends=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"--url: {address}: {error or type(error).__name__}; start evenstep serve or observe "
            "with --admin-port there, or correct the URL"
        ) from error
    return read(lines, address)


def earlier_report(file: Path) -> dict[str, Any]:
    """An earlier diagnosis; InputError: there is no such file, or it is no JSON object."""
    found = read_json(file, "--before: ")
    if not isinstance(found, dict):
        raise InputError(f"--before: {file} is no diagnosis that --json wrote")
    return found
