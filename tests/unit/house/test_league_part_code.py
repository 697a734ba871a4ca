"""What a part of the league says of itself: which code decided it, and whether others did."""

import ast
from collections.abc import Iterator
from pathlib import Path

from loadgen.report.origin import ROOT
from tests.bench.league.parts import CODE, STEPS_LATE
from tests.bench.league.standings import LEADS

# What the emulator and the client import of the router without running it in a part.
DECIDES_NOTHING = {
    "router/cli.py": "which command runs",
    "router/commands/json_output.py": "where a command writes its JSON",
    "router/commands/options.py": "how a command declares its options",
    "router/core/errors.py": "messages",
    "router/core/forecast/forecast.py": "names of types",
    "router/core/targets.py": "targets of a replay's report",
    "router/file_limit.py": "how many files may be open, where too few are",
}


def files(paths: tuple[str, ...]) -> Iterator[Path]:
    for path in paths:
        place = ROOT / path
        yield from [place] if place.is_file() else place.rglob("*.py")


def of_router(file: Path) -> Iterator[str]:
    """The router's modules that a file imports, as paths."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("router."):
            yield f"{(node.module or '').replace('.', '/')}.py"


def test_a_part_is_stale_once_its_engines_or_its_client_change() -> None:
    named = set(files(CODE))
    assert len(named) > len(CODE)
    # No fleet of the league has the patch that admits requests by memory.
    ran = {path for file in named if "admission" not in file.parts for path in of_router(file)}
    assert {ROOT / path for path in ran - DECIDES_NOTHING.keys()} <= named
    assert ran >= DECIDES_NOTHING.keys(), "one is no longer imported"
    assert "tests/bench/league/parts.py" in CODE
    assert "tests/bench/league/starting.py" in CODE


def test_a_busy_machine_decides_no_place() -> None:
    assert STEPS_LATE <= LEADS
