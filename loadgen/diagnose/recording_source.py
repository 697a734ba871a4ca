"""Recordings from the admin port of a running router or observer."""

import json
from pathlib import Path
from typing import Any

import httpx

from router.core.errors import ConfigError, InputError
from router.recording.lines import Recording, read

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
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--before: {file}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--before: {file} is no JSON ({error!s:.80})") from error
    if not isinstance(found, dict):
        raise InputError(f"--before: {file} is no diagnosis that --json wrote")
    return found
