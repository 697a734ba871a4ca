"""Parse the body of a completion request into a generation; as strict as vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from engine_patches.plugin.compat_admission import PREDICTED_KEY
from loadgen.emulator.prompt_content import Content, whole_tokens
from loadgen.emulator.text import (
    CHARS_PER_TOKEN,
    TOKENS_PER_MESSAGE,
    OutputPlan,
    drawn_output_tokens,
    estimate_text_tokens,
    plan_output,
    prompt_key,
)
from loadgen.emulator.transfer_params import KvTransfer, read_params

COMPLETION_MAX_TOKENS = 16
MOST_CHOICES = 16384  # vLLM's VLLM_MAX_N_SEQUENCES
HIDDEN_LENGTH = "evenstep_output_tokens"
_HEAD_CHARS = TOKENS_PER_MESSAGE * CHARS_PER_TOKEN


class RejectedError(Exception):
    """A request that vLLM would reject."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True, slots=True)
class Limits:
    """What one emulated engine serves."""

    model: str
    max_model_len: int
    seed: int
    adapters: frozenset[str] = frozenset()  # further model names
    block_tokens: int = 0  # size of the blocks that prompts are identified by; 0: they are not

    def check(self, model: str | None) -> None:
        """Check that a model is served."""
        if model not in (None, "", self.model) and model not in self.adapters:
            raise RejectedError(f"The model `{model}` does not exist.", "model", 404)


@dataclass(frozen=True, slots=True)
class Generation:
    """A parsed request."""

    chat: bool
    prompt_tokens: tuple[int, ...]
    n: int
    # Plan of each output, ``n`` per prompt, in the order of the choices.
    plans: tuple[OutputPlan, ...]
    caps: tuple[int, ...]  # upper bound on output tokens, per prompt
    predicted_tokens: int | None  # output length that the client predicts
    priority: int
    stream: bool
    include_usage: bool
    kv_transfer: KvTransfer | None = None  # whether its KV is kept, or where it is fetched
    form: Literal["plain", "message", "response"] = "plain"
    name: str | None = None  # request id from the body, where the endpoint accepts one
    contents: tuple[Content, ...] = ()  # tokens of each prompt
    chains: tuple[tuple[int, ...], ...] = ()  # ids of the full blocks of each prompt


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = True


class _Body(msgspec.Struct):
    model: str | None = None
    n: int | None = 1
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    priority: int = 0
    vllm_xargs: dict[str, object] | None = None
    kv_transfer_params: dict[str, object] | None = None
    cache_salt: str | None = None


class _CompletionBody(_Body):
    prompt: str | list[int | str | list[int]] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, object]] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None


_AnyBody = TypeVar("_AnyBody", bound=_Body)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_completions = msgspec.json.Decoder(_CompletionBody)
_chats = msgspec.json.Decoder(_ChatBody)


