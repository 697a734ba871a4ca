"""``kv_transfer_params`` of requests and answers, as vLLM's NIXL connector (0.32) has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_BLOCK_TOKENS = 16
_SIDE_CHANNEL_PORT = 5600


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """What a request asks for.

    Attributes:
        keeps: its KV is to stay for another engine (``do_remote_decode``).
        fetches: its prompt's KV is elsewhere (``do_remote_prefill``).
        engine_id: where.
        request_id: of the request that it was computed for.
    """

    keeps: bool
    fetches: bool
    engine_id: str
    request_id: str


def read_params(params: Mapping[str, object] | None) -> KvTransfer | None:
    """What a request's ``kv_transfer_params`` ask for, None if nothing."""
    if not params:
        return None
    return KvTransfer(
        keeps=bool(params.get("do_remote_decode")),
        fetches=bool(params.get("do_remote_prefill")),
        engine_id=str(params.get("remote_engine_id")),
        request_id=str(params.get("remote_request_id")),
    )


def kept_params(
    engine_id: str, request_id: str, tokens: int, *, host: str, rank: int
) -> dict[str, object]:
    """What the answer to a request says whose KV was kept.

    The block numbers, host and port only look like an engine's: emulated workers find KV by the ids
    of engine and request.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 1 + math.ceil(tokens / _BLOCK_TOKENS)))],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": _SIDE_CHANNEL_PORT + rank,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
