"""NVIDIA Dynamo's KV router behind the league's relay, as its selection service serves it.

``python -m dynamo.select_service`` needs neither etcd nor NATS. It reads engines' KV events by ZMQ,
chooses for a request's token ids, and keeps count of the requests that it chose for: of each one
the relay tells it the prompt's end and the request's end, as its own frontend does. Text becomes
the token ids that emulated engines tell in their KV events: with others its index would hit
nothing. Its own default cost, and no option else, is the entrant ``dynamo kv``.

This release links three policies: the default cost, ``dynamo-two-tier-cost-fn`` and
``thunderagent``, which needs sessions told in Dynamo's way and is left out. It has no ``lmetric``.

The service listens on all addresses of the machine: it has no option for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from router.config.worker_notation import parse_workers
from router.engines.http_client import HttpClient
from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.pins import PEERS
from tests.bench.league.prompts import Reader, token_ids
from tests.bench.league.relay import Asked, figures_of, read_json, relaying
from tests.support.router_bench.targets import processes
from tests.support.server import free_port, running, wait_until

TWO_TIER = """\
worker_selection:
  aggregated: two-tier
  instances:
    - name: two-tier
      type: dynamo-two-tier-cost-fn
"""
_JSON = ((b"content-type", b"application/json"),)
_READY_S = 60.0


class _Chooser:
    """Asks the selection service at ``url``, and tells it how requests go on."""

    def __init__(self, url: str, model: str, client: HttpClient) -> None:
        self._url, self._model, self._client = url, model, client
        self._reader = Reader(model)
        self._telling: set[asyncio.Task[None]] = set()
        self._sums = dict.fromkeys(
            ("compared_requests", "prompt_tokens", "foretold_tokens", "cached_tokens", "not_told"),
            0.0,
        )

    async def choose(self, asked: Asked) -> int:
        parsed = self._reader.parsed(asked)
        if parsed is None:
            return 0  # the engine says what is wrong with it
        body = {
            "selection_id": f"{asked.number}",
            "model_name": self._model,
            "token_ids": token_ids(parsed),
        }
        try:
            answered = self._ask("POST", "/select_and_reserve", msgspec.json.encode(body))
            status, answer = await answered
        except asyncio.CancelledError:  # the client is gone: it may be booked by now
            self._tell("DELETE", f"/reservations/{asked.number}", None)
            raise
        if status != 200:
            raise RuntimeError(answer.decode(errors="replace"))
        chosen = msgspec.json.decode(answer)
        asked.own = (None, chosen["overlap"]["gpu"])
        return int(chosen["worker_id"])

    def on_first_token(self, asked: Asked) -> None:
        if asked.own is not None:
            told = self._tell("POST", f"/reservations/{asked.number}/prefill_complete", None)
            asked.own = told, asked.own[1]

    def on_end(self, asked: Asked, whole: bool) -> None:
        if asked.own is None:
            return
        before, foretold = asked.own
        self._tell("DELETE", f"/reservations/{asked.number}", before)
        if usage := asked.usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            self._sums["compared_requests"] += 1
            self._sums["prompt_tokens"] += usage["prompt_tokens"]
            self._sums["foretold_tokens"] += foretold
            self._sums["cached_tokens"] += cached

    def evidence(self) -> Mapping[str, float]:
        prompts = self._sums["prompt_tokens"] or 1.0
        return {
            **self._sums,
            "foretold_share": self._sums["foretold_tokens"] / prompts,
            "cached_share": self._sums["cached_tokens"] / prompts,
        }

    def _tell(
        self, method: str, path: str, before: asyncio.Task[None] | None
    ) -> asyncio.Task[None]:
        async def tell() -> None:
            if before is not None:
                await before
            try:
                status, _ = await self._ask(method, path, b"")
            except Exception:  # noqa: BLE001 - the count says so
                status = 0
            self._sums["not_told"] += status != 200

        task = asyncio.get_running_loop().create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        return task

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        response = await self._client.request(method, self._url, path, _JSON, body)
        try:
            return response.status, await response.read()
        finally:
            response.close()


@contextlib.asynccontextmanager
async def chooser(_: Sequence[str], settings: Mapping[str, Any]) -> AsyncIterator[_Chooser]:
    """A ``MakeChooser``; settings: ``url`` of the selection service, and ``model``."""
    client = HttpClient()
    yield _Chooser(settings["url"], settings["model"], client)
    await client.aclose()


def _register(url: str, engines: Engines) -> None:
    """Engines are workers, in their order, each with the rank that its KV events carry.

    Metrics may say another one. Dynamo books events by the rank that they carry, and finds none of
    them at a worker that was registered with another one.
    """
    ranks = [spec.rank or 0 for spec in parse_workers(engines.workers)]
    told = zip(engines.urls, engines.kv_events, ranks, strict=True)
    with httpx.Client(base_url=url, timeout=30) as service:
        for index, (engine, events, rank) in enumerate(told):
            metrics = service.get(f"{engine}/metrics").text
            worker = {
                "worker_id": index,
                "model_name": engines.model,
                "endpoint": engine,
                "block_size": engines.block_tokens,
                "total_kv_blocks": int(_found(r'num_gpu_blocks="(\d+)"', metrics)),
                "data_parallel_start_rank": rank,
                "data_parallel_size": 1,
                "kv_events_endpoints": {str(rank): f"tcp://127.0.0.1:{events}"},
            }
            service.post("/workers", json=worker).raise_for_status()

        def ready() -> bool:
            told = service.get("/ready").json()
            return bool(told["schedulable_workers"] == len(engines.urls))

        wait_until(ready, _READY_S, "Dynamo may choose all engines")


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"an engine's metrics lack {pattern}")
    return found[1]


def _evidence(relay: str, service: str) -> dict[str, float]:
    """What was foretold beside what engines counted, and what the service holds now."""
    models = read_json(f"{service}/dump").values()
    loads = [load for model in read_json(f"{service}/loads") for load in model["loads"]]
    stored = [
        len(event["event"]["data"]["stored"]["blocks"])
        for model in models
        for event in model["events"]
        if "stored" in event["event"]["data"]
    ]
    return {
        **figures_of(relay),
        "index_blocks": float(sum(stored)),
        "active_requests": float(sum(load["active_requests"] for load in loads)),
    }


@contextlib.contextmanager
def _start(policy: str, predicted_s: float, engines: Engines, folder: Path) -> Iterator[Running]:
    python = PEERS["dynamo"].install() / "bin" / "python"
    port = free_port()
    command = [str(python), "-m", "dynamo.select_service", "--port", str(port)]
    environ = {"DYN_LOG": "warn"}
    if predicted_s:
        lives_s = predicted_s * engines.time_scale
        environ["DYN_ROUTER_PREDICTED_TTL_SECS"] = f"{lives_s:g}"
    if policy:
        file = folder / "dynamo-policy.yaml"
        file.write_text(policy)
        environ["DYN_ROUTER_POLICY_CONFIG"] = str(file)
    with running(command, port, folder / f"dynamo-{port}.log", environ, _READY_S) as service:
        _register(service.url, engines)
        settings = {"url": service.url, "model": engines.model}
        with relaying(engines.urls, folder, f"{__name__}:chooser", settings) as relay:
            yield Running(
                relay.url,
                lambda: processes(service.process.pid),
                lambda: _evidence(relay.url, service.url),
            )


_CODE = tuple(
    f"tests/bench/league/{name}.py" for name in ("dynamo", "relay", "prompts", "numbering")
)
_CANNOT = {
    "faults": "which engines live it hears from Dynamo's own runtime, which does not run here",
}
_BEHIND = "behind the bench's relay, which tells it each prompt's end and each request's end"
ENTRANTS = (
    Entrant(
        "dynamo kv",
        "dynamo",
        "python -m dynamo.select_service",
        "lowest cost: prompt tokens that KV events do not show as cached, those of prompts under "
        f"way, and KV blocks of active requests, all in blocks; {_BEHIND}",
        partial(_start, "", 0.0),
        _CANNOT,
        _CODE,
    ),
    Entrant(
        "dynamo kv predicted",
        "dynamo",
        "DYN_ROUTER_PREDICTED_TTL_SECS=5 engine seconds",
        "the same, and for 5 s a prompt counts as cached where it was sent, as Dynamo's guide has "
        f"it for bursts that begin alike; {_BEHIND}",
        partial(_start, "", 5.0),
        _CANNOT,
        _CODE,
    ),
    Entrant(
        "dynamo two-tier",
        "dynamo",
        "DYN_ROUTER_POLICY_CONFIG: worker_selection type dynamo-two-tier-cost-fn",
        "fewest active requests if the spread exceeds 32 and a tenth; else, if KV events show more "
        f"than half of the prompt as cached, the engine with most of it; {_BEHIND}",
        partial(_start, TWO_TIER, 0.0),
        _CANNOT,
        _CODE,
    ),
)
