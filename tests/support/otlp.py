"""A collector of traces: OTLP over HTTP, read by the classes made of OpenTelemetry's protobufs."""

import contextlib
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any

from opentelemetry.proto_json.collector.trace.v1.trace_service import ExportTraceServiceRequest
from opentelemetry.proto_json.trace.v1.trace import Span

TIMEOUT_S = 60


@dataclass
class Collector:
    """What has arrived; ``spans`` in the order of their ends."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    arrived: Condition = field(default_factory=Condition)

    def wait_for(self, count: int) -> list[Span]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.spans) >= count, TIMEOUT_S), self.spans
            return list(self.spans)

    def take(self, body: bytes) -> None:
        with self.arrived:
            for told in ExportTraceServiceRequest.from_dict(json.loads(body)).resource_spans:
                assert told.resource is not None
                self.resources.append(attributes(told.resource.attributes))
                self.spans += [span for scope in told.scope_spans for span in scope.spans]
            self.arrived.notify_all()


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(told: Any) -> Any:
    kinds = (told.string_value, told.bool_value, told.int_value, told.double_value)
    return next(kind for kind in kinds if kind is not None)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()
            if self.path == "/v1/traces":
                collector.take(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
