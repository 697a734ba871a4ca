"""Sources of workers: each tells its full set at first, and after each change.

Workers that were found join the running router, and those that are found no more leave it.
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from router.config.discover_notation import Discover
from router.config.given_files import read_toml
from router.config.worker_notation import parse_workers
from router.core.errors import ConfigError, EvenstepError
from router.core.types import WorkerSpec
from router.kubernetes import Kubernetes, Object

log = logging.getLogger(__name__)

# Resolvers tell no time to live.
_DNS_INTERVAL_S = 5.0
_LWS = "leaderworkerset.sigs.k8s.io"
_DEFAULT_PORT = 8000

Set = Sequence[WorkerSpec]


# What cannot be read changes nothing, and is logged.
Source = AsyncIterator[Set]


async def _endpoint_slices(given: Discover, api: Kubernetes) -> Source:
    """The endpoints of a Service but those that terminate; each port is a rank.

    A Service of two address families has each endpoint twice; one family counts.
    """
    namespace, service = given.where
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    selector = f"kubernetes.io/service-name={service}"
    async for slices in api.follow(path, labelSelector=selector):
        family = min((one.get("addressType", "") for one in slices), default="")
        yield _all(
            lambda place: given.workers(*place),
            {
                (
                    each["addresses"][0],
                    # A port without a number is any.
                    tuple(sorted(p["port"] for p in one.get("ports") or () if p.get("port"))),
                )
                for one in slices
                if one.get("addressType", "") == family
                for each in one.get("endpoints") or ()
                if not (each.get("conditions") or {}).get("terminating")
            },
        )


async def _leader_worker_set(given: Discover, api: Kubernetes) -> Source:
    """The pods of a LeaderWorkerSet: each of its groups is one, and its workers have its ranks."""
    namespace, name = given.where

    def workers(pod: Object) -> Set:
        labels = pod["metadata"]["labels"]
        group, rank = f"{name}-{labels[f'{_LWS}/group-index']}", int(labels[f"{_LWS}/worker-index"])
        return given.workers(pod["status"]["podIP"], [_DEFAULT_PORT], first_rank=rank, group=group)

    path = f"/api/v1/namespaces/{namespace}/pods"
    async for pods in api.follow(path, labelSelector=f"{_LWS}/name={name}"):
        yield _all(workers, filter(_serves, pods))


def _watched_file(path: Path) -> Source:
    """A TOML or JSON file with ``[[workers]]``, read again when it or its folder changes."""
    try:
        from watchfiles import awatch
    except ImportError:
        raise ConfigError(
            "--discover file: needs watchfiles: pip install 'evenstep[discovery]'"
        ) from None
    if not path.parent.is_dir():
        raise ConfigError(f"--discover file:{path}: there is no folder {path.parent}")

    async def sets() -> Source:
        # A file that is replaced is another one, so its folder is watched.
        watch = awatch(path.parent, watch_filter=None, debounce=50, recursive=False)
        last: Set | None = None
        while True:
            change = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)  # it is watched from now on
            try:
                found = _read(path)
            except (OSError, ValueError, EvenstepError) as error:
                log.error("%s: %s; its workers stay", path, error)  # noqa: TRY400
            else:
                if found != last:
                    last = found
                    yield found
            await change

    return sets()


def _read(path: Path) -> Set:
    text: Any
    if path.suffix == ".toml":
        text = read_toml(path)
    else:
        text = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(text, dict) or not isinstance(text.get("workers"), list):
        raise ConfigError("there should be a list of workers")
    return parse_workers(text["workers"])


async def dns(given: Discover, interval_s: float = _DNS_INTERVAL_S) -> Source:
    """All addresses of a name, looked up every five seconds."""
    host, port = given.where
    loop, last = asyncio.get_running_loop(), None
    while True:
        try:
            answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning("%s: %s; its workers stay", host, error)
        else:
            family = min(answer[0] for answer in answers)  # IPv4 before IPv6
            found = sorted({str(answer[4][0]) for answer in answers if answer[0] == family})
            if found != last:
                last = found
                yield _all(lambda ip: given.workers(ip, [int(port)]), found)
        await asyncio.sleep(interval_s)


class Found:
    """The last set of each source.

    ``change`` is called when one has changed; a ConfigError rejects the change.
    """

    def __init__(self, sources: Sequence[Source], change: Callable[[], None]) -> None:
        self._sources = sources
        self._change = change
        self._sets: list[Sequence[WorkerSpec]] = [()] * len(sources)
        self.changes = 0

    @property
    def workers(self) -> list[WorkerSpec]:
        return [spec for found in self._sets for spec in found]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._sources)):
                tasks.create_task(self._follow(number))

    async def _follow(self, number: int) -> None:
        async for found in self._sources[number]:
            before, self._sets[number] = self._sets[number], found
            try:
                self._change()
            except ConfigError as error:
                log.error("the workers stay as they are: %s", error)  # noqa: TRY400 - says it all
                self._sets[number] = before
            self.changes += 1


def source_of(given: Discover, api: Callable[[], Kubernetes]) -> Source:
    """ConfigError: a library or a cluster is missing."""
    match given.kind:
        case "endpointslices":
            return _endpoint_slices(given, api())
        case "lws":
            return _leader_worker_set(given, api())
        case "file":
            return _watched_file(Path(given.where[0]))
        case _:
            return dns(given)


def _serves(pod: Object) -> bool:
    status = pod.get("status") or {}
    ended = status.get("phase") in ("Succeeded", "Failed")
    return bool(status.get("podIP")) and not ended and "deletionTimestamp" not in pod["metadata"]


def _all(workers: Callable[[Any], Set], places: Iterable[Any]) -> Set:
    found: dict[str, WorkerSpec] = {}
    for place in places:
        try:
            found |= {spec.id: spec for spec in workers(place)}
        except (ConfigError, KeyError, ValueError) as error:
            log.error("what was found cannot be a worker: %s", error)  # noqa: TRY400
    return list(found.values())
