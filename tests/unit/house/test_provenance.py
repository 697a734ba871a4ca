"""Every file under tests/data says where it is from."""

from pathlib import Path

import pytest

from docs.provenance import RENDERED, without_provenance
from docs.stale_figures import DATA, kept_headers
from loadgen.report.origin import UNKNOWN, Engines, origin
from tests.support.figure_files import write_figures, write_part

KEYS = {
    *("engines", "physics", "commit", "date", "command", "machine", "load", "seconds"),
    *("versions", "code"),
}
FURTHER = {"physics", "again", "files", "note", "source"}
HEADERS = [
    pytest.param(header, id=f"{file}: {part}")
    for file, headers in kept_headers()
    for part, header in headers.items()
]


def test_every_file_says_where_it_is_from() -> None:
    assert list(without_provenance()) == []


@pytest.mark.parametrize("header", HEADERS)
def test_headers_are_whole(header: dict[str, object]) -> None:
    assert KEYS - FURTHER <= header.keys() <= KEYS | FURTHER
    assert Engines(str(header["engines"]))
    assert header["code"] or header["source"]
    if header["load"] == UNKNOWN:
        assert header["seconds"] == UNKNOWN
    else:
        assert isinstance(header["load"], dict)
        assert [len(header["load"][when]) for when in ("start", "end")] == [3, 3]
        assert isinstance(header["seconds"], int)


def test_only_what_is_there_is_rendered() -> None:
    assert [name for name in RENDERED if not (DATA / name).exists()] == []


def test_a_file_is_accounted_for_by_the_run_that_wrote_it(tmp_path: Path) -> None:
    folder = tmp_path / "speed"
    folder.mkdir()
    picture, steps = folder / "speed.png", folder / "steps.npz"
    picture.write_bytes(b"a picture")
    steps.write_bytes(b"steps")
    header = origin(Engines.REAL, ())
    write_figures(folder / "speed.json", {"x": 1}, header, picture)
    assert list(without_provenance(tmp_path)) == ["speed/steps.npz: no header names it"]
    write_part(folder / "parts.json", "a", {"x": 1}, header, steps)
    assert list(without_provenance(tmp_path)) == []
    picture.write_bytes(b"another")
    steps.unlink()
    assert list(without_provenance(tmp_path)) == [
        "speed/speed.png: its header knows other bytes",
        "speed/steps.npz: a header names it, and it is gone",
    ]


def test_json_needs_a_header_for_the_whole_or_for_each_part(tmp_path: Path) -> None:
    write_part(tmp_path / "parts.json", "a", {"x": 1}, origin(Engines.REAL, ()))
    text = (tmp_path / "parts.json").read_text()
    (tmp_path / "parts.json").write_text(text.rstrip().removesuffix("}") + ', "b": {"x": 2}}')
    (tmp_path / "nothing.json").write_text("{}")
    assert list(without_provenance(tmp_path)) == [
        "nothing.json: no header",
        "parts.json: b has no header",
    ]
