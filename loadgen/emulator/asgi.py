"""ASGI operations that the emulator's applications share."""

from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

JSON = b"application/json"


class ClientGoneError(Exception):
    """The client disconnected before its request was accepted."""


async def read_body(receive: Receive) -> bytes:
    """Read the whole body of a request.

    Raises:
        ClientGoneError: the client disconnected before the end of the body.
    """
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def until_gone(receive: Receive) -> None:
    """Wait until the client disconnects or its answer is complete; the body must be read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: bytes = JSON,
    retry_after_s: int | None = None,
) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def start_events(send: Send) -> None:
    """Begin an event stream."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_events(send: Send, events: Iterable[bytes], *, more: bool = True) -> None:
    """Send events as one chunk."""
    await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})


def header(scope: Scope, name: bytes) -> str | None:
    """None when it is missing."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
