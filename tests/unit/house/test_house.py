"""The rules that the repository sets itself and that no linter checks."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles

import pytest

from engine_patches.plugin.compat import TESTED_VERSIONS
from tests.support.docs import GUIDE, pages, text_of

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("router", "engine_patches", "loadgen")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield path, node


def function_lengths() -> dict[str, int]:
    """Lines of every function, signature and docstring included."""
    return {
        f"{place(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, Function)
    }


def tracked_texts() -> Iterator[tuple[str, str]]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listing.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            yield name, content.decode(errors="replace")


def documented_commands(program: str) -> set[str]:
    """First arguments of a program in the fenced blocks of README and docs/."""
    written = "\n".join(text_of(page) for page in pages() if page != GUIDE)
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", written, re.MULTILINE | re.DOTALL))
    return set(re.findall(rf"^[^#\n]*?\b{program} +([a-z][a-z-]*)", blocks, re.MULTILINE))


def evenstep(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("evenstep")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_functions_are_short() -> None:
    lengths = function_lengths()

    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}
    assert median(lengths.values()) <= 10
    assert quantiles(lengths.values(), n=10)[-1] <= 34  # as in httpx


def test_files_are_short() -> None:
    lengths = {place(path): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}

    assert {name: lines for name, lines in lengths.items() if lines > 450} == {}
    assert quantiles(lengths.values(), n=10)[-1] <= 330


def test_the_folders_of_unit_tests_are_those_of_the_source() -> None:
    """Those of router/ stand without its name; house/ has the rules of the repository."""
    units = ROOT / "tests" / "unit"
    tested = {path.parent.relative_to(units) for path in units.rglob("test_*.py")}
    sources = {path.parent.relative_to(ROOT) for path in SOURCES}
    known = sources | {path.relative_to("router") for path in sources if path.parts[0] == "router"}

    assert tested - known == {Path("house")}


def test_no_two_test_files_have_one_name() -> None:
    """Pytest could not read both in one run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []


def test_names_say_what_things_are() -> None:
    defined = [
        f"{place(path)}:{node.lineno} {node.name}"
        for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, Function | ast.ClassDef)
    ]
    vague = re.compile(r"manager|helper|utils", re.IGNORECASE)

    assert [name for name in [*map(place, SOURCES), *defined] if vague.search(name)] == []


def test_one_version() -> None:
    version = metadata.version("evenstep")

    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r"\d+\.\d+\.\d+\S*", evenstep("--version")) == [version]


def test_the_extra_asks_for_a_vllm_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    major, newest = TESTED_VERSIONS[-1].split(".")

    assert project["optional-dependencies"]["vllm"] == [
        f"vllm>={TESTED_VERSIONS[0]},<{major}.{int(newest) + 1}"
    ]


def test_the_docs_name_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))

    assert targets >= documented_commands("make") > set()


def test_the_docs_name_evenstep_commands_that_exist() -> None:
    listed = set(re.findall(r"[a-z]+", evenstep("--help")))

    assert listed >= documented_commands("evenstep") > set()


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"(?<![\w.$}~-])/(?:work|root|home|Users)/\w", id="machine path"),
        pytest.param(
            r"[-_](?:index[-_]url|find[-_]links)\b|https?://\S+/simple\b", id="package index"
        ),
        pytest.param(r"\"resolved\": *\"http", id="lock file host"),
    ],
)
def test_nothing_is_tied_to_a_machine(pattern: str) -> None:
    found = re.compile(pattern)
    own = place(Path(__file__))

    tied = [
        f"{name}:{number}"
        for name, text in tracked_texts()
        if name != own
        for number, line in enumerate(text.splitlines(), 1)
        if found.search(line)
    ]

    assert tied == []
