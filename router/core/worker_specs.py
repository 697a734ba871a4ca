"""Checks on a set of workers, and their default ids."""

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from router.core.errors import ConfigError
from router.core.types import WorkerSpec

_PORTS = {"http": 80, "https": 443}


def check_workers(specs: Sequence[WorkerSpec]) -> None:
    """Check that ids, engines and snapshot endpoints differ, and that each group can decode.

    Raises:
        ConfigError: two share one of these, or a group has prefill workers alone.
    """
    by_id: dict[str, WorkerSpec] = {}
    by_endpoint: dict[str, WorkerSpec] = {}
    by_url: dict[str, dict[int | None, WorkerSpec]] = {}
    for spec in specs:
        if spec.id in by_id:
            raise ConfigError(f"two workers are called {spec.id!r}: give each a rank= or an id=")
        by_id[spec.id] = spec
        ranks = by_url.setdefault(spec.url, {})
        if ranks and (spec.rank in ranks or None in (spec.rank, *ranks)):
            other = ranks.get(spec.rank) or next(iter(ranks.values()))
            raise ConfigError(
                f"workers {other.id!r} and {spec.id!r} are one engine, {spec.url}: if it has "
                "several ranks, give each worker another rank=; else leave one out"
            )
        ranks[spec.rank] = spec
        for name, endpoint in (
            *(("snapshot", spec.snapshots), ("kv_events", spec.kv_events)),
            ("kv_replay", spec.kv_replay),
        ):
            if endpoint is None:
                continue
            if (other := by_endpoint.setdefault(endpoint, spec)) is not spec:
                raise ConfigError(
                    f"workers {other.id!r} and {spec.id!r} have one {name} endpoint, "
                    f"{endpoint}: each worker publishes on its own"
                )
    _check_roles(specs)


def _check_roles(specs: Iterable[WorkerSpec]) -> None:
    stages = {spec.stage for spec in specs}
    for spec in specs:
        if spec.group not in stages:
            raise ConfigError(
                f"group {spec.group!r} has prefill workers alone: at least one worker without "
                "role=prefill should decode"
            )


def default_worker_id(url: str, rank: int | None) -> str:
    """Id of a worker that is configured without one."""
    address = check_url(url)
    return address if rank is None else f"{address}#{rank}"


def authority(host: str, port: int) -> str:
    """HOST:PORT as in a URL, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_url(url: str) -> str:
    """Check an engine's URL, and return its host and port.

    Raises:
        ConfigError: it is no URL of an engine.
    """
    try:
        parts = urlsplit(url)
        default = _PORTS[parts.scheme]
        port = default if parts.port is None else parts.port
    except (KeyError, ValueError):
        port = 0
    if port == 0 or not parts.hostname:
        raise ConfigError(f"url {url!r} should look like http://HOST:PORT")
    if not url.isascii() or " " in url:
        raise ConfigError(f"url {url!r} should be ASCII without spaces: write a name as xn--…")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"url {url!r} should have no user, query or fragment")
    return authority(parts.hostname, port)
