"""A Kubernetes API that keeps objects of any kind in memory: enough for Leases and watches."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from copy import deepcopy
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Object = dict[str, Any]


class KubeApi:
    """Objects by collection and name; versions count all changes.

    Attributes:
        slow_s: added to each answer.
        cut: whether no answer comes any more, and open watches are silent.
        open_watches: number of them.
        refuse: whether it answers 500; ``refused``: how often it has.
        lists: how often a whole collection was read.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {}
        self.slow_s = 0.0
        self.lists = self.refused = 0
        self.refuse = False
        self.open_watches = 0
        self._version = 1
        self._oldest = 0
        self._events: list[tuple[int, str, str, Object]] = []
        self._changed = asyncio.Condition()
        self._whole = asyncio.Event()
        self._whole.set()
        self._closing = 0
        self.app = Starlette(routes=[Route("/{path:path}", self._serve, methods=list(_METHODS))])

    @property
    def cut(self) -> bool:
        return not self._whole.is_set()

    @cut.setter
    def cut(self, cut: bool) -> None:
        (self._whole.clear if cut else self._whole.set)()

    async def put(self, collection: str, name: str, content: Object, kind: str = "") -> Object:
        """Add or replace, as a controller does."""
        known = self.objects.setdefault(collection, {})
        kind = kind or ("MODIFIED" if name in known else "ADDED")
        self._version += 1
        metadata = {**content.get("metadata", {}), "name": name}
        stored = {**deepcopy(content), "metadata": metadata}
        metadata["resourceVersion"] = str(self._version)
        known[name] = stored
        if kind == "DELETED":
            del known[name]
        self._events.append((self._version, kind, collection, stored))
        async with self._changed:
            self._changed.notify_all()
        return stored

    async def delete(self, collection: str, name: str) -> None:
        await self.put(collection, name, self.objects[collection][name], "DELETED")

    async def forget(self) -> None:
        """Drop the history, and end all watches: they get 410 Gone when they ask again."""
        self._oldest, self._closing = self._version, self._closing + 1
        self._version += 1
        self._events.clear()
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, request: Request) -> Response:
        await asyncio.sleep(self.slow_s)
        await self._whole.wait()
        if self.refuse:
            self.refused += 1
            return _status(500, "not now")
        path = "/" + request.path_params["path"]
        collection, _, name = path.rpartition("/")
        query = request.query_params
        if request.method == "POST":
            body = await request.json()
            name = body["metadata"]["name"]
            if name in self.objects.get(path, {}):
                return _status(409, "it exists")
            return JSONResponse(await self.put(path, name, body), 201)
        if name in self.objects.get(collection, {}):
            return await self._one(request, collection, name)
        if path.count("/") > 6 or request.method != "GET":
            return _status(404, f"{path} not found")
        if query.get("watch"):
            if int(query["resourceVersion"]) < self._oldest:
                return _status(410, "too old resource version")
            return StreamingResponse(self._watch(path, int(query["resourceVersion"]), query))
        self.lists += 1
        items = [each for each in self.objects.get(path, {}).values() if _selected(each, query)]
        return JSONResponse({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _one(self, request: Request, collection: str, name: str) -> Response:
        if request.method == "GET":
            return JSONResponse(self.objects[collection][name])
        body = await request.json()
        # Not before: another one may have written while the body came.
        kept = self.objects[collection][name]
        if body["metadata"].get("resourceVersion") != kept["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        return JSONResponse(await self.put(collection, name, body))

    def _news(self, path: str, since: int, closing: int) -> bool:
        later = (each[0] > since and each[2] == path for each in self._events)
        return closing != self._closing or any(later)

    async def _watch(self, path: str, since: int, query: Any) -> AsyncIterator[str]:
        closing = self._closing
        self.open_watches += 1
        try:
            while True:
                for version, kind, collection, stored in list(self._events):
                    if version > since and collection == path and _selected(stored, query):
                        await self._whole.wait()
                        yield json.dumps({"type": kind, "object": stored}) + "\n"
                        since = version
                if closing != self._closing:
                    gone = {"kind": "Status", "code": 410, "message": "too old"}
                    yield json.dumps({"type": "ERROR", "object": gone}) + "\n"
                    return
                async with self._changed:
                    await self._changed.wait_for(partial(self._news, path, since, closing))
        finally:
            self.open_watches -= 1


_METHODS = ("GET", "POST", "PUT")


def _selected(stored: Object, query: Any) -> bool:
    labels = stored["metadata"].get("labels", {})
    wanted = [pair.partition("=") for pair in query.get("labelSelector", "").split(",") if pair]
    return all(labels.get(key) == value for key, _, value in wanted)


def _status(code: int, message: str) -> Response:
    return JSONResponse({"kind": "Status", "code": code, "message": message}, code)


@contextlib.asynccontextmanager
async def serving_kube_api() -> AsyncIterator[tuple[KubeApi, str]]:
    """The API on a port of this machine, and its URL."""
    api = KubeApi()
    config = uvicorn.Config(api.app, port=0, log_level="warning", lifespan="off", ws="none")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn sends no event
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield api, f"http://127.0.0.1:{port}"
    finally:
        api.cut = False
        await api.forget()
        server.should_exit = True
        await serving
