"""Trace context: the engine's span becomes a child of the router's."""

import sys
from typing import Any

import pytest

from router.core.errors import ConfigError
from router.tracing import Tracer, endpoint_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def tracer() -> Any:
    tracer = Tracer("http://127.0.0.1:9/v1/traces")
    yield tracer
    tracer._provider._active_span_processor._span_processors = ()  # nothing listens there
    tracer.close()


def test_the_engine_is_told_the_routers_span(tracer: Tracer) -> None:
    context = b"00-" + TRACE.encode() + b"-" + PARENT.encode() + b"-00"
    headers = [(b"host", b"x"), (b"traceparent", context), (b"tracestate", b"a=1")]
    scope: dict[str, Any] = {"method": "POST", "path": "/v1/completions", "headers": headers}
    tracer.begin(scope)
    told = dict(scope["headers"])
    assert told[b"host"] == b"x"
    assert told[b"tracestate"] == b"a=1"
    version, trace, span, sampled = told[b"traceparent"].decode().split("-")
    assert (version, trace, sampled) == ("00", TRACE, "00")  # as the client chose: not sampled
    assert span != PARENT
    assert len(scope["headers"]) == 3


@pytest.mark.parametrize(
    ("given", "sent_to"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/own/path", "https://c/own/path"),
    ],
)
def test_where_traces_go(given: str, sent_to: str) -> None:
    assert endpoint_of(given) == sent_to


@pytest.mark.parametrize("given", ["", "collector:4318", "grpc://c:4317", "http://"])
def test_what_is_no_collector(given: str) -> None:
    with pytest.raises(ValueError, match="collector's URL"):
        endpoint_of(given)


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"evenstep\[tracing\]"):
        Tracer("http://127.0.0.1:9/v1/traces")
