"""The complete list of uvicorn's internals that the router uses, checked once at start.

uvicorn does not promise to keep them.
"""

import dis
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from inspect import isfunction, signature

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

# The first that asks the parser for keep-alive before a request starts.
OLDEST = (0, 53)

PROTOCOL = (
    *("connections", "cycle", "expect_100_continue", "flow", "headers", "loop", "parser"),
    *("pipeline", "server_state", "tasks", "transport", "url"),
)
CYCLE = (
    *("body", "default_headers", "disconnected", "flow", "keep_alive", "message_event"),
    *("more_body", "on_response", "response_complete", "response_started", "scope", "transport"),
    "waiting_for_100_continue",
)
FLOW = ("write_paused",)
STATE = ("connections", "default_headers", "tasks", "total_requests")
# Methods overridden or called, with their parameters.
PROTOCOL_METHODS = {
    "__init__": ("config", "server_state", "app_state", "_loop"),
    "_start_asgi_task": ("cycle", "app"),
    "connection_lost": ("exc",),
    "connection_made": ("transport",),
    "data_received": ("data",),
    "on_body": ("body",),
    "on_header": ("name", "value"),
    "on_headers_complete": (),
    "on_message_begin": (),
    "on_message_complete": (),
    "on_response_complete": (),
    "pause_writing": (),
    "resume_writing": (),
    "shutdown": (),
}
FLOW_METHODS = {"resume_reading": ()}


def missing(
    protocol: type = HttpToolsProtocol,
    cycle: type = RequestResponseCycle,
    version: str = uvicorn.__version__,
) -> list[str]:
    """What this uvicorn lacks or has changed; empty if it can be used."""
    found = re.match(r"(\d+)\.(\d+)", version)
    old = found is None or (int(found[1]), int(found[2])) < OLDEST
    return [
        *([f"version {'.'.join(map(str, OLDEST))} or later"] if old else []),
        *_absent(protocol, PROTOCOL),
        *_absent(cycle, CYCLE),
        *_absent(FlowControl, FLOW),
        *_absent(ServerState, STATE),
        *_other(protocol, PROTOCOL_METHODS),
        *_other(FlowControl, FLOW_METHODS),
    ]


def attributes(kind: type) -> Set[str]:
    """Names that a class defines or its methods assign."""
    steps = [
        step
        for method in vars(kind).values()
        if isfunction(method)
        for step in dis.get_instructions(method)
    ]
    return {*vars(kind), *(step.argval for step in steps if step.opname == "STORE_ATTR")}


def _absent(kind: type, names: Iterable[str]) -> Iterator[str]:
    there = attributes(kind)
    return (f"{kind.__name__}.{name}" for name in names if name not in there)


def _other(kind: type, methods: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name, parameters in methods.items():
        method = vars(kind).get(name)
        if not isfunction(method) or tuple(signature(method).parameters)[1:] != parameters:
            yield f"{kind.__name__}.{name}({', '.join(parameters)})"
