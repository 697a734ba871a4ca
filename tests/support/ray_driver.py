"""Ray Serve before engines of a test; Ray's own Python runs it.

A line of JSON on stdin asks for something, and lines on stdout answer it. At the end of stdin all
of Ray ends.
"""

import asyncio
import collections
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from engine_patches.ray_serve.refused import RefusedError

ROUTER = "engine_patches.ray_serve.request_router:EvenstepRouter"
RANK = "x-data-parallel-rank"


class Replica:
    """Sends each request on to the engine that it is told, or to its only one.

    Args:
        engines: addresses of the engines of each replica.
    """

    def __init__(self, engines: list[list[str]]) -> None:
        rank: Any = serve.get_replica_context().rank
        self._engines = engines[getattr(rank, "rank", rank)]
        self._running: collections.Counter[str] = collections.Counter()
        self._most: collections.Counter[str] = collections.Counter()

    def record_replica_metadata(self) -> dict[str, list[str]]:
        return {"evenstep": self._engines}

    async def __call__(
        self, body: dict[str, Any], told: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        headers = _headers(told)
        at = f"{told['host']}:{told['port']}" if told else self._engines[0]
        assert at in self._engines
        rank = "/".join((at, *([headers[RANK]] if RANK in headers else [])))
        self._running[rank] += 1
        self._most[rank] = max(self._most[rank], self._running[rank])
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://{at}/v1/completions", json=body, headers=headers) as answer,
            ):
                if answer.status != 200:
                    raise RuntimeError(
                        f"the engine answered {answer.status}: {await answer.text()}"
                    )
                said = await answer.json()
        finally:
            self._running[rank] -= 1
        text, tokens = said["choices"][0]["text"], said["usage"]["completion_tokens"]
        return {"told": told, "most": self._most, "text": text, "tokens": tokens}

    async def events(self, body: dict[str, Any], told: dict[str, Any]) -> AsyncIterator[str]:
        """The lines of a stream, as they come."""
        url = f"http://{told['host']}:{told['port']}/v1/completions"
        headers = _headers(told)
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={**body, "stream": True}, headers=headers) as answer,
        ):
            async for line in answer.content:
                yield line.decode()

    async def pid(self, _: None) -> int:
        """Its process; what is no completion."""
        return os.getpid()


class Observed(Replica):
    """Names its engines from time to time, as one does whose engines change."""

    record_replica_metadata = None  # type: ignore[assignment]

    def record_routing_stats(self) -> dict[str, Any]:
        return {"evenstep": self._engines[0] if len(self._engines) == 1 else self._engines}


def _headers(told: dict[str, Any] | None) -> dict[str, str]:
    if told is None:
        return {}
    rank = told["data_parallel_rank"]
    return {"x-request-id": told["request_id"], **({} if rank is None else {RANK: str(rank)})}


class Driver:
    """What is asked for, and its answers."""

    def __init__(self) -> None:
        # Ray's own lines go to stderr.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._handles: dict[str, Any] = {}
        self._asked: dict[int, Any] = {}

    def deploy(
        self, app: str, engines: list[list[str]], router: dict[str, Any], most: int, *, stats: bool
    ) -> None:
        """A deployment of one replica for each list of ``engines``."""
        deployment = serve.deployment(
            Observed if stats else Replica,
            name=app,
            num_replicas=len(engines),
            max_ongoing_requests=most,
            ray_actor_options={"num_cpus": 0},
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER,
                request_router_kwargs=router,
                request_routing_stats_period_s=0.1,
            ),
        )
        self._handles[app] = serve.run(deployment.bind(engines), name=app, route_prefix=None)

    async def ask(self, number: int, app: str, body: Any, method: str) -> Any:
        handle = self._handles[app]
        call = handle if method == "remote" else getattr(handle, method)
        if method == "events":
            self._asked[number] = call.options(stream=True).remote(body)
            return [event async for event in self._asked[number]]
        self._asked[number] = call.remote(body)
        return await self._asked[number]

    async def answer(self, order: dict[str, Any]) -> None:
        """Do as told, and say how it went."""
        number, do = order.pop("number"), order.pop("do")
        try:
            if do == "ask":
                result = await self.ask(number, **order)
            elif do == "cancel":
                result = self._asked[order["asked"]].cancel()
            else:
                result = await asyncio.to_thread(self.deploy, **order)
            said = {"result": result}
        except RefusedError as refused:  # as an application knows it
            said = {
                "error": "RefusedError",
                "text": refused.body,
                "status": refused.status,
                "retry_after_s": refused.retry_after_s,
            }
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - for the test to judge
            said = {"error": f"other {type(error).__name__}", "text": str(error)}
        self._out.write(json.dumps({"number": number, **said}) + "\n")

    async def run(self) -> None:
        """Until stdin ends."""
        doing = set()
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = asyncio.create_task(self.answer(json.loads(line)))
            doing.add(task)
            task.add_done_callback(doing.discard)


def main() -> None:
    """Start Ray, run, end it."""
    driver = Driver()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        serve.start(http_options={"location": "NoServer"})
        try:
            asyncio.run(driver.run())
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
