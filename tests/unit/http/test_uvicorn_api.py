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
    FLOW,
    FLOW_METHODS,
    OLDEST,
    PROTOCOL,
    PROTOCOL_METHODS,
    STATE,
    attributes,
    missing,
)

ROOT = Path(__file__).resolve().parents[3]
USED = re.compile(r"^\s*from (uvicorn\.|router\.http\.protocol )", re.MULTILINE)


def sources() -> dict[str, ast.Module]:
    """The files that can have uvicorn's connections and requests in their hands."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in (ROOT / "router").rglob("*.py")
        if path.name != "uvicorn_api.py"
    }
    return {name: ast.parse(text) for name, text in texts.items() if USED.search(text)}


def used(module: ast.Module) -> Iterator[str]:
    """Attributes of whatever is not the module's own, and methods that are overridden."""
    for kind in module.body:
        own = isinstance(kind, ast.ClassDef) and "HttpToolsProtocol" not in map(
            ast.unparse, kind.bases
        )
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and not (own and ast.unparse(node.value) == "self"):
                yield node.attr
            elif isinstance(node, ast.FunctionDef) and not own:
                yield node.name


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


def test_all_that_is_used_is_listed_and_nothing_else() -> None:
    kinds = (HttpToolsProtocol, RequestResponseCycle, FlowControl, ServerState)
    theirs = set().union(*map(attributes, kinds)) - set(dir(type))
    listed = {*PROTOCOL, *CYCLE, *FLOW, *STATE, *PROTOCOL_METHODS, *FLOW_METHODS}
    files = {name: theirs & set(used(module)) for name, module in sources().items()}

    assert files.keys() >= {"router/http/client_protocol.py", "router/proxy/splice.py"}
    assert {name: found - listed for name, found in files.items() if found - listed} == {}
    assert listed - set().union(*files.values()) == {"__init__"}
