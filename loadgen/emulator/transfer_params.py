"""``kv_transfer_params`` of requests and answers, as in vLLM's NIXL connector (0.32)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

_BLOCK_TOKENS = 16
_SIDE_CHANNEL_PORT = 5600


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """KV transfer that a request asks for."""

    keeps: bool  # whether its KV stays for another engine (``do_remote_decode``)
    fetches: bool  # whether its prompt's KV is on another engine (``do_remote_prefill``)
    engine_id: str  # id of that engine
    request_id: str  # id of the request that the KV was computed for


def read_params(params: Mapping[str, object] | None) -> KvTransfer | None:
    """Parse a request's ``kv_transfer_params``; None: no transfer."""
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
    """``kv_transfer_params`` of an answer whose KV was kept.

    Block numbers, host and port are made up: emulated workers find KV by engine and request.
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
