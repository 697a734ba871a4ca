"""CONTRIBUTING.md says what is so: its worked examples are applied to a copy, and have to work."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

# What the tables of packages are about; paths in them are relative to it.
FOLDERS = ("router", "router/core", "engine_patches", "loadgen")


class Example(NamedTuple):
    """The code of the three numbered paragraphs, and the row that the new one goes before."""

    function: str
    row: str
    next_row: str
    test: str


@pytest.fixture
def example() -> Example:
    places = re.findall(r"^\d\. [^`]*`([^`]+)`", GUIDE, re.MULTILINE)
    blocks = re.findall(r"^   ```python\n(.*?)^   ```$", GUIDE, re.MULTILINE | re.DOTALL)
    function, row, test = map(dedent, blocks)
    assert places == [
        "router/core/policies/baselines.py",
        '"power_of_two"',
        "tests/unit/core/policies/test_most_free.py",
    ]
    return Example(function, row, places[1], test)


@pytest.fixture
def clone(example: Example, tmp_path: Path) -> Path:
    """A copy of the router with the example applied as the text says."""
    shutil.copytree(
        ROOT / "router", tmp_path / "router", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in (
        "pyproject.toml",
        "tests/support/core.py",
        "tests/contract/test_policy_contract.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "router/core/policies/baselines.py").open("a", encoding="utf-8") as baselines:
        baselines.write(f"\n\n{example.function}")
    table = tmp_path / "router/core/policies/policy_table.py"
    before, after = table.read_text(encoding="utf-8").split(f"    {example.next_row}: ")
    row = indent(example.row, " " * 4)
    table.write_text(f"{before}{row}    {example.next_row}: {after}", encoding="utf-8")
    test = tmp_path / "tests/unit/core/policies/test_most_free.py"
    test.parent.mkdir(parents=True)
    test.write_text(example.test, encoding="utf-8")
    return tmp_path


def run(clone: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, cwd=clone, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_policy_is_one_function_one_row_and_one_test(example: Example) -> None:
    assert [type(node) for node in ast.parse(example.function).body] == [ast.FunctionDef]
    row = ast.parse(f"{{{example.row}}}", mode="eval").body
    assert isinstance(row, ast.Dict)
    assert [ast.literal_eval(key) for key in row.keys if key] == ["most_free"]
    nodes = ast.parse(example.test).body
    assert [type(node) for node in nodes if not isinstance(node, ast.ImportFrom)] == [
        ast.FunctionDef
    ]


def test_the_worked_example_works(clone: Path) -> None:
    tests = ("tests/unit/core/policies/test_most_free.py", "tests/contract/test_policy_contract.py")
    assert tests == tuple(re.findall(r"tests/\S+", GUIDE.rpartition("-m pytest")[2]))
    output = run(clone, "pytest", "-p", "no:cacheprovider", "-q", *tests, "-k", "most_free")
    passed = re.search(r"^(\d+) passed, \d+ deselected", output, re.MULTILINE)
    assert passed is not None, output
    assert int(passed[1]) > 10, "the policy's own test, and the contract suite on its row"


def test_the_worked_example_is_written_as_the_house_writes(clone: Path) -> None:
    paths = ("router/core/policies", "tests/unit/core/policies/test_most_free.py")
    run(clone, "ruff", "check", "--no-cache", *paths)
    run(clone, "ruff", "format", "--no-cache", "--check", *paths)


def test_a_setting_takes_its_declaration_and_its_use(tmp_path: Path) -> None:
    declaration, use = re.findall(r"^  ```python\n  (.*?)\n  ```$", GUIDE, re.MULTILINE | re.DOTALL)
    places = re.findall(r"^- Its (?:declaration|use), in [^`]*`([^`]+)`", GUIDE, re.MULTILINE)
    shutil.copytree(
        ROOT / "router", tmp_path / "router", ignore=shutil.ignore_patterns("__pycache__")
    )
    neighbours = "    max_attempts: int = live(", "    health_failures: int\n"
    for place, line, neighbour in zip(places, (declaration, use), neighbours, strict=True):
        path = tmp_path / place
        before, after = path.read_text(encoding="utf-8").split(neighbour)
        path.write_text(f"{before}    {line}\n{neighbour}{after}", encoding="utf-8")
    assert "--health-path PATH" in run(tmp_path, "router.cli", "serve", "--help")
    printed = run(tmp_path, "router.cli", "serve", "--health-path", "/ready", "--print-config")
    assert 'health_path = "/ready"' in printed
    (tmp_path / "used.py").write_text(
        "from router.config.setting_sources import load_settings\n"
        "from router.engines.health_checks import HealthSettings\n"
        "print(load_settings({'health_path': '/ready'}).of(HealthSettings).health_path)\n",
        encoding="utf-8",
    )
    assert run(tmp_path, "used") == "/ready\n"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_has_its_place_in_a_table(folder: str) -> None:
    packages = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    named = set(re.findall(r"`(\w+)/?`", GUIDE))
    assert len(packages) > 3
    assert packages <= named


def test_every_path_and_target_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w.-]+/[\w./-]*|[A-Z]+\.md)`", GUIDE))
    tables = [
        ROOT,
        *map(ROOT.joinpath, FOLDERS),
        ROOT / "router/admin",
        ROOT / "router/core/policies",
    ]
    missing = {path for path in named if not any((each / path).exists() for each in tables)}
    assert missing == {"tests/unit/core/policies/test_most_free.py"}, "the example's own file"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", GUIDE))
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert "venv" in targets
