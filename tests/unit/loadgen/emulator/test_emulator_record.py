import gzip
from pathlib import Path

import pytest

from loadgen.emulator.record import RecordWriter, StepRecord, read_record
from router.core.errors import InputError

ROWS = [
    StepRecord(1.5, "all", 1, 0.005, 0.01, (3, 4), (1, 2), (0, 5), (400.0, 100.0)),
    StepRecord(2.25, "1", 2, 0.00512345678, -0.5, (0, 9), (0, 1), (0, 0), (0.0, 250.5)),
]


def written(path: Path) -> Path:
    writer = RecordWriter(path, workers=2)
    for row in ROWS:
        writer.write(row)
    writer.close()
    return path


@pytest.mark.parametrize("name", ["steps.csv", "steps.csv.gz"])
def test_what_was_written_is_read_back(tmp_path: Path, name: str) -> None:
    assert read_record(written(tmp_path / name)) == ROWS


def test_the_header_names_every_rank(tmp_path: Path) -> None:
    header = written(tmp_path / "steps.csv").read_text().splitlines()[0]
    assert header == (
        "time_s,stepped,step,step_s,lateness,"
        "load_0,running_0,waiting_0,power_0,load_1,running_1,waiting_1,power_1"
    )


def test_what_is_no_record_is_refused_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "steps.csv")
    path.write_text(path.read_text() + "1,all,x\n")
    with pytest.raises(InputError, match="line 4"):
        read_record(path)
    path.write_text("a,b\n")
    with pytest.raises(InputError, match="header"):
        read_record(path)
    with pytest.raises(InputError, match="cannot read"):
        read_record(tmp_path / "none.csv")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(b"time_s," * 100)[:-12])
    with pytest.raises(InputError, match="cannot read"):
        read_record(cut)
    with pytest.raises(InputError, match="cannot write"):
        RecordWriter(tmp_path / "no" / "folder.csv", 1)
