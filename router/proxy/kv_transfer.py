"""Split a completion request: one worker computes the prompt (prefill), another decodes.

vLLM's KV connectors define the form (docs/features/disagg_prefill.md there). The first request asks
for one token, which is discarded: the decode engine computes the prompt's last token itself. The
answer's ``kv_transfer_params`` locate the KV for the second.

With ``MooncakeConnector`` (vLLM 0.32, ``mooncake_connector.py``) bootstrap servers report the
location. Both requests share a ``transfer_id`` of the router. The second also names the bootstrap
server and the prefill engine's id; ``GET /query`` there lists the ids by data-parallel rank.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from router.core.errors import UpstreamError
from router.core.types import WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.engines.http_client import HttpClient

_ANSWER_S = 5.0
_MOST_COLONS = 65_536
# Useless for a prefill, or invalid with one token.
_NOT_FIRST = (
    *("stream_options", "min_tokens", "best_of"),
    *("logprobs", "top_logprobs", "logprob_token_ids"),
)

_REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Computed:
    """A prefill worker's answer; ``kv_transfer_params`` as JSON; None: KV is found by content."""

    prompt_tokens: int
    kv_transfer_params: bytes | None


def few_fields(body: bytes) -> bool:
    """Whether it is cheap to parse by field."""
    return body.count(b":") <= _MOST_COLONS


def prefill_body(body: bytes, request_id: str, *, hands_params: bool) -> bytes:
    """``hands_params``: the engine should report the KV's location."""
    fields: dict[str, Any] = {**_fields.decode(body)}  # as raw values
    for name in _NOT_FIRST:
        fields.pop(name, None)
    fields |= {"stream": False, "n": 1, "max_tokens": 1}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if hands_params:
        # Connectors keep KV only if generation stopped at the token limit.
        fields.pop("stop_token_ids", None)
        fields["ignore_eos"] = True
        fields["kv_transfer_params"] = {**_REMOTE, "transfer_id": request_id}
    return msgspec.json.encode(fields)


def decode_body(body: bytes, kv_transfer_params: bytes | None) -> bytes:
    """The client's body with the KV's location first."""
    if kv_transfer_params is None:
        return body
    rest = body.lstrip()[1:].lstrip()
    comma = b"" if rest.startswith(b"}") else b","
    return b'{"kv_transfer_params":' + kv_transfer_params + comma + rest


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Answer(msgspec.Struct):
    usage: _Usage
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)


def read_answer(body: bytes) -> Computed:
    """Raises UpstreamError if a prefill worker's answer is malformed."""
    try:
        answer = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamError(f"the prefill worker's answer cannot be read: {error}") from error
    params = bytes(answer.kv_transfer_params)
    if not params.startswith((b"{", b"null")):
        raise UpstreamError("the prefill worker's answer cannot be read: kv_transfer_params")
    return Computed(answer.usage.prompt_tokens, None if params == b"null" else params)


class _Entry(msgspec.Struct):
    engine_id: str


_engines = msgspec.json.Decoder(dict[str, _Entry])


@dataclass
class Bootstraps:
    """Cache of engine ids; a failure clears an entry: a new engine has a new id."""

    _client: HttpClient
    _ids: dict[str, str] = field(default_factory=dict)

    def forget(self, worker_id: str) -> None:
        self._ids.pop(worker_id, None)

    async def params(self, worker: WorkerSpec, transfer_id: str) -> bytes:
        """The second request's kv_transfer_params.

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
                response = await self._client.request("GET", url, "/query")
                with contextlib.closing(response):
                    body = await response.read()
        except TimeoutError:
            raise UpstreamError(f"{url}/query: no answer within {_ANSWER_S:g} s") from None
        try:
            return _engines.decode(body)[rank].engine_id
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
            raise UpstreamError(f"{url}/query does not tell the engine of rank {rank}") from error


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Transfer of prompts' KV from prefill to decode workers."""

    port: Dispatcher
    kept_s: float | None  # lease on KV handed over by address; None: KV is found by content
    bootstraps: Bootstraps  # locations that engines do not report
    warned: set[str] = field(default_factory=set)  # workers whose missing locations are logged
