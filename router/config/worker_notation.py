"""Workers in the user's notation: ``URL[,key=value]...`` on a command line, tables in TOML."""

import difflib
import re
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from router.core.errors import ConfigError, SnapshotError
from router.core.types import Role, WorkerSpec, prefill_stage
from router.core.wire import full_endpoint, is_local
from router.core.worker_specs import check_url, check_workers, default_worker_id
from router.engines.curve_keys import read_public_key

_LONGEST_NAME = 1024


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    id: str | None = Field(default=None, min_length=1)
    group: str = Field(default="default", min_length=1)
    role: Role = "both"
    rank: int | None = Field(default=None, ge=0, le=65_535)
    slots: int | None = Field(default=None, ge=1, le=1_000_000)
    snapshots: str | None = None
    kv_events: str | None = None
    kv_replay: str | None = None
    server_key: str | None = None
    kv_bootstrap: str | None = None
    power: str | None = None
    service_rate: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)


def parse_worker(entry: object) -> WorkerSpec:
    """Parse a ``URL[,key=value]...`` text, a table, or a spec; a ConfigError says what is wrong."""
    if isinstance(entry, WorkerSpec):
        return entry
    if isinstance(entry, str):
        url, *items = (part.strip() for part in entry.split(","))
        table: dict[str, object] = {"url": url}
        for item in items:
            key, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(f"worker {entry!r}: {item!r} is not key=value")
            if key in table:
                raise ConfigError(f"worker {entry!r}: {key} is given twice")
            table[key] = value
        return _parse(entry, table)
    if isinstance(entry, Mapping):
        return _parse(f"table {entry.get('url', '')!s}".rstrip(), entry)
    raise ConfigError(f"worker {entry!r} should be URL[,key=value]... or a table with a url")


def parse_workers(entries: Iterable[object]) -> tuple[WorkerSpec, ...]:
    """Parse several workers; ConfigError: one is invalid, or two share an id or endpoint."""
    specs = tuple(parse_worker(entry) for entry in entries)
    check_workers(specs)
    return specs


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A message about an unknown name that suggests the nearest known one."""
    choices = {choice.lower(): choice for choice in sorted(known)}
    near = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.5)
    hint = f"did you mean {choices[near[0]]}?" if near else f"known: {', '.join(choices.values())}"
    return f"unknown {what} {name!r}; {hint}"


def complaint(error: ErrorDetails) -> str:
    """Pydantic's message without its subject, to complete a sentence."""
    return re.sub(r"^(Value error,|Input|String|Field) ", "", error["msg"])


def _parse(name: str, entry: Mapping[str, object]) -> WorkerSpec:
    for key in entry:
        if key not in _Table.model_fields:
            raise ConfigError(f"worker {name}: {unknown('key', str(key), _Table.model_fields)}")
    try:
        table = _Table(**dict(entry))  # type: ignore[arg-type]
        return _spec(table)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        given = " is" if error["type"] == "missing" else f" = {error['input']!r}"
        raise ConfigError(f"worker {name}: {error['loc'][0]}{given} {complaint(error)}") from None
    except (ConfigError, SnapshotError) as wrong:
        raise ConfigError(f"worker {name}: {wrong}") from None


def _spec(table: _Table) -> WorkerSpec:
    for name, text in (("url", table.url), ("id", table.id), ("group", table.group)):
        if text is not None and not (text.isprintable() and len(text) <= _LONGEST_NAME):
            raise ConfigError(
                f"{name} {text[:_LONGEST_NAME]!r} should have at most {_LONGEST_NAME} characters, "
                "all of them printable"
            )
    if table.group.endswith(prefill_stage("")):
        raise ConfigError(f"group {table.group!r}: a name that ends so means prefill workers")
    _check_endpoints(table)
    if table.kv_bootstrap is not None:
        if table.role != "prefill":
            raise ConfigError("kv_bootstrap is for a worker with role=prefill")
        check_url(table.kv_bootstrap)
    known = {
        **dict(table),
        "id": table.id or default_worker_id(table.url, table.rank),
        "url": table.url.rstrip("/"),
        "server_key": None if table.server_key is None else read_public_key(table.server_key),
        "kv_bootstrap": table.kv_bootstrap and table.kv_bootstrap.rstrip("/"),
    }
    return WorkerSpec(**known)


def _check_endpoints(table: _Table) -> None:
    for name in ("snapshots", "power", "kv_events", "kv_replay"):
        endpoint = getattr(table, name)
        if endpoint is None:
            continue
        if not re.match(r"tcp://[\w.:%\[\]-]+:\d+$|ipc://.", endpoint):
            raise ConfigError(f"{name} {endpoint!r} should be tcp://HOST:PORT or ipc://PATH")
        if name.startswith("kv_"):  # vLLM has no keys for them
            if endpoint.startswith("tcp:") and not 0 < int(endpoint.rpartition(":")[2]) < 65536:
                raise ConfigError(f"{name} {endpoint!r} needs a port from 1 to 65535")
            continue
        full_endpoint(endpoint)
        if table.server_key is None and not is_local(endpoint):
            raise ConfigError(
                f"{name} {endpoint} can be read and forged by other machines: give server_key=, "
                "the engine's public CURVE key, and --secret-key-file; or use an endpoint on "
                "127.0.0.1"
            )
    if table.kv_events is not None and table.snapshots is not None:
        raise ConfigError("kv_events is for engines without the plug-in: leave it or snapshots out")
    if table.kv_replay is not None and table.kv_events is None:
        raise ConfigError("kv_replay repeats what kv_events tells: give both")
    if table.kv_replay is not None and table.kv_replay == table.kv_events:
        raise ConfigError("kv_replay is another endpoint than kv_events: vLLM's replay_endpoint")
