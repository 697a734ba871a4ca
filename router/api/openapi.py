"""OpenAPI description of a port: FastAPI's own routes, and the others from here.

For bodies passed on to engines it lists the fields that the router reads and those that engines
require. Engines accept many more fields, which pass too.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import Route

from router.proxy.client_request import PRIORITY, QUEUE_TIMEOUT, REQUEST_TIMEOUT, TPOT, TTFT
from router.proxy.endpoints import ENDPOINTS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SWITCH: Schema = {"type": "boolean"}
_TOKENS: Schema = {"type": "array", "items": _COUNT}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_SEVERAL: Schema = {"type": "array", "items": _TOKENS}
_PROMPT: Schema = {"anyOf": [_TEXT, _TEXTS, _TOKENS, _SEVERAL]}
_SETTINGS: Schema = {
    "type": "object",
    "description": "Names as in the configuration file.",
    "additionalProperties": True,
}


def _fields(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    open_ = {"required": list(required), "additionalProperties": True}
    return _fields(model=_TEXT, **properties) | open_


def _generating(*required: str, **properties: Schema) -> Schema:
    return _object(required, **properties, stream=_SWITCH, priority={"type": "integer"})


def _content(kind: str, schema: Schema) -> Schema:
    return {"content": {kind: {"schema": schema}}}


_SAID: Schema = {"type": "array", "items": _fields(role=_TEXT)}
_WORKER: Schema = {
    "oneOf": [
        _fields(url=_TEXT, id=_TEXT) | {"required": ["url"]},
        {"type": "string", "description": "As after --worker."},
    ]
}
_FORM = _object(("file",), file={"type": "string", "format": "binary"})
_SCORED = _object(("query", "documents"), query=_TEXT, documents=_TEXTS)

# Bodies of routes that parse them on their own; any other route takes any object.
_BODIES: Mapping[tuple[str, str], Schema] = {
    ("post", "/v1/completions"): _generating("prompt", prompt=_PROMPT, max_tokens=_COUNT),
    ("post", "/v1/chat/completions"): _generating(
        "messages", messages=_SAID, max_completion_tokens=_COUNT
    ),
    ("post", "/v1/responses"): _generating(
        "input", input={"anyOf": [_TEXT, _SAID]}, max_output_tokens=_COUNT
    ),
    ("post", "/v1/messages"): _generating(
        "messages", "max_tokens", messages=_SAID, max_tokens=_COUNT
    ),
    ("post", "/v1/messages/count_tokens"): _object(("messages",), messages=_SAID),
    ("post", "/v1/embeddings"): _object(("input",), input=_PROMPT),
    ("post", "/v1/rerank"): _SCORED,
    ("post", "/v2/rerank"): _SCORED,
    ("post", "/rerank"): _SCORED,
    ("post", "/v1/audio/transcriptions"): _FORM,
    ("post", "/v1/audio/translations"): _FORM,
    ("post", "/v1/audio/speech"): _object(("input",), input=_TEXT),
    ("post", "/tokenize"): _object(prompt=_TEXT, messages=_SAID),
    ("post", "/detokenize"): _object(("tokens",), tokens=_TOKENS),
    ("post", "/workers"): _WORKER,
    ("patch", "/settings"): _SETTINGS,
}

_ERROR_FIELDS = _fields(
    message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": "integer"}
)
_ERROR: Schema = {
    "description": "An error in OpenAI's form.",
    **_content("application/json", _fields(error=_ERROR_FIELDS)),
}


def add_description(app: FastAPI) -> None:
    """Describe every route in ``/openapi.json``, also routes added later."""

    def described() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def describe(app: FastAPI) -> Schema:
    """All routes."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for route in app.routes:
        # Those that FastAPI does not describe.
        if isinstance(route, Route) and not isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                operations = schema["paths"].setdefault(route.path, {})
                operations[method.lower()] = _operation(route.path)
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            if body := _BODIES.get((method, path)):
                operation["requestBody"] = _body(body)
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _ERROR
    return schema


def _operation(path: str) -> Schema:
    generates = path in ENDPOINTS
    kinds = ("application/json", "text/event-stream") if generates else ("application/json",)
    wishes = (PRIORITY, REQUEST_TIMEOUT, QUEUE_TIMEOUT, TTFT, TPOT) if generates else ()
    return {
        "summary": "Generated by an engine" if generates else "Answered by an engine",
        "operationId": f"post{path.replace('/', '_')}",
        "parameters": [
            {"name": name, "in": "header", "schema": _TEXT} for name in ("X-Request-Id", *wishes)
        ],
        "requestBody": _body(_object()),
        "responses": {
            "200": {
                "description": "The engine's answer, unchanged.",
                "content": {kind: {} for kind in kinds},
            }
        },
    }


def _body(schema: Schema) -> Schema:
    kind = "multipart/form-data" if schema is _FORM else "application/json"
    return {"required": True, **_content(kind, schema)}
