"""Requests refused before the application; their connection is closed."""

from dataclasses import dataclass, field

import msgspec

_NAMES = {
    400: ("Bad Request", "BadRequestError"),
    405: ("Method Not Allowed", "MethodNotAllowedError"),
    408: ("Request Timeout", "RequestTimeoutError"),
    413: ("Content Too Large", "ContentTooLargeError"),
    414: ("URI Too Long", "UriTooLongError"),
    417: ("Expectation Failed", "ExpectationFailedError"),
    431: ("Request Header Fields Too Large", "HeadersTooLargeError"),
    501: ("Not Implemented", "NotImplementedError"),
    503: ("Service Unavailable", "ServiceUnavailableError"),
    505: ("HTTP Version Not Supported", "VersionNotSupportedError"),
}
STATUSES = tuple(_NAMES)


class Refused(Exception):  # noqa: N818 - a result for the client, not a fault of the router
    """Refusal of a request; its message says what is wrong and what to do.

    ``status`` is one of ``STATUSES``; ``headers`` are additional lines.
    """

    def __init__(self, status: int, message: str, headers: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers

    def answer(self, *, body: bool = True) -> bytes:
        """In OpenAI's form; without a body for HEAD."""
        phrase, kind = _NAMES[self.status]
        content = error_body(self.message, kind, self.status)
        head = (
            f"HTTP/1.1 {self.status} {phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
            "connection: close\r\n"
        )
        return b"".join((head.encode(), self.headers, b"\r\n", content if body else b""))


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    """As OpenAI's clients expect it; ``kind`` is one of vLLM's names."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


@dataclass(slots=True)
class HttpCounts:
    """Counts of one port; ``body_bytes``: of unanswered requests; ``refused``: by status."""

    connections: int = 0
    body_bytes: int = 0
    refused: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
