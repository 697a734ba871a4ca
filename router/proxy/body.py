"""Fields that the router reads from a request's body.

Invalid values pass: the client receives the engine's own 400.
"""

from dataclasses import dataclass

import msgspec

from router.core.errors import InvalidRequestError
from router.core.prefix.sessions import MOST_NAME_BYTES
from router.core.request_limits import DEFAULT_LIMITS, RequestLimits
from router.core.types import Content
from router.dispatch.models import CachedModel
from router.proxy.content import (
    CachedAs,
    ids_of,
    nobody_asks,
    text_of,
    tokenized,
    tokens_content,
)
from router.proxy.json_fields import (
    ABSENT,
    Raw,
    TooManyError,
    commas,
    given,
    items,
    start,
    text_bytes,
    true,
    whole,
)
from router.proxy.rendered import Rendered

# No engine accepts more; sums stay within the range of floats.
_MOST = 2**31 - 1
_LONGEST_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Fields of a completion request that balancing needs."""

    model: str | None
    # Of prompts given as ids, as text; per engine request.
    known_tokens: int
    text_bytes: int
    slots: int  # engine requests it becomes
    max_tokens: int | None
    priority: int
    parts: int = 0  # images and the like, which become tokens too
    measured: bool = True  # whether the whole prompt was counted
    splittable: bool = True  # whether one worker may prefill and another decode
    content: Content | None = None  # of its only prompt, where somebody asks for it
    # The name of its session, and what else divides caches, as in the body.
    session: tuple[bytes, bytes] = (b"", b"")


class _Body(msgspec.Struct, gc=False):
    model: Raw = ABSENT
    prompt: Raw = ABSENT
    messages: Raw = ABSENT
    input: Raw = ABSENT
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    tools: Raw = ABSENT
    functions: Raw = ABSENT
    n: Raw = ABSENT
    best_of: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    priority: Raw = ABSENT
    background: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    documents: Raw = ABSENT
    chat_template: Raw = ABSENT
    truncate_prompt_tokens: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT
    kv_transfer_params: Raw = ABSENT
    echo: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    cache_salt: Raw = ABSENT
    chat_template_kwargs: Raw = ABSENT
    add_generation_prompt: Raw = ABSENT
    continue_final_message: Raw = ABSENT
    add_special_tokens: Raw = ABSENT
    tool_choice: Raw = ABSENT
    response_format: Raw = ABSENT
    reasoning_effort: Raw = ABSENT
    reasoning: Raw = ABSENT
    thinking: Raw = ABSENT
    output_config: Raw = ABSENT
    text: Raw = ABSENT
    truncation: Raw = ABSENT
    media_io_kwargs: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    mm_payload: Raw = ABSENT
    previous_input_messages: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT


_body = msgspec.json.Decoder(_Body)
# The messages of a body that has none.
_UNSAID = Rendered(0)


def parse(
    body: bytes, limits: RequestLimits = DEFAULT_LIMITS, cached_as: CachedAs = nobody_asks
) -> ParsedRequest:
    """Read the body of a (chat) completion request; InvalidRequestError: no object, or too much."""
    fields = _read(body)
    copies = _copies(fields)
    # Each endpoint uses one of the two; a body with both is counted with both.
    said = _rendered(fields, limits, fields.messages) if given(fields.messages) else _UNSAID
    sizes = _prompts(fields.prompt, limits)
    slots = len(sizes) * copies
    if slots > limits.max_slots:
        raise too_many_slots(slots, limits.max_slots)
    known_tokens, size = sizes[0]
    if len(sizes) > 1:
        known_tokens, size = (-(-sum(each) // len(sizes)) for each in zip(*sizes, strict=True))
    model = model_of(fields.model)
    named = cached_as(model) if len(sizes) == 1 else None
    content, ids = (None, None) if named is None else _content(fields, named, limits)
    if ids is not None:
        known_tokens, size, said = len(ids), 0, _UNSAID
    return ParsedRequest(
        model=model,
        known_tokens=known_tokens,
        text_bytes=size + said.bytes,
        slots=slots,
        max_tokens=_cap(fields.max_completion_tokens, fields.max_tokens),
        priority=_priority(fields.priority),
        parts=said.parts,
        measured=said.whole and not given(fields.prompt_embeds, fields.truncate_prompt_tokens),
        splittable=not said.parts and len(sizes) == 1 and _splittable(fields),
        content=content,
        session=_session(fields),
    )


def parse_message(
    body: bytes, limits: RequestLimits = DEFAULT_LIMITS, cached_as: CachedAs = nobody_asks
) -> ParsedRequest:
    """Read the body of ``/v1/messages``; raises as ``parse``."""
    fields = _read(body)
    said = _rendered(fields, limits, fields.messages, fields.system)
    model = model_of(fields.model)
    named, content = cached_as(model), None
    if named is not None:
        parts = fields.system, fields.messages
        content = text_of(fields, named, limits.max_messages, *parts, whole=(fields.tools,))
    return _one_answer(fields, model, said, fields.max_tokens, content)


def parse_response(
    body: bytes, limits: RequestLimits = DEFAULT_LIMITS, cached_as: CachedAs = nobody_asks
) -> ParsedRequest:
    """Read the body of ``/v1/responses``; raises as ``parse``."""
    fields = _read(body)
    if true(fields.background):  # the router would not see its end
        raise InvalidRequestError("background responses are not supported", param="background")
    said = _rendered(fields, limits, fields.input, fields.instructions)
    # The engine holds the earlier messages.
    said.whole &= not true(fields.previous_response_id)
    model = model_of(fields.model)
    named, content = cached_as(model), None
    if named is not None and not given(fields.prompt):  # there a template that the engine keeps
        parts = fields.instructions, fields.input
        content = text_of(fields, named, limits.max_messages, *parts, whole=(fields.tools,))
    return _one_answer(fields, model, said, fields.max_output_tokens, content)


def model_in(body: bytes) -> str | None:
    """The model that a body names, None if absent; raises as ``parse``."""
    return model_of(_read(body).model)


def model_of(raw: Raw) -> str | None:
    """The model in a field; InvalidRequestError: not a string, or too long."""
    if start(raw) != b'"':
        if not given(raw):
            return None
        raise InvalidRequestError("'model' should be a string", param="model")
    if memoryview(raw).nbytes > _LONGEST_NAME_BYTES:
        raise InvalidRequestError(f"'model' is above {_LONGEST_NAME_BYTES:,} bytes", param="model")
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"'model' is not valid JSON: {error}", param="model") from error


def too_many_slots(slots: int, most: int) -> InvalidRequestError:
    """The error beyond a limit."""
    return InvalidRequestError(
        f"the request asks for {slots:,} answers (its prompts times n), at most {most:,} are "
        "allowed: send several requests",
        param="n",
    )


def _content(
    fields: _Body, named: CachedModel, limits: RequestLimits
) -> tuple[Content | None, list[int] | None]:
    """Of a body with one prompt or with messages, and the token ids of a text if they are known."""
    prompt, messages = fields.prompt, fields.messages
    if given(prompt) and given(messages):
        return None, None
    if start(prompt) == b"[" and _first(prompt) in b'["':
        (prompt,) = items(prompt, 1)
    if start(prompt) == b"[":
        return ids_of(prompt, fields, named), None
    if given(prompt) and start(prompt) != b'"':
        return None, None
    ids = tokenized(fields, named)
    if ids is not None:
        return tokens_content(ids, fields, named), ids
    whole = () if given(prompt) else (fields.tools, fields.functions)
    most = limits.max_messages
    return text_of(fields, named, most, prompt if given(prompt) else messages, whole=whole), None


def _one_answer(
    fields: _Body, model: str | None, said: Rendered, max_tokens: Raw, content: Content | None
) -> ParsedRequest:
    return ParsedRequest(
        model=model,
        known_tokens=0,
        text_bytes=said.bytes,
        slots=1,
        max_tokens=_cap(max_tokens),
        priority=_priority(fields.priority),
        parts=said.parts,
        measured=said.whole,
        splittable=False,
        content=content,
        session=_session(fields),
    )


def _session(fields: _Body) -> tuple[bytes, bytes]:
    key = fields.prompt_cache_key
    if start(key) != b'"' or memoryview(key).nbytes > MOST_NAME_BYTES:
        key = ABSENT
    return bytes(memoryview(key)[1:-1]), bytes(fields.cache_salt)


def _read(body: bytes) -> _Body:
    try:
        return _body.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequestError("the body should be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error


def _rendered(
    fields: _Body, limits: RequestLimits, messages: Raw, system: Raw = ABSENT
) -> Rendered:
    said = Rendered(limits.max_messages)
    if start(messages) != b"[" and messages is not fields.input:
        messages = ABSENT
    try:
        said.add_messages(messages)
        said.add_content(system)
    except RecursionError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    except TooManyError:
        raise InvalidRequestError(
            f"a request may have {limits.max_messages:,} messages and parts of these: send fewer",
            param="messages",
        ) from None
    if memoryview(messages):
        said.add_tools(fields.tools)
        said.add_tools(fields.functions)
    said.whole &= not (given(fields.documents) or given(fields.chat_template))
    return said


def _splittable(fields: _Body) -> bool:
    # vLLM fetches no KV if a prompt's log-probabilities are requested, even 0 of them. A client's
    # own kv_transfer_params, even null, would override ours, which come first.
    if given(fields.prompt_logprobs) or fields.kv_transfer_params is not ABSENT:
        return False
    # Here the answer includes the prompt, the prompt is no text, or the answers' number is unknown.
    return not true(fields.echo, fields.use_beam_search, fields.prompt_embeds)


def _priority(raw: Raw) -> int:
    return 0 if raw is ABSENT else whole(raw) or 0


def _copies(fields: _Body) -> int:
    """Answers to each prompt; like pydantic in engines, takes "5" and 5.0 for 5."""
    most = 1
    for raw in (fields.n, fields.best_of):
        if raw is ABSENT:
            continue
        number = whole(raw)
        if number is None:
            try:
                text = bytes(memoryview(raw)[:64]).strip(b'" ')
                number = int(max(0.0, min(float(text), float(_MOST))))
            except ValueError:  # not a number, or nan
                continue
        most = max(most, number)
    return min(most, _MOST)


def _cap(*raws: Raw) -> int | None:
    for raw in raws:
        if raw is not ABSENT and (number := whole(raw)) is not None and number > 0:
            return min(number, _MOST)
    return None


def _prompts(prompt: Raw, limits: RequestLimits) -> list[tuple[int, int]]:
    """Token ids and text bytes of each prompt; at least one."""
    kind = start(prompt)
    if kind == b'"':
        return [(0, text_bytes(prompt))]
    if kind != b"[" or _first(prompt) not in b'["':
        return [_prompt(prompt)]
    try:
        return [_prompt(one) for one in items(prompt, limits.max_slots)]
    except TooManyError:
        raise InvalidRequestError(
            f"a request may have {limits.max_slots:,} prompts: send several requests",
            param="prompt",
        ) from None


def _prompt(prompt: Raw) -> tuple[int, int]:
    match start(prompt):
        case b'"':
            return 0, text_bytes(prompt)
        case b"[":
            return (commas(prompt) + 1 if _first(prompt) != b"]" else 0), 0
    return 0, 0


def _first(raw: Raw) -> bytes:
    return bytes(memoryview(raw)[1:64]).lstrip()[:1]
