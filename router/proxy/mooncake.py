"""Location of Mooncake's KV, which bootstrap servers report instead of prefill engines.

For vLLM's ``MooncakeConnector`` (0.32, ``mooncake_connector.py``) both requests share a
``transfer_id``, made by the router. The second also names the bootstrap server and the id of the
engine that computed the prompt; ``GET /query`` there lists these ids by data-parallel rank.
"""

from __future__ import annotations

import asyncio

import msgspec

from router.core.errors import UpstreamError
from router.core.types import WorkerSpec
from router.engines.client import HttpClient

_ANSWER_S = 5.0


class _Entry(msgspec.Struct):
    engine_id: str


_decoder = msgspec.json.Decoder(dict[str, _Entry])


class Bootstraps:
    """Cache of engine ids; a failure clears an entry, since a new engine has a new id."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._ids: dict[str, str] = {}

    def forget(self, worker_id: str) -> None:
        self._ids.pop(worker_id, None)

    async def params(self, worker: WorkerSpec, transfer_id: str) -> bytes:
        """JSON kv_transfer_params of a request whose prompt the worker computes.

        Raises:
            UpstreamError: the bootstrap server does not name the engine.
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
