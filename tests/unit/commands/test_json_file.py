"""The option --json: refused before the work, written after it."""

import json
import os
from pathlib import Path

import pytest

from router.commands.json_output import writable, write_json
from router.core.errors import InputError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "made").mkdir()
    return tmp_path


@pytest.mark.parametrize("file", [None, "-", "new.json", "old.json", "made/new.json", "/dev/null"])
def test_what_can_be_written_is_not_touched(folder: Path, file: str | None) -> None:
    assert writable(file) == file
    assert sorted(path.name for path in folder.rglob("*")) == ["made", "old.json"]
    assert (folder / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("", "it is a folder"),
        ("made", "it is a folder"),
        ("none/new.json", "there is no folder none"),
        ("old.json/new.json", "there is no folder old.json"),
        ("n" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_said_with_the_reason(folder: Path, file: str, why: str) -> None:
    with pytest.raises(InputError, match=f"^--json: cannot write {file}: {why}$"):
        writable(file)


@pytest.mark.parametrize(
    ("file", "locked"), [("old.json", "old.json"), ("made/new.json", "made"), ("new.json", ".")]
)
def test_permissions_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, locked: str
) -> None:
    # Root, as whom tests may run, has every permission.
    monkeypatch.setattr(os, "access", lambda path, _: path != Path(locked))
    with pytest.raises(InputError, match="no permission"):
        writable(file)


def test_a_report_is_written_where_it_was_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"steps": 3, "ratio": None}
    write_json(report, None)
    assert capsys.readouterr().out == ""
    write_json(report, "-")
    assert json.loads(capsys.readouterr().out) == report
    write_json(report, "old.json")
    assert json.loads((folder / "old.json").read_text()) == report


def test_a_folder_that_went_meanwhile_is_said() -> None:
    with pytest.raises(InputError, match=r"^cannot write none/new\.json: No such file"):
        write_json({}, "none/new.json")
