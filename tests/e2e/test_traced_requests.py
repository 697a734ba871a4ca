"""Traces of requests, as a collector receives them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto_json.trace.v1.trace import Span, Status

from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.otlp import Collector, attributes, collecting
from tests.support.server import Server, running_router, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TOKENS = 5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), "--workers", "1") as fleet:
        yield fleet


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def router(
    tmp_path: Path, fleet: Fleet, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    traced = "--otlp-traces-endpoint", collector.url
    with running_router(tmp_path, *worker_flags(fleet), *traced) as router:
        wait_until(lambda: router.get("/health").status_code == 200, 60, "the engine is up")
        yield router


def ask(router: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    told = {"model": "emulated", "max_tokens": TOKENS, "ignore_eos": True, **body}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{router.url}{path}", json=told, headers=named, timeout=60)


def events(span: Span) -> list[str | None]:
    return [event.name for event in span.events]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_a_span_of_its_clients_trace(
    router: Server, collector: Collector, *, stream: bool
) -> None:
    context = f"00-{TRACE}-{PARENT}-01"
    asked = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
    answer = ask(router, "/v1/chat/completions", asked, traceparent=context)
    assert answer.status_code == 200

    (span,) = collector.wait_for(1)
    ids = span.trace_id or b"", span.parent_span_id or b""
    assert [each.hex() for each in ids] == [TRACE, PARENT]
    assert span.kind == Span.SpanKind.SPAN_KIND_SERVER
    assert events(span) == ["queued", "dispatched", "first_token"]
    ends = span.start_time_unix_nano or 0, span.end_time_unix_nano or 0
    times = [ends[0], *(event.time_unix_nano or 0 for event in span.events), ends[1]]
    assert ends[0] > 0
    assert times == sorted(times)
    told = attributes(span.attributes)
    model = told["gen_ai.request.model"]
    assert span.name == f"chat {model}"
    assert (
        told.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.output_tokens": TOKENS,
            "evenstep.outcome": "completed",
            "evenstep.attempts": 1,
            "evenstep.request_id": answer.headers["x-request-id"],
            "http.response.status_code": 200,
        }.items()
    )
    assert told["gen_ai.usage.input_tokens"] > 0
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < 60
    assert collector.resources[0]["service.name"] == "evenstep"


def test_refused_requests_and_those_without_a_trace(router: Server, collector: Collector) -> None:
    assert ask(router, "/v1/completions", {"prompt": 3.5}).status_code == 400
    (span,) = collector.wait_for(1)
    assert not span.parent_span_id
    assert attributes(span.attributes)["http.response.status_code"] == 400
    status = span.status or Status()
    assert status.code != Status.StatusCode.STATUS_CODE_ERROR  # the client's fault


def test_what_is_left_is_sent_at_the_end(
    tmp_path: Path, fleet: Fleet, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    traced = "--otlp-traces-endpoint", collector.url
    with running_router(tmp_path, *worker_flags(fleet), *traced) as router:
        wait_until(lambda: router.get("/health").status_code == 200, 60, "the engine is up")
        assert ask(router, "/v1/completions", {"prompt": "hello"}).status_code == 200
        assert not collector.spans
    (span,) = collector.wait_for(1)
    assert attributes(span.attributes)["gen_ai.operation.name"] == "text_completion"
    assert collector.resources[0]["service.name"] == "front"
