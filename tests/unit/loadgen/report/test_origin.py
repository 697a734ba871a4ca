"""Headers of kept figures: what they hold, and when the code counts as changed."""

import hashlib
import json
import subprocess
import time
from pathlib import Path

import pytest

from docs.kept_figures import read_figures
from docs.stale_figures import changed, origins
from loadgen.report import origin as module
from loadgen.report.origin import (
    KEY,
    UNKNOWN,
    Document,
    Engines,
    code_hash,
    command,
    commit,
    origin,
    with_files,
)
from tests.support.figure_files import write_figures, write_part

SOURCE = '''"""Prose."""

import json

LIMIT = 3


def first(x: int) -> int:
    """Prose."""
    return x + LIMIT  # why


def second() -> str:
    return json.dumps(1)
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code that stands for the repository."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text(SOURCE)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def hash_of(folder: Path, **files: str) -> str | None:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return code_hash(".", folder)


def test_prose_layout_and_place_do_not_count(tmp_path: Path) -> None:
    first = hash_of(tmp_path / "0", a=SOURCE)
    head, _, tail = SOURCE.partition("def second")
    others = [
        hash_of(tmp_path / "1", b=SOURCE),
        hash_of(tmp_path / "2", a=SOURCE.replace("Prose", "Better prose").replace("  # why", "")),
        hash_of(tmp_path / "3", a=head, b=f"from json import dumps\n\n\ndef second{tail}"),
        hash_of(tmp_path / "4", a=SOURCE.replace("x + LIMIT", "(x\n            + LIMIT)")),
    ]
    assert [each for each in others if each != first] == []


@pytest.mark.parametrize(
    ("old", "new"), [("= 3", "= 4"), ("x + LIMIT", "LIMIT + x"), ("second", "third")]
)
def test_a_changed_definition_counts(tmp_path: Path, old: str, new: str) -> None:
    first = hash_of(tmp_path / "0", a=SOURCE)
    assert hash_of(tmp_path / "1", a=SOURCE.replace(old, new)) != first


def test_data_counts_byte_for_byte_and_pages_do_not(tmp_path: Path) -> None:
    assert code_hash("missing", tmp_path) is None
    (tmp_path / "lengths.csv").write_text("1,2\n")
    first = code_hash(".", tmp_path)
    (tmp_path / "README.md").write_text("Prose.\n")
    assert code_hash(".", tmp_path) == first
    assert code_hash("lengths.csv", tmp_path) == first
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "compiled.nbc").write_bytes(b"of this machine")
    assert code_hash(".", tmp_path) == first
    (tmp_path / "lengths.csv").write_text("1,3\n")
    assert code_hash(".", tmp_path) != first


def test_a_header_says_what_decided_the_figures(root: Path) -> None:
    header = origin(Engines.REAL, ("code",), vllm="0.32.0")
    assert header["engines"] == "real"
    assert header["commit"] == UNKNOWN
    assert header["physics"] is None
    assert header["versions"].keys() >= {"python", "evenstep", "numpy", "vllm"}
    assert header["machine"]["cores"] >= 1
    assert str(root) not in json.dumps(header)
    assert changed(header) == []
    told = origin(Engines.EMULATED, (), {"prefix_caching": True})
    assert told["physics"] == {"prefix_caching": True}
    (root / "code/b.py").write_text("MORE = 1\n")
    assert changed(header) == ["code"]
    unlike = {"code": code_hash("code"), "gone": "1", "not recorded": None, "code/a.py": None}
    assert changed({**header, "code": unlike}) == ["gone", "code/a.py"]


def test_the_commit_is_this_repositorys_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        name = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", "-C", str(root), *name, *words], check=True, capture_output=True)

    (root / "tests/data").mkdir(parents=True)
    others = [root / "tests/data/a.json", root / "code/page.md"]
    for file in others:
        file.write_text("{}")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    assert len(commit()) == 40
    for file in others:
        file.write_text("[]")
    assert len(commit()) == 40
    (root / "code/a.py").write_text("")
    assert commit().endswith(" with changes")
    monkeypatch.setattr(module, "ROOT", root / "code")
    assert commit() == UNKNOWN


def test_files_and_parts_of_files_are_read_again(tmp_path: Path) -> None:
    header = origin(Engines.EMULATED, ("loadgen/report/origin.py",))
    file, parts = tmp_path / "file.json", tmp_path / "parts.json"
    write_figures(file, {KEY: "of the command", "tokens": 5}, header)
    assert read_figures(file) == {"tokens": 5}
    ((name, kept),) = origins(json.loads(file.read_text()))
    assert (name, kept | run_of(header)) == ("", header)
    write_part(parts, "a", {"tokens": 1}, header)
    write_part(parts, "b", {"tokens": 2}, header)
    write_part(parts, "a", {"tokens": 3}, header)
    assert read_figures(parts)["a"] == {
        KEY: kept | run_of(read_figures(parts)["a"][KEY]),
        "tokens": 3,
    }
    assert [name for name, _ in origins(read_figures(parts))] == ["a", "b"]


def run_of(header: Document) -> Document:
    """What the writer notes at last."""
    return {key: header[key] for key in ("load", "seconds")}


def test_a_kept_header_says_how_the_machine_was_and_how_long_it_took(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([(1.004, 2.0, 3.0), (4.0, 5.0, 6.0)])
    monkeypatch.setattr(module, "_LOAD", (0.25, 0.5, 0.75))
    monkeypatch.setattr("os.getloadavg", lambda: next(loads))
    monkeypatch.setattr(module, "_BEGUN_S", time.monotonic() - 60)
    header = origin(Engines.REAL, ())
    assert header["load"] == {"start": [0.25, 0.5, 0.75], "end": [1.0, 2.0, 3.0]}
    write_figures(root / "a.json", {}, header)
    kept = json.loads((root / "a.json").read_text())[KEY]
    assert kept["load"]["end"] == [4.0, 5.0, 6.0]
    assert 60 <= kept["seconds"] < 120


def test_a_header_names_the_files_of_its_run(root: Path) -> None:
    picture = root / "a.png"
    picture.write_bytes(b"picture")
    write_figures(root / "a.json", {}, origin(Engines.REAL, ()), picture)
    kept = json.loads((root / "a.json").read_text())[KEY]["files"]
    assert kept == {"a.png": hashlib.sha256(b"picture").hexdigest()}
    assert with_files({"x": 1}) == {"x": 1}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([".venv/bin/python", "-m", "tests.x"], "python -m tests.x"),
        (["/usr/bin/python3", "/tmp/x.py", "--json", "{root}/a b"], "python x.py --json 'a b'"),
        (["/usr/bin/python3", "/opt/bin/evenstep", "demo"], "evenstep demo"),
    ],
)
def test_commands_can_be_given_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.delenv(module.COMMAND_VARIABLE, raising=False)
    monkeypatch.setattr("sys.orig_argv", [word.replace("{root}", str(root)) for word in words])
    assert command() == told
    monkeypatch.setenv(module.COMMAND_VARIABLE, "evenstep demo && cp a b")
    assert command() == "evenstep demo && cp a b"
