"""Traces of requests over OTLP: a span each, its waits and its first token as events.

Attributes are those of OpenTelemetry's conventions for generative AI; ``evenstep.*`` where these
have none. The SDK's own ``OTEL_…`` variables hold: sampling, batches, propagators, resource.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from router.core.errors import ConfigError

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
_EXPORT_S = 5.0
_PATH = "/v1/traces"


def endpoint_of(url: str) -> str:
    """A collector's URL for traces; ValueError: it is no http URL."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} should be the collector's URL, as http://127.0.0.1:4318")
    return url if parts.path.strip("/") else url.rstrip("/") + _PATH


class Tracer:
    """Makes the spans and sends them from a thread of its own; ConfigError without the extra."""

    def __init__(self, endpoint: str) -> None:
        try:
            trace = import_module("opentelemetry.sdk.trace")
            exporter = import_module("opentelemetry.exporter.otlp.json.http.trace_exporter")
        except ImportError:
            said = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'evenstep[tracing]'"
            raise ConfigError(said) from None
        api, resource = map(import_module, ("opentelemetry.trace", "opentelemetry.sdk.resources"))
        self._propagate = import_module("opentelemetry.propagate")
        self._fields = {name.encode() for name in self._propagate.get_global_textmap().fields}
        self._server, self._api = api.SpanKind.SERVER, api
        version = metadata.version("evenstep")
        known = {"service.version": version}
        if "OTEL_SERVICE_NAME" not in os.environ:
            known["service.name"] = "evenstep"
        self._provider = trace.TracerProvider(resource=resource.Resource.create(known))
        sends = exporter.OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._provider.add_span_processor(trace.export.BatchSpanProcessor(sends))
        self._tracer = self._provider.get_tracer("evenstep", version)

    def begin(self, scope: Scope) -> RequestSpan:
        """A request's span, a child of the client's; the engine's will be a child of this one."""
        headers, fields = scope["headers"], self._fields
        told = {n.decode("latin-1"): v.decode("latin-1") for n, v in headers if n in fields}
        operation = _OPERATIONS.get(scope["path"])
        span = self._tracer.start_span(
            operation or scope["method"],
            context=self._propagate.extract(told),
            kind=self._server,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"][:128]},
        )
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, self._api.set_span_in_context(span))
        passed = [header for header in headers if header[0] not in fields]
        passed += [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]
        scope["headers"] = passed
        return RequestSpan(span, operation, self._api.StatusCode.ERROR)

    def close(self) -> None:
        """Send what is left; blocks for some seconds at most."""
        self._provider.shutdown()


class RequestSpan:
    """A request's span."""

    def __init__(self, span: Any, operation: str | None, error: Any) -> None:
        self._span, self._operation, self._error = span, operation, error

    def event(self, name: str, **known: Any) -> None:
        self._span.add_event(name, _told(known))

    def end(self, status: int | None, model: str | None, **known: Any) -> None:
        """``known``: attributes without their prefix; those of None are left out."""
        span, operation = self._span, self._operation
        if operation is not None:
            span.update_name(f"{operation} {model[:128]}" if model else operation)
            known |= {"gen_ai.operation.name": operation, "gen_ai.request.model": model}
        span.set_attributes(_told({**known, "http.response.status_code": status}))
        if status is None or status >= 500:
            span.set_status(self._error)
        span.end()


def _told(known: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in known.items() if value is not None}
