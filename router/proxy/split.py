"""A completion request in two: one that computes its prompt, one that decodes.

As vLLM's KV connectors want it (docs/features/disagg_prefill.md there): the first asks for one
token, which is thrown away, since the engine that decodes computes the prompt's last token itself;
its answer says in ``kv_transfer_params`` where the KV lies, and the second hands that on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from router.errors import UpstreamError
from router.proxy.bodies import body_of, fields_of
from router.proxy.raw import ABSENT, Raw, given, start, true

_MOST_COLONS = 65_536
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


class Keys(msgspec.Struct, gc=False):
    """Fields of a body that say whether its prompt can be computed elsewhere."""

    prompt_logprobs: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    echo: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    prompt_embeds: Raw = ABSENT


def splittable(keys: Keys) -> bool:
    """Whether the only prompt of a request can be computed elsewhere."""
    # vLLM takes no KV from elsewhere when a prompt's log-probabilities are asked for, if only (0)
    # of its own tokens. Who gives the parameters speaks to the connector itself; and a null would
    # win over what is put before it.
    own = given(keys.prompt_logprobs) or start(keys.kv_transfer_params)
    # With one of these the prompt itself is part of the answer, or is no text, or nothing is known
    # of how many answers there are.
    whole = any(map(true, (keys.echo, keys.use_beam_search, keys.prompt_embeds)))
    return not (own or whole)


def few_fields(body: bytes) -> bool:
    """Whether each field may be taken by itself; there is a colon in each, at least."""
    return body.count(b":") <= _MOST_COLONS


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
