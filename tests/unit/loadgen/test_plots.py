"""Pictures of emulated runs."""

import struct
from pathlib import Path

import pytest

import loadgen.report.load_pictures
from loadgen.emulator.record import StepRecord
from loadgen.report.load_pictures import (
    Panel,
    draw_bars,
    draw_loads,
    draw_power,
    require_matplotlib,
)
from router.core.errors import ConfigError

RECORD = [
    StepRecord(float(n), "all", n, 0.01, 0.0, (n, 2 * n), (1, 1), (0, 0), (200.0, 100.0 + n))
    for n in range(1, 200)
]
PANELS = [Panel("jsq", "average imbalance 1e4", RECORD, (10, 90)), Panel("bfio", "-", RECORD[:90])]


@pytest.mark.parametrize("draw", [draw_loads, draw_power])
def test_a_picture_of_the_width_of_a_page(draw: object, tmp_path: Path) -> None:
    assert callable(draw)
    path = tmp_path / "picture.png"
    draw(path, PANELS, "emulated")
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">II", header[16:]) == (1200, 480)


def test_matplotlib_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_matplotlib()
    monkeypatch.setattr(loadgen.report.load_pictures, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        require_matplotlib()


def test_bars_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "bars.png"
    draw_bars(path, ["jsq", "bfio"], {"TTFT": [300.0, 100.0], "failed": [0.0, 0.0]}, "emulated")
    assert path.read_bytes().startswith(b"\x89PNG")
