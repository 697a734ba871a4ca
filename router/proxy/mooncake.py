"""Where Mooncake's KV lies: its prefill engines do not answer that, their bootstrap servers do.

As vLLM's ``MooncakeConnector`` wants it (0.32, ``mooncake_connector.py``): both requests have one
``transfer_id``, which the router makes; the second also needs the id of the engine that computed
the prompt, as ``GET /query`` of its bootstrap server says by data-parallel rank, and its address.
"""

from __future__ import annotations

import asyncio

import msgspec

from router.engines.upstream import HttpClient
from router.errors import UpstreamError
from router.types import WorkerSpec

_ANSWER_S = 5.0


class _Entry(msgspec.Struct):
    engine_id: str


_decoder = msgspec.json.Decoder(dict[str, _Entry])


class Bootstraps:
    """The engines' ids, asked for once and again after a failure: a new engine has a new one.

    Args:
        client: connections to the bootstrap servers.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._ids: dict[str, str] = {}

    def forget(self, worker_id: str) -> None:
        """Something failed there: it may be another engine now."""
        self._ids.pop(worker_id, None)

    async def params(self, worker: WorkerSpec, transfer_id: str) -> bytes:
        """The kv_transfer_params, as JSON, of a request whose prompt the worker computes.

        Raises:
            UpstreamError: its bootstrap server does not say which engine it is.
        """
        assert worker.kv_bootstrap is not None
        if worker.id not in self._ids:
            self._ids[worker.id] = await self._ask(worker.kv_bootstrap, str(worker.rank or 0))
        return msgspec.json.encode(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self._ids[worker.id],
                "remote_bootstrap_addr": worker.kv_bootstrap,
                "transfer_id": transfer_id,
            }
        )

    async def _ask(self, url: str, rank: str) -> str:
        try:
            async with asyncio.timeout(_ANSWER_S):
                body = await self._get(url)
        except TimeoutError:
            raise UpstreamError(f"{url}/query: no answer within {_ANSWER_S:g} s") from None
        try:
            return _decoder.decode(body)[rank].engine_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
            raise UpstreamError(f"{url}/query does not tell the engine of rank {rank}") from error

    async def _get(self, url: str) -> bytes:
        response = await self._client.request("GET", url, "/query")
        try:
            return await response.read()
        finally:
            response.close()
