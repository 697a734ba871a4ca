from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.uvicorn_api import (
    CYCLE,
    FLOW_METHODS,
    OLDEST,
    PROTOCOL,
    PROTOCOL_METHODS,
    STATE,
    attributes,
    missing,
)

ROOT = Path(__file__).resolve().parents[2]
USED = re.compile(
    r"^\s*from (uvicorn\.protocols|uvicorn\.server|router\.http\.protocol) ", re.MULTILINE
)


def sources() -> dict[str, ast.Module]:
    """The files that can have uvicorn's connections and requests in their hands."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in (ROOT / "router").rglob("*.py")
        if path.name != "uvicorn_api.py"
    }
    return {name: ast.parse(text) for name, text in texts.items() if USED.search(text)}


def uvicorns() -> set[str]:
    kinds = (HttpToolsProtocol, RequestResponseCycle, FlowControl, ServerState)
    names = {name for kind in kinds for name in attributes(kind)}
    return {name for name in names if not name.startswith("__")}


def overridden(module: ast.Module) -> Iterator[str]:
    """Methods that are uvicorn's as well."""
    theirs = attributes(HttpToolsProtocol)
    for kind in ast.walk(module):
        if isinstance(kind, ast.ClassDef):
            methods = (each for each in kind.body if isinstance(each, ast.FunctionDef))
            yield from (method.name for method in methods if method.name in theirs)


def test_the_installed_one_has_all_of_it() -> None:
    assert missing() == []


def test_the_bound_of_the_dependency_is_the_oldest_that_will_do() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (pinned,) = (each for each in project["dependencies"] if each.startswith("uvicorn"))

    assert pinned == f"uvicorn>={OLDEST[0]}.{OLDEST[1]},<1"


@pytest.mark.parametrize("version", ["0.52.4", "0.9", "unknown"])
def test_another_version_is_named(version: str) -> None:
    assert missing(version=version) == ["version 0.53 or later"]


@pytest.mark.parametrize("version", ["0.53.0", "0.60.0.dev1", "1.0"])
def test_later_versions_will_do(version: str) -> None:
    assert missing(version=version) == []


def test_what_a_protocol_lacks_is_named() -> None:
    class Protocol(HttpToolsProtocol):
        """Another generation: what it has is its own."""

        def on_body(self, body: bytes) -> None: ...

        def _start_asgi_task(self, cycle: object) -> None:  # type: ignore[override]
            self.tasks = set()

    found = missing(protocol=Protocol)

    assert "Protocol._start_asgi_task(cycle, app)" in found
    assert "Protocol.pipeline" in found
    assert not {"Protocol.tasks", "Protocol.on_body(body)"} & set(found)


def test_what_a_request_lacks_is_named() -> None:
    class Cycle:
        __slots__ = tuple(name for name in CYCLE if name != "keep_alive")

    assert missing(cycle=Cycle) == ["Cycle.keep_alive"]


def test_all_that_is_used_is_listed() -> None:
    listed = {*PROTOCOL, *CYCLE, *STATE, *PROTOCOL_METHODS, *FLOW_METHODS}
    unlisted = uvicorns() - listed
    files = sources()
    assert "router/http/protocol.py" in files

    used = {
        f"{name}:{node.lineno} {node.attr}"
        for name, module in files.items()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and node.attr in unlisted
    }
    methods = {
        name: set(overridden(module)) - {*PROTOCOL_METHODS} for name, module in files.items()
    }

    assert used == set()
    assert {name: found for name, found in methods.items() if found} == {}