def decoded(body: bytes, kind: type[_Kind]) -> _Kind:
    """Decode a body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RejectedError(str(error)) from error


def parse_completion(body: bytes, limits: Limits) -> Generation:
    """Parse the body of ``POST /v1/completions``."""
    parsed = _decode(_completions, body)
    prompts = _prompts(parsed.prompt)
    lengths = [len(p) if isinstance(p, list) else estimate_text_tokens(p) for p in prompts]
    cap = COMPLETION_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens
    contents = [Content(p if isinstance(p, list) else whole_tokens(p)) for p in prompts]
    return _generation(parsed, limits, prompts, (lengths, contents), cap, chat=False)


def parse_chat(body: bytes, limits: Limits) -> Generation:
    """Parse the body of ``POST /v1/chat/completions``; without a cap it may fill the context."""
    parsed = _decode(_chats, body)
    if not parsed.messages:
        raise RejectedError("messages must not be empty", "messages")
    texts = [
        "".join(str(part.get("text", "")) for part in message.content)
        if isinstance(message.content, list)
        else message.content or ""
        for message in parsed.messages
    ]
    tokens = sum(estimate_text_tokens(text) + TOKENS_PER_MESSAGE for text in texts)
    cap = parsed.max_completion_tokens
    if cap is None:
        cap = parsed.max_tokens
    content = "".join(
        message.role.ljust(_HEAD_CHARS)[:_HEAD_CHARS] + whole_tokens(text)
        for message, text in zip(parsed.messages, texts, strict=True)
    )
    prompt = ([tokens], [Content(content)])
    return _generation(parsed, limits, ["\n".join(texts)], prompt, cap, chat=True)


def _decode(decoder: msgspec.json.Decoder[_AnyBody], body: bytes) -> _AnyBody:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        field = str(error).partition("`$.")[2].rstrip("`")
        raise RejectedError(str(error), field.partition("[")[0] or None) from error


def _prompts(prompt: str | list[int | str | list[int]] | None) -> list[str | list[int]]:
    if isinstance(prompt, str):
        listed: list[str | list[int]] = [prompt]
    else:
        ids = [item for item in prompt or () if isinstance(item, int)]
        listed = [item for item in prompt or () if not isinstance(item, int)]
        if ids and listed:
            raise RejectedError("a prompt is either token ids or text", "prompt")
        listed = [ids] if ids else listed
    if not listed or any(len(item) == 0 for item in listed):
        raise RejectedError(
            "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        )
    return listed


def _generation(
    body: _Body,
    limits: Limits,
    prompts: Sequence[str | list[int]],
    counted: tuple[Sequence[int], Sequence[Content]],
    max_tokens: int | None,
    *,
    chat: bool,
) -> Generation:
    lengths, contents = counted
    n = 1 if body.n is None else body.n
    _check(body, limits, n)
    caps = [_cap(length, max_tokens, limits.max_model_len) for length in lengths]
    xargs = body.vllm_xargs or {}
    hidden = xargs.get(HIDDEN_LENGTH)
    if hidden is not None and (not isinstance(hidden, int) or hidden < 1):
        raise RejectedError(f"{HIDDEN_LENGTH} must be a positive integer", "vllm_xargs")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    plans = []
    for prompt, cap in zip(prompts, caps, strict=True):
        for index in range(n):
            key = prompt_key(limits.seed, prompt, index)
            length = drawn_output_tokens(key) if hidden is None else hidden
            plans.append(plan_output(key, length, cap, stop, ignore_eos=body.ignore_eos))
    options = body.stream_options
    predicted = xargs.get(PREDICTED_KEY)
    lora = body.model if body.model in limits.adapters else None
    parts = limits.block_tokens, body.cache_salt or "", lora or ""
    return Generation(
        chat=chat,
        prompt_tokens=tuple(lengths),
        n=n,
        plans=tuple(plans),
        caps=tuple(caps),
        predicted_tokens=predicted if type(predicted) is int and predicted > 0 else None,
        priority=body.priority,
        stream=bool(body.stream),
        include_usage=options is not None and options.include_usage is not False,
        kv_transfer=read_params(body.kv_transfer_params),
        contents=tuple(contents),
        chains=tuple(each.chain(*parts) if limits.block_tokens else () for each in contents),
    )


def _check(body: _Body, limits: Limits, n: int) -> None:
    limits.check(body.model)
    if n < 1:
        raise RejectedError(f"n must be at least 1, got {n}.", "n")
    if n > MOST_CHOICES:
        raise RejectedError(f"n must be at most {MOST_CHOICES}, got {n}.", "n")
    if body.stream_options is not None and not body.stream:
        raise RejectedError(
            "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    if "" in (body.stop if isinstance(body.stop, list) else [body.stop]):
        raise RejectedError("stop cannot contain an empty string.", "stop")


def _cap(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    if max_tokens is not None and max_tokens < 1:
        raise RejectedError(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_tokens + wanted > max_model_len:
        raise RejectedError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {wanted} output tokens and your prompt contains at least {prompt_tokens} "
            f"input tokens, for a total of at least {prompt_tokens + wanted} tokens. Please "
            "reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
        )
    return max_model_len - prompt_tokens if max_tokens is None else max_tokens
