"""Kept figures say what decided them, and the check names those whose code has changed."""

from pathlib import Path

import pytest

from docs import generate, stale_figures
from loadgen.report.origin import Engines, origin
from tests.support.figure_files import write_figures, write_part

CODE = ("loadgen/report/origin.py", "loadgen/report/numbers.py")


def lines(folder: Path) -> list[str]:
    return list(stale_figures.stale_figures(folder))


def test_fresh_figures_give_no_line(tmp_path: Path) -> None:
    write_figures(tmp_path / "a.json", {"x": 1}, origin(Engines.REAL, CODE))
    assert lines(tmp_path) == []


def test_a_file_has_one_line_however_much_of_it_is_stale(tmp_path: Path) -> None:
    header = origin(Engines.REAL, CODE) | {"commit": "863708d" + 33 * "0", "date": "2026-11-23T1"}
    old = header | {"code": {**header["code"], CODE[1]: "0", "gone": "1"}}
    write_figures(tmp_path / "a.json", {"x": 1}, old)
    for name, each in (("one", header), ("two", old)):
        write_part(tmp_path / "b.json", name, {"x": 1}, each)
    (tmp_path / "c.json").write_text("{}")
    since = f"of 863708d on 2026-11-23; changed since: {CODE[1]}, gone"
    assert lines(tmp_path) == [
        f"a.json: {since}",
        f"b.json (two): {since}",
        "c.json: it does not say what decided it",
    ]


def test_many_paths_are_counted(tmp_path: Path) -> None:
    header = origin(Engines.REAL, ())
    write_figures(tmp_path / "a.json", {}, header | {"code": dict.fromkeys("abcdef", "0")})
    assert lines(tmp_path)[0].endswith("changed since: a, b, c, d and 2 more")


def test_the_check_warns_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "stale", dict)
    monkeypatch.setattr(stale_figures, "stale_figures", lambda: iter(["a.json: old"]))
    monkeypatch.setattr("sys.argv", ["generate", "--check"])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    assert not ended.value.code
    assert capsys.readouterr().out == "stale figures: a.json: old\n"
