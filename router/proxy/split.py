"""A completion request in two: one that computes its prompt, one that decodes.

As vLLM's KV connectors want it (docs/features/disagg_prefill.md there): the first asks for one
token, which is thrown away, since the engine that decodes computes the prompt's last token itself;
its answer says in ``kv_transfer_params`` where the KV lies, and the second hands that on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from router.errors import UpstreamError
from router.proxy.bodies import body_of, fields_of

# With one of these the prompt itself is part of the answer, or is no text, or nothing is known of
# how many answers there are.
_WHOLE = ("echo", "use_beam_search", "prompt_embeds")
# Of no use to the first, or not to be had with one token.
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
    """What a prefill worker has answered.

    Attributes:
        prompt_tokens: as its engine has counted them.
        kv_transfer_params: where the KV lies, as JSON; None where it is found by its content.
    """

    prompt_tokens: int
    kv_transfer_params: bytes | None


def splittable(fields: Mapping[str, Any]) -> bool:
    """Whether a request's prompt can be computed elsewhere; ``fields`` is the body's object."""
    match fields.get("prompt"):
        case [str() | list(), _, *_]:  # several prompts
            return False
    # vLLM takes no KV from elsewhere when a prompt's log-probabilities are asked for, if only (0)
    # of its own tokens. Who gives the parameters speaks to the connector itself; and a null would
    # win over what is put before it.
    own = fields.get("prompt_logprobs") is not None or "kv_transfer_params" in fields
    return not (own or any(fields.get(name) for name in _WHOLE))


def prefill_body(body: bytes, request_id: str, *, hands_params: bool) -> bytes:
    """The body that has the prompt computed, and one token.

    Args:
        body: the client's, a JSON object.
        request_id: the router's own token.
        hands_params: whether the engine is to say where the KV lies.
    """
    fields = fields_of(body)
    for name in _NOT_FIRST:
        fields.pop(name, None)
    fields |= {"stream": False, "n": 1, "max_tokens": 1}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if hands_params:
        # Connectors keep the KV of what was cut at its one token, not of what has ended with it.
        fields.pop("stop_token_ids", None)
        fields["ignore_eos"] = True
        fields["kv_transfer_params"] = {**_REMOTE, "transfer_id": request_id}
    return body_of(fields)


def decode_body(body: bytes, kv_transfer_params: bytes | None) -> bytes:
    """The client's body, the place of the KV before everything else that it says."""
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
        UpstreamError: it is not what an engine answers.
    """
    try:
        answer = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamError(f"the prefill worker's answer cannot be read: {error}") from error
    params = bytes(answer.kv_transfer_params)
    if not params.startswith((b"{", b"null")):
        raise UpstreamError("the prefill worker's answer cannot be read: kv_transfer_params")
    return Computed(answer.usage.prompt_tokens, None if params == b"null" else params)
