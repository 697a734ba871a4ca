"""What the router reads of a request's body; everything else passes through unread.

Values that an engine would refuse are not judged here: the engine's own 400 reaches the client
unchanged. An estimate of the prompt's length never causes an error. Only what is
read of a body becomes objects, and no more of it than the limits allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.errors import InvalidRequestError
from router.proxy.raw import (
    ABSENT,
    Raw,
    TooManyError,
    commas,
    given,
    items,
    short,
    start,
    text_bytes,
    true,
    whole,
)
from router.proxy.rendered import Rendered
from router.proxy.split import Keys, splittable

# No engine takes more; sums and products stay within the range of floats.
_MOST = 2**31 - 1
# More do not fit into 64 bits, which is what processes of the router tell each other.
_PRIORITIES = -(2**63) + 1, 2**63 - 1
_LONGEST_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for.

    Attributes:
        max_slots: engine requests that it becomes, of its prompts and ``n`` together.
        max_messages: messages of a chat, and parts of messages.
    """

    max_slots: int = 1_024
    max_messages: int = 8_192


DEFAULT_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What balancing needs of a completion request; its output length is not among it.

    Attributes:
        model: as named by the client, None where it named none.
        known_tokens: of prompts given as token ids, per engine request.
        text_bytes: of prompts given as text, per engine request.
        slots: engine requests that it becomes.
        max_tokens: cap on the output.
        priority: lower goes first.
        parts: images and the like, which become tokens as well.
        measured: nothing else is in its prompt: all that is there has been counted.
        splittable: one worker may compute its prompt, and another decode.
    """

    model: str | None
    known_tokens: int
    text_bytes: int
    slots: int
    max_tokens: int | None
    priority: int
    parts: int = 0
    measured: bool = True
    splittable: bool = True


class _Body(Keys, gc=False):
    """Fields of all endpoints, each as it is written."""

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


_body = msgspec.json.Decoder(_Body)


def parse(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> ParsedRequest:
    """Read the body of a (chat) completion request.

    Raises:
        InvalidRequestError: not a JSON object, a model that is not a string, or beyond the limits.
    """
    fields = _read(body)
    copies = min(max(_count(fields.n), _count(fields.best_of), 1), _MOST)
    # Each endpoint reads one of them, and the router of both what they cost.
    said = _rendered(fields, limits, fields.messages) if given(fields.messages) else Rendered(0)
    sizes = _prompts(fields.prompt, limits) if given(fields.prompt) else [(0, 0)]
    slots = len(sizes) * copies
    if slots > limits.max_slots:
        raise too_many_slots(slots, limits.max_slots)
    known_tokens, size = (-(-sum(each) // len(sizes)) for each in zip(*sizes, strict=True))
    untouched = not (given(fields.prompt_embeds) or given(fields.truncate_prompt_tokens))
    return ParsedRequest(
        model=model_of(fields.model),
        known_tokens=known_tokens,
        text_bytes=size + said.bytes,
        slots=slots,
        max_tokens=_cap(fields.max_completion_tokens) or _cap(fields.max_tokens),
        priority=_priority(fields.priority),
        parts=said.parts,
        measured=said.whole and untouched,
        splittable=not said.parts and len(sizes) == 1 and splittable(fields),
    )


def parse_message(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> ParsedRequest:
    """Read the body of ``/v1/messages``.

    Raises:
        InvalidRequestError: as ``parse`` does.
    """
    fields = _read(body)
    said = _rendered(fields, limits, fields.messages, fields.system)
    return _one_answer(fields, said, fields.max_tokens)


def parse_response(body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> ParsedRequest:
    """Read the body of ``/v1/responses``.

    Raises:
        InvalidRequestError: as ``parse`` does; or a response that is to be computed when its
            client has gone, whose end the router would not see.
    """
    fields = _read(body)
    if true(fields.background):
        raise InvalidRequestError("background responses are not supported", param="background")
    said = _rendered(fields, limits, fields.input, fields.instructions)
    # What was said before is with the engine.
    said.whole &= not true(fields.previous_response_id)
    return _one_answer(fields, said, fields.max_output_tokens)


def model_in(body: bytes) -> str | None:
    """The model that a body names, None if it names none.

    Raises:
        InvalidRequestError: not a JSON object, or a model that is not a string.
    """
    return model_of(_read(body).model)


def model_of(raw: Raw) -> str | None:
    """The model of a body's field, None if none is named.

    Raises:
        InvalidRequestError: it is not a string, or no name could be as long.
    """
    if not given(raw):
        return None
    if start(raw) != b'"':
        raise InvalidRequestError("'model' should be a string", param="model")
    if memoryview(raw).nbytes > _LONGEST_NAME_BYTES:
        raise InvalidRequestError(f"'model' is above {_LONGEST_NAME_BYTES:,} bytes", param="model")
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"'model' is not valid JSON: {error}", param="model") from error


def too_many_slots(slots: int, most: int) -> InvalidRequestError:
    """The error for a request that becomes too many engine requests."""
    return InvalidRequestError(
        f"the request asks for {slots:,} answers (its prompts times n), at most {most:,} are "
        "allowed: send several requests",
        param="n",
    )


def _one_answer(fields: _Body, said: Rendered, max_tokens: Raw) -> ParsedRequest:
    return ParsedRequest(
        model=model_of(fields.model),
        known_tokens=0,
        text_bytes=said.bytes,
        slots=1,
        max_tokens=_cap(max_tokens),
        priority=_priority(fields.priority),
        parts=said.parts,
        measured=said.whole,
        splittable=False,
    )


def _read(body: bytes) -> _Body:
    """A body's fields.

    Raises:
        InvalidRequestError: not a JSON object.
    """
    try:
        return _body.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequestError("the body should be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error


def _rendered(
    fields: _Body, limits: RequestLimits, messages: Raw, system: Raw = ABSENT
) -> Rendered:
    """What a chat template makes a prompt of."""
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


def _priority(raw: Raw) -> int:
    least, most = _PRIORITIES
    return max(least, min(whole(raw) or 0, most))


def _count(raw: Raw) -> int:
    """A number as engines read it: pydantic takes "5" and 5.0 for 5 as well; 0: it is none."""
    if (number := whole(raw)) is not None:
        return number
    try:
        return int(max(0.0, min(float(short(raw).strip(b'" ')), float(_MOST))))
    except ValueError:  # no number, or nan
        return 0


def _cap(raw: Raw) -> int | None:
    number = whole(raw)
    return min(number, _MOST) if number is not None and number > 0 else None


def _prompts(prompt: Raw, limits: RequestLimits) -> list[tuple[int, int]]:
    """Token ids and bytes of text of each prompt, at least one prompt."""
    if start(prompt) != b"[" or _first(prompt) not in b'["':
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
    """How the first element of a list begins; ``]`` if there is none."""
    return bytes(memoryview(raw)[1:64]).lstrip()[:1]
