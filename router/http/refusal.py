"""Requests that are not passed to the application: each is answered, and its connection closed."""

from __future__ import annotations

from router.proxy.events import error_body

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


class Refused(Exception):  # noqa: N818 - what happens to a request, not what went wrong here
    """A request that is refused as a whole.

    Args:
        status: of the answer, one of those above.
        message: what is wrong and what to do, for the client.
        headers: of the answer, beside those that every refusal has.
    """

    def __init__(self, status: int, message: str, headers: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers

    def answer(self, *, body: bool = True) -> bytes:
        """The whole answer as it is sent, in OpenAI's form; without its body for HEAD."""
        phrase, kind = _NAMES[self.status]
        content = error_body(self.message, kind, self.status)
        head = (
            f"HTTP/1.1 {self.status} {phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
            "connection: close\r\n"
        )
        return b"".join((head.encode(), self.headers, b"\r\n", content if body else b""))
