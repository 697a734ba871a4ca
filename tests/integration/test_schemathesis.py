"""Schemathesis on both ports: of whatever it makes of the descriptions, nothing is answered 500."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

from tests.support.raw_http import TIMEOUT_S, Front, fronted

# Of an engine that has what is asked for, and of one that has not; 503 while no worker is up.
BAD = {500, 502, 504}
PORTS = pytest.mark.parametrize("port", ["client", "admin"])
MODES = pytest.mark.parametrize("mode", GenerationMode)


@pytest.fixture(scope="module")
def front(data_plane: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with fronted(folder, "--queue-timeout", "2") as front:
        yield front


def operations(url: str) -> list[Any]:
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


@PORTS
@MODES
def test_no_operation_answers_500(front: Front, port: str, mode: GenerationMode) -> None:
    check(front, port, mode, examples=5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@PORTS
@MODES
def test_of_many_requests_none_is_answered_500(
    front: Front, port: str, mode: GenerationMode
) -> None:
    check(front, port, mode, examples=200)


def check(front: Front, port: str, mode: GenerationMode, examples: int) -> None:
    url = f"http://127.0.0.1:{front.port if port == 'client' else front.admin}"
    session = requests.Session()
    for operation in operations(url):

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            sent = case.as_transport_kwargs(base_url=url)
            # Streams have no end of their own: their beginning is looked at.
            with session.request(**sent, stream=True, timeout=TIMEOUT_S) as answer:
                assert answer.status_code not in BAD, (sent, answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"]

        # An operation without parameters has nothing that could be wrong.
        with contextlib.suppress(Unsatisfiable):
            call()
    assert session.get(f"{url}/metrics", timeout=TIMEOUT_S).status_code == 200


def test_what_a_port_answers_is_described(front: Front) -> None:
    client, admin = (
        requests.get(f"http://127.0.0.1:{port}/openapi.json", timeout=TIMEOUT_S).json()["paths"]
        for port in (front.port, front.admin)
    )

    assert "text/event-stream" in client["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert "prompt" in str(client["/v1/completions"]["post"]["requestBody"])
    assert {"/v1/models", "/health", "/metrics", "/version", "/tokenize"} <= client.keys()
    assert "requestBody" in admin["/workers"]["post"]
    assert "requestBody" in admin["/settings"]["patch"]
    assert {"/", "/events", "/recording", "/metrics"} <= admin.keys()
