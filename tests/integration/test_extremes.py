"""Headers and signals at their largest and smallest: they cost little, and others are served."""

import contextlib
import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bounded import frugal_router, measured, patient_engine, processes
from tests.support.server import Server, wait_until

PATH = "/v1/completions"
SMALL = b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}'
LONG = 15_000
READ = (
    *("x-request-priority", "x-vllm-priority", "x-request-timeout-s", "x-queue-timeout-s"),
    *("x-evenstep-energy", "x-request-id", "x-data-parallel-rank", "x-session-id", "x-api-key"),
    *("x-slo-ttft-ms", "x-llm-d-slo-tpot-ms"),
    *("authorization", "traceparent", "content-type", "accept", "x-forwarded-for", "cookie"),
)
VALUES = (
    *(b"", b" ", b"0", b"-0", b"1", b"-1", b"0.000000001", b"999999999", b"1e308", b"-1e-308"),
    *(b"nan", b"inf", b"true", b"null", b"\xff" * LONG, b"9" * LONG, b"-" + b"9" * LONG),
    *("٣".encode(), b"Bearer ", b"Bearer " + b"a" * LONG, b"," * LONG, b'"' * LONG, b"%" * LONG),
    *(str(2**63).encode(), str(-(2**63) - 1).encode(), str(2**64).encode()),
)
# What is not refused is served: a timeout may have passed.
ANSWERS = frozenset({200, 400, 401, 431, 503, 504})
SIGNALS = (signal.SIGHUP, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("extremes")
    with (
        patient_engine() as engine,
        frugal_router(folder, "--worker", engine) as server,
    ):
        wait_until(lambda: server.get("/v1/models").json()["data"] != [], 60, "the model")
        yield server


def send(port: int, name: str = "accept", value: bytes = b"*/*", times: int = 1) -> int:
    """The status of the answer to a request with this header, so many times."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.putrequest("POST", PATH, skip_accept_encoding=True)
        connection.putheader("content-length", str(len(SMALL)))
        for _ in range(times):
            connection.putheader(name, value)
        connection.endheaders(SMALL)
        answer = connection.getresponse()
        answer.read()
        return answer.status


@pytest.mark.parametrize("name", READ)
def test_a_header_stops_nobody(router: Server, name: str) -> None:
    with measured(router) as cost:
        answers = {value[:30]: send(router.port, name, value) for value in VALUES}
        answers |= {b"many": send(router.port, name, b"1", 90)}
    assert {value: status for value, status in answers.items() if status not in ANSWERS} == {}
    assert cost.within(0), cost
    assert send(router.port) == 200


def test_signals_stop_nobody(router: Server) -> None:
    before = processes(router)
    with measured(router) as cost:
        for number in SIGNALS * 20:
            os.kill(router.process.pid, number)
            assert send(router.port) == 200
    assert cost.within(0), cost
    assert processes(router) == before
