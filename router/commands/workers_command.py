"""``evenstep workers``: lists and changes a running router's workers by its admin port."""

import contextlib
import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.access.key_files import first_key
from router.commands.json_output import STDOUT, json_option, write_json
from router.commands.options import flag
from router.core.errors import ConfigError, InputError

_TIMEOUT_S = 10.0
_LONGEST_S = 3600.0
# Width of a line, so wide that the table is never truncated: the terminal wraps it.
_WIDEST = 10_000

URL_VARIABLE, KEY_VARIABLE = "EVENSTEP_ADMIN_URL", "EVENSTEP_ADMIN_KEY"

Url = Annotated[
    str,
    typer.Option(
        "--url", metavar="URL", envvar=URL_VARIABLE, help="URL of the router's admin port."
    ),
]
KeyFile = Annotated[
    Path | None,
    flag(
        f"File with a key of the router's --admin-key-file; unset: {KEY_VARIABLE} is the key.",
        "FILE",
    ),
]
JsonFile = Annotated[str | None, json_option("Write the router's answer; - is stdout.")]
WorkerId = Annotated[str, typer.Argument(metavar="ID", help="The worker's id, as list shows it.")]
Wait = Annotated[
    float,
    flag("Longest wait until no request is left on the worker.", "S", least=0, most=_LONGEST_S),
]


def list_workers(url: Url, key_file: KeyFile = None, json_file: JsonFile = None) -> None:
    """List the workers and their states."""
    _show(_ask("GET", url, "", key_file), json_file)


def add(
    spec: Annotated[
        str, typer.Argument(metavar="SPEC", help="URL[,key=value]..., as in --worker.")
    ],
    url: Url,
    key_file: KeyFile = None,
    json_file: JsonFile = None,
) -> None:
    """Add a worker; it gets requests once it has answered a health check."""
    added = _ask("POST", url, "", key_file, content=spec)
    _show({"workers": [added]}, json_file)


def remove(
    worker_id: WorkerId,
    url: Url,
    drain: Annotated[
        bool, flag("First let the worker end the requests that it has.", name="--drain")
    ] = False,
    force: Annotated[
        bool, flag("End its requests now: unanswered ones begin again elsewhere.", name="--force")
    ] = False,
    wait: Wait = 0.0,
    key_file: KeyFile = None,
    json_file: JsonFile = None,
) -> None:
    """Remove a worker, and all workers in lockstep with it."""
    how = {"drain": drain, "force": force, "wait_s": wait}
    answer = _ask("DELETE", url, f"/{quote(worker_id, safe='')}", key_file, wait, params=how)
    _show(answer, json_file)


def drain(
    worker_id: WorkerId,
    url: Url,
    wait: Wait = 0.0,
    key_file: KeyFile = None,
    json_file: JsonFile = None,
) -> None:
    """Send no new requests to a worker, nor to the workers in lockstep with it."""
    path = f"/{quote(worker_id, safe='')}/drain"
    _show(_ask("POST", url, path, key_file, wait, params={"wait_s": wait}), json_file)


def undrain(
    worker_id: WorkerId, url: Url, key_file: KeyFile = None, json_file: JsonFile = None
) -> None:
    """Send requests to a drained worker again."""
    _show(_ask("POST", url, f"/{quote(worker_id, safe='')}/undrain", key_file), json_file)


def _ask(
    method: str,
    url: str,
    path: str,
    key_file: Path | None,
    wait_s: float = 0.0,
    content: str | None = None,
    params: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    address = f"{url.rstrip('/')}/workers{path}"
    key = os.environ.get(KEY_VARIABLE) if key_file is None else first_key(str(key_file))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    connection, target = _connection(url, address, _TIMEOUT_S + wait_s)
    # http.client would send text as Latin-1.
    sent = None if content is None else content.encode()
    with contextlib.closing(connection):
        try:
            query = "" if params is None else f"?{urlencode(params)}"
            connection.request(method, target + query, sent, headers)
            answer = connection.getresponse()
            status, body = answer.status, answer.read()
        except ValueError:
            raise ConfigError(
                f"the key (--key-file or {KEY_VARIABLE}) has a line end or a character that a "
                "header cannot hold; give it as it stands in the router's --admin-key-file"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"--url: nothing answers at {address} ({error})") from None
    try:
        parsed = json.loads(body)
        if 200 <= status < 300:
            return dict(parsed)
        reason = parsed["error"]["message"]
    except (ValueError, TypeError, KeyError):
        reason = None
    if reason is None or (status == 404 and path == ""):
        raise ConfigError(
            f"--url: {address} is no admin port of a router (it answers {status}); give the "
            "address of the router's --admin-port"
        )
    raise InputError(reason)


def _connection(url: str, address: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    # Python's own client, because others take long to import.
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        parts = urlsplit(address)
        if not parts.hostname:
            raise ValueError
        return kinds[parts.scheme](parts.hostname, parts.port, timeout=timeout_s), parts.path
    except (ValueError, KeyError, http.client.InvalidURL):
        raise ConfigError(f"--url: {url} is no URL; write http://HOST:PORT") from None


def _show(answer: Mapping[str, Any], json_file: str | None) -> None:
    write_json(answer, json_file)
    if json_file == STDOUT:
        return
    columns = ("worker", "group", "requests", "slots", "1/s of a slot", "URL", "state")
    table = Table(*columns, box=None, pad_edge=False)
    for worker in answer["workers"]:
        state = f"{worker['state']}: {worker['reason']}" if worker["reason"] else worker["state"]
        rate = worker["estimated_service_rate"]
        cells = (
            worker["id"],
            worker["group"],
            str(worker["requests"]),
            "-" if worker["slots"] is None else str(worker["slots"]),
            "-" if rate is None else f"{rate:.3g}",
            worker["url"],
            state,
        )
        table.add_row(*map(Text, cells))
    console = Console(highlight=False, width=_WIDEST)
    if answer["workers"]:
        console.print(table)
    for worker_id in answer.get("removed", ()):
        console.print(f"{worker_id} has been removed", markup=False)
