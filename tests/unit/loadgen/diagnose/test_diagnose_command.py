"""``evenstep diagnose`` on files: what it prints, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.core.types import Dispatch
from router.recording.lines import Line, Recording, encode
from tests.conftest import Run
from tests.support.recorded import Cluster, header, recording, step

SOME = ("--policies", "bfio")


def written(folder: Path, whole: Recording, name: str = "minute.jsonl") -> str:
    file = folder / name
    lines: list[Line] = [whole.header, *whole.steps, *whole.requests]
    file.write_bytes(b"".join(map(encode, lines)))
    return str(file)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("uneven"), recording(Cluster()))


def diagnosed(evenstep: Run, *flags: str) -> tuple[dict[str, Any], str]:
    code, out, err = evenstep("diagnose", *flags, "--json", "-")
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)
    return report, " ".join(err.split())


def test_an_uneven_minute(evenstep: Run, uneven: str) -> None:
    report, said = diagnosed(evenstep, "--recording", uneven, "--price", "0.3", *SOME)
    rows = {(row["policy"], row["dispatch"]): row for row in report["policies"]}
    now, bfio = rows["round_robin", "instant"]["predicted"], rows["bfio", "pool"]["predicted"]

    assert report["verdict"] == "balancing_pays"
    assert report["advice"] == {"policy": "bfio", "dispatch": "pool"}
    assert now["idle_share"] == report["waiting"]["idle_share"]
    assert report["extra_tok_s"] == bfio["throughput_tok_s"] - now["throughput_tok_s"]
    energy = report["energy"]
    # Nobody has measured watts, so there are none, and no money.
    assert (energy["power_is"], energy["power_w"], energy["per_day_cost"]) == ("unknown",) + (
        None,
    ) * 2
    assert energy["saved_share"] is not None
    assert said.startswith("Balancing pays here. Workers wait for the fullest one")
    for question in ("barrier?", "waiting?", "KV memory short?", "load enough?", "simulated?"):
        assert question in said
    assert "Of the policy in force it is off by: idle share" in said
    assert "Unknown: too few workers tell their power" in said


def test_a_part_of_a_minute(evenstep: Run, uneven: str) -> None:
    part = ("--start", "2", "--seconds", "3", "--time-scale", "1")
    report, _ = diagnosed(evenstep, "--recording", uneven, *part, *SOME)

    assert report["conditions"]["seconds"] == pytest.approx(3)
    assert report["conditions"]["steps"] == pytest.approx(1200 * 3 / 7.4, rel=0.1)


def test_prediction_and_measurement_after_a_switch(
    evenstep: Run, uneven: str, tmp_path: Path
) -> None:
    before, _ = diagnosed(evenstep, "--recording", uneven, *SOME)
    earlier = tmp_path / "before.json"
    earlier.write_text(json.dumps(before))
    # Who observes does not know the policy: it is taken to be the advised one.
    even = Cluster("bfio", Dispatch.POOL)
    unknown = recording(even, source="observe", policy=None, dispatch=None)
    flags = ("--recording", written(tmp_path, unknown), "--before", str(earlier), *SOME)
    report, said = diagnosed(evenstep, *flags)
    change = report["comparison"]["changes"]["idle_share"]

    assert report["comparison"]["policy"] == "bfio, pool"
    assert change["before"] == before["waiting"]["idle_share"]
    assert change["measured"] == report["waiting"]["idle_share"]
    assert change["measured_gain"] == change["measured"] - change["before"]
    assert change["gain_error"] == pytest.approx(0, abs=0.2)
    assert "After the switch from round_robin to bfio, pool:" in said
    assert report["comparison"]["load_changed"] == []


def test_a_cut_recording_of_nothing(evenstep: Run, tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_bytes(encode(header(2)) + encode(step(1, [5, 5])) + b'{"step":2,"gr')
    report, said = diagnosed(evenstep, "--recording", str(file))

    assert report["verdict"] == "too_short"
    assert report["policies"] == []
    assert report["comparison"] is None
    assert "Too little was recorded to tell. 1 steps were recorded; 200 are needed." in said
    assert "lines are missing, the figures are of the rest" in said
    assert "Unknown: too few workers tell their power" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --url of an admin port, or --recording of a file: one of them"),
        (("--url", "http://h", "--recording", "x"), "one of them"),
        (("--url", "h:1"), "--url: 'h:1' is no URL; write http://HOST:PORT of an admin port"),
        (("--url", "http://127.0.0.1:1"), "start evenstep serve or observe with --admin-port"),
        (("--url", "http://h", "--start", "3"), "--start is of a file"),
        (("--url", "http://h", "--seconds", "3601"), "is more than an hour; record to a file"),
        (("--recording", "none.jsonl"), "none.jsonl"),
        (("--recording", "/dev/null"), "/dev/null: is empty; give a file that --record wrote"),
        (("--recording", "x", "--seconds", "0.5"), "--seconds must be a number from 1 up, got 0.5"),
        (("--recording", "x", "--seconds", "nan"), "--seconds must be a number from 1 up, got nan"),
        (("--recording", "x", "--start", "-1"), "--start must be a number from 0 up, got -1"),
        (("--recording", "x", "--price", "inf"), "--price must be a number from 0 up, got inf"),
        (("--recording", "x", "--time-scale", "0"), "--time-scale"),
        (("--recording", "x", "--policies", "bfoi"), "--policies: unknown policy 'bfoi'; did you"),
        (("--recording", "x", "--before", "no.json"), "--before: cannot read no.json: No such"),
        (("--recording", "x", "--json", "no/x.json"), "--json: cannot write no/x.json"),
    ],
)
def test_bad_input(evenstep: Run, flags: tuple[str, ...], message: str) -> None:
    code, out, err = evenstep("diagnose", *flags)

    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "is no diagnosis that --json wrote"), ("{}", "predicts nothing")],
)
def test_an_earlier_diagnosis_that_is_none(
    evenstep: Run, uneven: str, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "before.json"
    file.write_text(text)
    code, _, err = evenstep("diagnose", "--recording", uneven, "--before", str(file), *SOME)

    assert code == 2
    assert message in " ".join(err.split())
