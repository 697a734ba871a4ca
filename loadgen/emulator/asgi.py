"""Answers that the emulator's applications share; starlette reads and writes them."""

from starlette.responses import Response
from starlette.types import Receive

from loadgen.emulator.generation import RejectedError
from loadgen.emulator.shapes import error_body

JSON = "application/json"


def json_response(body: bytes) -> Response:
    """An answer of encoded JSON."""
    return Response(body, media_type=JSON)


def refusal(rejected: RejectedError) -> Response:
    """The answer to a rejected request."""
    after_s = rejected.retry_after_s
    headers = None if after_s is None else {"retry-after": str(after_s)}
    return Response(error_body(rejected), rejected.status, headers, JSON)


async def until_gone(receive: Receive) -> None:
    """Wait until the client disconnects or its answer is complete; the body must be read."""
    while (await receive())["type"] != "http.disconnect":
        pass
