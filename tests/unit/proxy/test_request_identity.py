"""Names of requests, and what their clients wish for in headers."""

import re

import pytest
from starlette.datastructures import Headers

from router.core.errors import InvalidRequestError
from router.core.targets import Targets
from router.core.wire import request_token
from router.proxy.answers import headers_up
from router.proxy.client_request import RequestHead

FORGED = "es-" + 20 * "0"


def head(headers: dict[str, str]) -> RequestHead:
    return RequestHead(Headers(headers).raw)


@pytest.mark.parametrize("given", ["a", "A-z_0.9~", FORGED, "x" * 128])
def test_a_sane_id_is_kept(given: str) -> None:
    identity = RequestHead([(b"host", b"x"), (b"x-request-id", given.encode())])

    assert identity.header == (b"x-request-id", given.encode())
    up = dict(headers_up([(b"x-request-id", given.encode())], identity.token, 3, given))
    assert up == {
        b"x-request-id": f"{identity.token}.{given}".encode(),
        b"x-data-parallel-rank": b"3",
    }
    # As an engine calls it, it is still known by the router's own token.
    assert request_token(f"0_cmpl-{identity.token}r2.{given}-0-1a2b") == f"{identity.token}r2"


@pytest.mark.parametrize(
    "given", [[], [b""], [b"x" * 129], [b"a b"], [b"a\xff"], [b"a/b"], [b"a", b"a"]], ids=str
)
def test_another_is_made(given: list[bytes]) -> None:
    identity = RequestHead([(b"x-request-id", value) for value in given])

    assert re.fullmatch("es-[0-9a-f]{20}", identity.token)
    assert identity.header == (b"x-request-id", identity.token.encode())
    assert dict(headers_up([], identity.token, None)) == {b"x-request-id": identity.token.encode()}


def test_a_header_may_name_the_session() -> None:
    assert head({"X-Session-ID": " chat 1 "}).session == b"chat 1"
    assert head({}).session == b""


def test_no_two_are_alike() -> None:
    assert len({RequestHead([]).token for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 7),
        ({"x-request-priority": "-2"}, -2),
        ({"X-Request-Priority": " 3 ", "x-vllm-priority": "5"}, 3),
        ({"x-vllm-priority": "5"}, 5),
        ({"x-vllm-priority": "soon"}, 7),
        ({"x-request-priority": "9" * 20}, 10**20 - 1),
    ],
    ids=str,
)
def test_priority(headers: dict[str, str], expected: int) -> None:
    assert head(headers).priority(7) == expected


@pytest.mark.parametrize("wrong", ["", "high", "1.5", "--1", "9" * 21, "²"])
def test_a_priority_that_is_none(wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match="whole number") as caught:
        head({"x-request-priority": wrong}).priority(0)
    assert caught.value.param == "X-Request-Priority"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((None, None), ("2", 2.0), (" 0.25 ", 0.25), ("999999999", 999999999.0)),
        *(("1e3", 1000.0), ("2.5E-1", 0.25), ("0.30000000000000004", 0.1 + 0.2)),
    ],
)
def test_timeouts(given: str | None, expected: float | None) -> None:
    headers = {} if given is None else {"x-request-timeout-s": given}
    assert head(headers).timeout_s("X-Request-Timeout-S") == expected


@pytest.mark.parametrize(
    "wrong", ["", "0", "0.0", "-1", "1e9", "1e", "inf", "nan", ".5", "1.", "1_0", "soon", "²"]
)
def test_timeouts_that_are_none(wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match="above 0") as caught:
        head({"x-queue-timeout-s": wrong}).timeout_s("X-Queue-Timeout-S")
    assert caught.value.param == "X-Queue-Timeout-S"


@pytest.mark.parametrize(
    ("headers", "of_key", "expected"),
    [
        ({}, None, None),
        ({}, Targets(1.0), Targets(1.0)),
        ({"x-slo-ttft-ms": "800"}, None, Targets(0.8)),
        ({"x-llm-d-slo-tpot-ms": " 37.5 "}, None, Targets(None, 0.0375)),
        ({"x-llm-d-slo-ttft-ms": "5e2", "x-slo-ttft-ms": "500"}, Targets(1, 2), Targets(0.5, 2)),
    ],
    ids=str,
)
def test_targets(headers: dict[str, str], of_key: Targets | None, expected: Targets | None) -> None:
    assert head(headers).targets(of_key) == expected


@pytest.mark.parametrize("name", ["X-SLO-TTFT-Ms", "X-LLM-D-SLO-TPOT-Ms"])
@pytest.mark.parametrize("wrong", ["", "0", "-1", "inf", "1e99", "800ms", "soon"])
def test_targets_that_are_none(name: str, wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} .* milliseconds above 0") as caught:
        head({name.lower(): wrong}).targets(Targets(1.0))
    assert caught.value.param == name


def test_targets_that_contradict_each_other() -> None:
    both = {"x-slo-tpot-ms": "40", "x-llm-d-slo-tpot-ms": "50"}
    with pytest.raises(InvalidRequestError, match="X-SLO-TPOT-Ms and X-LLM-D-SLO-TPOT-Ms differ"):
        head(both).targets(None)
