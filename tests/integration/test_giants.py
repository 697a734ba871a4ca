"""Requests that are well-formed, and as large, long, deep or absurd as they may be.

After any of them /health answers in time, memory has grown by twice the body and a little at most,
and others are served.
"""

import contextlib
import http.client
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from tests.support.bounded import MIB, Cost, frugal_router, measured, patient_engine
from tests.support.server import Server, wait_until

MOST = 32 * MIB - 1024
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SMALL = b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}'
# A machine that is busy with something else may be slow once.
TRIES = 2
ANSWERS = frozenset({200, 400, 404})
NAMES = ("--model-alias", "short=tiny")


def filled(before: bytes, piece: bytes, after: bytes, size: int = MOST) -> bytes:
    """As many pieces as fit, with commas between them."""
    count = (size - len(before) - len(after)) // (len(piece) + 1)
    return before + (piece + b",") * (count - 1) + piece + after


def long_text(field: bytes, piece: bytes) -> bytes:
    count = (MOST - len(field) - 32) // len(piece)
    return b'{"model":"tiny",' + field % (b'"' + piece * count + b'"') + b"}"


def listed(field: bytes, piece: bytes) -> bytes:
    before, after = (b'{"model":"tiny",' + field + b"}").split(b"%b")
    return filled(before + b"[", piece, b"]" + after)


def nested(field: bytes, begin: bytes, end: bytes) -> bytes:
    depth = (MOST - 64) // (len(begin) + len(end))
    return b'{"model":"tiny",' + field % (begin * depth + b"0" + end * depth) + b"}"


PIECES = (b"1", b"[]", b"{}", b'""', b"null", b'{"a":[[]]}', b'{"content":[{}]}', b"-1e308")
CONTENTS = (b'{"type":"text","text":""}', b'{"type":"image_url","image_url":{"url":""}}', *PIECES)
LISTS = {
    TEXT: (b'"prompt":%b', b'"stop":%b', b'"prompt":[%b]', b'"logit_bias":%b'),
    CHAT: (
        b'"messages":%b',
        b'"messages":[{"role":"user","content":%b}]',
        b'"messages":[{"role":"assistant","tool_calls":%b}]',
        b'"messages":[{"content":[{"type":"tool_result","content":%b}]}]',
        b'"messages":[],"tools":%b',
    ),
    MESSAGES: (b'"system":%b,"messages":[]', b'"messages":%b'),
    RESPONSES: (b'"input":%b', b'"input":[{"type":"function_call_output","output":%b}]'),
    "/v1/embeddings": (b'"input":%b',),
    "/tokenize": (b'"messages":%b',),
}
TEXTS = {
    TEXT: (b'"prompt":%b', b'"model":%b', b'"suffix":%b'),
    CHAT: (b'"messages":[{"role":"user","content":%b}]', b'"messages":[{"reasoning_content":%b}]'),
    RESPONSES: (b'"input":%b', b'"instructions":%b'),
}
LETTERS = (b"a", b",", b'\\"', b"\\u00e4", "ä😀".encode(), b"{[:]},")
NUMBERS = (b"0", b"-1", b"2", b"10000000", b"9223372036854775807", b"9" * MIB, b"1e308")
NUMBER_FIELDS = (b"n", b"best_of", b"max_tokens", b"priority", b"logprobs", b"seed")


Giant = tuple[str, str, Callable[[], bytes]]


def giants() -> Iterator[Giant]:
    """Name, path and body of each."""
    yield from lists()
    for path, fields in TEXTS.items():
        for field, piece in product(fields, LETTERS):
            yield f"{field!r} of {piece!r}", path, partial(long_text, field, piece)
    for field, number in product(NUMBER_FIELDS, NUMBERS):
        yield f"{field!r}: {number[:20]!r}", TEXT, partial(numbered, field, number)
    for path in (TEXT, CHAT, RESPONSES):
        yield "keys", path, many_keys
    for path in (TEXT, RESPONSES):
        yield "blanks", path, blanks
    for depth, piece in product((2, 6, 20), (b"{}", b"[]", b"1")):
        yield f"{piece!r} {depth} results deep", CHAT, partial(results, depth, piece)


def lists() -> Iterator[Giant]:
    for path, fields in LISTS.items():
        for field in fields:
            for piece in CONTENTS if b"content" in field else PIECES:
                yield f"{field!r} of {piece!r}", path, partial(listed, field, piece)
            for begin, end in ((b"[", b"]"), (b'{"content":', b"}")):
                yield f"{field!r} in {begin!r}", path, partial(nested, field, begin, end)


def numbered(field: bytes, number: bytes) -> bytes:
    return b'{"model":"tiny","prompt":[7],"max_tokens":1,"%b":%b}' % (field, number)


def blanks() -> bytes:
    """Behind the object, by another name of the model, which is replaced."""
    return b'{"model":"short","input":"x","prompt":"x"}'.ljust(MOST)


def results(depth: int, piece: bytes) -> bytes:
    """Results of tools in results of tools: a list that is found again at each depth."""
    begin, end = b'{"type":"tool_result","content":[' * depth, b"]}" * depth
    return listed(b'"messages":[{"role":"user","content":[%s%%b%s]}]' % (begin, end), piece)


def many_keys() -> bytes:
    return b'{"model":"tiny",' + b",".join(b'"%d":0' % at for at in range(MOST // 13)) + b"}"


def send(port: int, path: str, body: bytes) -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status


SOAKED = pytest.param("asgi", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["splice", SOAKED])
def router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("giants")
    plane = ("--data-plane", request.param)
    with (
        patient_engine() as engine,
        frugal_router(folder, *plane, *NAMES, "--worker", engine) as server,
    ):
        wait_until(lambda: server.get("/v1/models").json()["data"] != [], 60, "the model")
        yield server


GIANTS = list(giants())


def test_some_of_each_kind_stop_nobody(router: Server) -> None:
    assert beyond(router, GIANTS[::9]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({path for _, path, _ in GIANTS}))
def test_one_request_stops_nobody(router: Server, kind: str) -> None:
    assert beyond(router, [giant for giant in GIANTS if giant[1] == kind]) == {}


def beyond(router: Server, some: Sequence[Giant]) -> dict[str, str]:
    """What those cost that cost too much."""
    failed = {}
    for name, path, make in some:
        body = make()
        cost, status = _cost(router, path, body)
        if not cost.within(len(body)) or status not in ANSWERS:
            grown = f"{cost.grown_bytes / MIB:.0f} MiB for {len(body) / MIB:.0f}"
            failed[name] = f"{path}: {status}, /health {cost.health_s:.2f} s, {grown}"
        assert send(router.port, TEXT, SMALL) == 200, f"others after {name}"
    return failed


def _cost(router: Server, path: str, body: bytes) -> tuple[Cost, int]:
    """Of the last try; but memory of all of them, for what is kept grows once."""
    grown_bytes = 0
    for _ in range(TRIES):
        with measured(router) as cost:
            status = send(router.port, path, body)
        cost.grown_bytes = grown_bytes = max(grown_bytes, cost.grown_bytes)
        if cost.within(len(body)):
            break
    return cost, status
