"""Split a completion request: one computes the prompt (prefill), one decodes.

vLLM's KV connectors define the form (docs/features/disagg_prefill.md there). The first request asks
for one token, which is discarded: the decode engine computes the prompt's last token itself. The
answer's ``kv_transfer_params`` locate the KV for the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from router.core.errors import UpstreamError
from router.proxy.json_fields import body_of, fields_of
from router.proxy.raw import ABSENT, Raw, given, start, true

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
    """A prefill worker's answer.

    Attributes:
        prompt_tokens: engine's token count.
        kv_transfer_params: location of the KV, as JSON; None where it is found by content.
    """

    prompt_tokens: int
    kv_transfer_params: bytes | None


class Keys(msgspec.Struct, gc=False):
    """Fields that decide whether a prompt can be computed elsewhere."""

    prompt_logprobs: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    echo: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    prompt_embeds: Raw = ABSENT


def splittable(keys: Keys) -> bool:
    """Whether a request's only prompt can be computed elsewhere."""
    # vLLM fetches no KV if a prompt's log-probabilities are requested, even 0 of them. A client
    # that sends kv_transfer_params addresses the connector itself, and its null would override
    # ours, which comes first.
    own = given(keys.prompt_logprobs) or start(keys.kv_transfer_params)
    # Here the answer includes the prompt, or the prompt is no text, or the number of answers is
    # unknown.
    whole = any(map(true, (keys.echo, keys.use_beam_search, keys.prompt_embeds)))
    return not (own or whole)


def few_fields(body: bytes) -> bool:
    """Whether a body is cheap to parse by field: each has a colon."""
    return body.count(b":") <= _MOST_COLONS


def prefill_body(body: bytes, request_id: str, *, hands_params: bool) -> bytes:
    """The prefill request: the prompt and one token.

    ``hands_params`` says whether the engine should report the KV's location.
    """
    fields = fields_of(body)
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
    return body_of(fields)


def decode_body(body: bytes, kv_transfer_params: bytes | None) -> bytes:
    """The client's body with the KV's location as its first field."""
    if kv_transfer_params is None:
        return body
    rest = body.lstrip()[1:].lstrip()
    comma = b"" if rest.startswith(b"}") else b","
    return b'{"kv_transfer_params":' + kv_transfer_params + comma + rest


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Answer(msgspec.Struct):
    usage: _Usage
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)


def read_answer(body: bytes) -> Computed:
    """Read a prefill worker's answer.

    Raises:
        UpstreamError: it is malformed.
    """
    try:
        answer = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamError(f"the prefill worker's answer cannot be read: {error}") from error
    params = bytes(answer.kv_transfer_params)
    if not params.startswith((b"{", b"null")):
        raise UpstreamError("the prefill worker's answer cannot be read: kv_transfer_params")
    return Computed(answer.usage.prompt_tokens, None if params == b"null" else params)
