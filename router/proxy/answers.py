"""The router's own answers, headers in either direction, and what an answer counts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Send

from router.core import errors
from router.http.refusal import error_body

Header = tuple[bytes, bytes]

# OpenAI's and Anthropic's client libraries obey it first.
_NOT_AGAIN = (b"x-should-retry", b"false")

# In a request of another replica; it is not passed on again.
PASSED_ON = b"x-evenstep-passed-on"
# In an answer of a replica that does not decide, or ends: another one may be asked.
NOT_LEADING = b"x-evenstep-not-leading"
ENDING = "the router is ending; retry"

# Statuses of answers that have no body (RFC 9112, 6.3).
BODILESS = frozenset({204, 304})

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade".split()
)
_OPTIONS = frozenset({b"", b"keep-alive"})
# The answer carries the client's id, which differs from the engine's.
_NOT_SENT_DOWN = _HOP_BY_HOP | {b"content-length", b"x-request-id"}
# The client may not set these, or the router replaces them. It must read events: no encodings.
_NOT_SENT_UP = _HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect", b"accept-encoding"),
    *(b"x-request-id", b"x-data-parallel-rank", b"forwarded", b"x-real-ip"),
}
_NOT_PASSED_ON = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id"}
_KINDS_NOT_SENT_UP = (b"x-forwarded-", b"x-evenstep-")


# Text cannot match: its quotation marks are escaped. A count may have details.
_USAGE = re.compile(rb'"usage": ?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}')
_DETAILS = re.compile(rb"\{[^{}]*\}")
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,9})\b')
_CACHED = re.compile(rb'"cache_(?:read|creation)_input_tokens": ?(\d{1,9})\b')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens": ?(\d{1,9})\b')


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer made whole."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = ()


def error_answer(error: errors.EvenstepError) -> Answer:
    """The HTTP answer."""
    match error:
        case errors.UnknownModelError():
            return _error(404, "NotFoundError", error.message, param="model")
        case errors.NotServedError():
            return _error(404, "NotFoundError", error.message)
        case errors.TooLargeError():
            return _error(413, "ContentTooLargeError", error.message)
        case errors.RequestError():
            return _error(400, "BadRequestError", error.message, param=error.param)
        case errors.UnknownKeyError():
            scheme = (b"www-authenticate", b"Bearer")
            return _error(401, "AuthenticationError", str(error), headers=(scheme,))
        case errors.RetryLaterError():
            after_s = error.retry_after_s
            retry = _NOT_AGAIN if after_s is None else (b"retry-after", b"%d" % after_s)
            return _error(429, "TooManyRequestsError", str(error), headers=(retry,))
        case (
            errors.NoWorkerError()
            | errors.QueueTimeoutError()
            | errors.EndingError()
            | errors.DescriptorsError()
        ):
            soon = (b"retry-after", b"1"), *_advice(error)
            return _error(503, "ServiceUnavailableError", str(error), headers=soon)
        case errors.UpstreamTimeoutError() | errors.RequestTimeoutError():
            return _error(504, "GatewayTimeoutError", str(error), headers=_advice(error))
        case errors.UpstreamError():
            return _error(502, "BadGatewayError", str(error))
    return _error(500, "InternalServerError", str(error))


def _advice(error: errors.EvenstepError) -> tuple[Header, ...]:
    if isinstance(error, errors.NotLeadingError | errors.EndingError):
        return ((NOT_LEADING, b"1"),)
    # After the client's own deadline a retry would be late too.
    return (_NOT_AGAIN,) if isinstance(error, errors.DeadlineError) and error.own else ()


def told_in_stream(error: errors.EvenstepError) -> tuple[str, str, int]:
    """Message, type and code of an error inside a stream."""
    match error:
        case errors.EndingError():
            return str(error), "ServiceUnavailableError", 503
        case errors.RequestTimeoutError():
            return str(error), "GatewayTimeoutError", 504
        case errors.UpstreamTimeoutError():
            return f"the worker stopped in mid-answer: {error}", "GatewayTimeoutError", 504
    return f"the worker failed in mid-answer: {error}", "BadGatewayError", 502


def _error(
    status: int, kind: str, message: str, param: str | None = None, headers: tuple[Header, ...] = ()
) -> Answer:
    json = (b"content-type", b"application/json")
    return Answer(status, error_body(message, kind, status, param), (json, *headers))


def headers_up(
    headers: Iterable[Header], request_id: str, rank: int | None, client_id: str = ""
) -> list[Header]:
    """From the client's; the engine's id is the router's token, then the client's id, if any."""
    passed = _without(headers, _NOT_SENT_UP, _KINDS_NOT_SENT_UP)
    upstream_id = f"{request_id}.{client_id}" if client_id else request_id
    passed.append((b"x-request-id", upstream_id.encode()))
    if rank is not None:
        passed.append((b"x-data-parallel-rank", str(rank).encode()))
    return passed


def headers_on(headers: Iterable[Header], name: bytes) -> list[Header]:
    """For another replica, from the client's; ``name``: the request's."""
    passed = _without(headers, _NOT_PASSED_ON)
    return [*passed, (b"x-request-id", name), (PASSED_ON, b"1")]


def headers_down(headers: Iterable[Header]) -> list[Header]:
    """For the client, from the engine's."""
    return _without(headers, _NOT_SENT_DOWN)


def _without(
    headers: Iterable[Header], names: frozenset[bytes], kinds: tuple[bytes, ...] = ()
) -> list[Header]:
    passed, options = [], b""
    for header in headers:
        name = header[0].lower()
        if name == b"connection":
            options += b"," + header[1].lower()
        elif name not in names and not name.startswith(kinds):
            passed.append(header)
    # ``Connection`` names more headers that are for one hop.
    if hops := {option.strip() for option in options.split(b",")} - _OPTIONS:
        passed = [header for header in passed if header[0].lower() not in hops]
    return passed


def header(headers: Iterable[Header], wanted: bytes) -> bytes:
    """The first value, empty if there is none; ``wanted`` is in lower case."""
    for name, value in headers:
        if name.lower() == wanted:
            return value
    return b""


def streams(headers: Iterable[Header]) -> bool:
    """Whether the body is a stream of events."""
    return header(headers, b"content-type").startswith(b"text/event-stream")


def framed(answer: Answer) -> tuple[Header, ...]:
    """The headers, with the length unless the status excludes a body."""
    if answer.status in BODILESS:
        return answer.headers
    return *answer.headers, (b"content-length", b"%d" % len(answer.body))


async def send_answer(send: Send, answer: Answer) -> None:
    """Send it whole."""
    headers = list(framed(answer))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def tokens_of(body: bytes) -> tuple[int, int] | None:
    """Tokens of prompt and output (0 if unknown) in any endpoint's answer.

    A message's ``input_tokens`` exclude cached tokens; other formats include them.
    """
    # Plain search is much faster than the expression's.
    at = body.find(b'"usage"')
    if at < 0 or (usage := _USAGE.search(body, at)) is None:
        return None
    counts = usage[1]
    if b"{" in counts:
        counts = _DETAILS.sub(b"", counts)
    prompt, output = _PROMPT.search(counts), _OUTPUT.search(counts)
    if prompt is None:
        return None
    cached = sum(map(int, _CACHED.findall(counts))) if b'"cache_' in counts else 0
    return int(prompt[1]) + cached, 0 if output is None else int(output[1])
