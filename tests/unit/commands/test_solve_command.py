import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]

INSTANCE: dict[str, Any] = {
    "loads": [[100, 101], [90, 91], [50, 51]],
    "candidates": [60, 40, 9, 5],
    "growth": 1,
    "capacity": [0, 1, 1],
    "weights": [1, 1],
}
# 9 on the second and 40 on the third: [100, 99, 90] and [101, 101, 92] are the highest 100 and 101.
OPTIMUM = (1 + 10) + (0 + 9)


@pytest.fixture
def run(evenstep: Run) -> Run:
    return partial(evenstep, "solve")


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    def write(**changes: Any) -> str:
        path = tmp_path / "instance.json"
        path.write_text(json.dumps(INSTANCE | changes))
        return str(path)

    return write


def test_who_goes_where(run: Run, file: Callable[..., str]) -> None:
    code, out, _ = run(file())
    assert code == 0
    assert "3 workers, 4 candidates, 2 enter, 2 steps" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "1", "90", "99", "2", "(9)"] in rows
    assert ["2", "1", "50", "90", "1", "(40)"] in rows
    assert f"solver: objective {OPTIMUM:.1f} after" in out
    assert "HiGHS" not in out


def test_the_optimum_and_the_gap(run: Run, file: Callable[..., str]) -> None:
    code, out, _ = run(file(), "--exact")
    assert code == 0
    assert f"HiGHS: objective {OPTIMUM:.1f}, bound {OPTIMUM:.1f} (proven)" in out
    assert "gap of the solver: 0.000 %, at most 0.000 %" in out


def test_json_on_stdout_leaves_the_table_to_stderr(run: Run, file: Callable[..., str]) -> None:
    code, out, err = run(file(), "--exact", "--json", "-")
    report = json.loads(out)
    assert code == 0
    assert report["objective"] == report["exact"]["objective"] == OPTIMUM
    assert report["places"] == report["exact"]["places"] == [-1, 2, 1, -1]
    assert report["exact"]["proven"] is True
    assert report["gap_percent"] == 0
    assert "3 workers" in err


def test_json_without_the_optimum(run: Run, file: Callable[..., str], tmp_path: Path) -> None:
    assert run(file(), "--json", str(tmp_path / "out.json"))[0] == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report) == {"tie_weight", "objective", "moves", "places"}


def test_the_budget_is_kept(run: Run, file: Callable[..., str]) -> None:
    frugal = json.loads(run(file(), "--moves", "0", "--json", "-")[1])
    assert frugal["moves"] < json.loads(run(file(), "--json", "-")[1])["moves"]


def test_the_tie_weight_is_left_out_of_the_exact_program(
    run: Run, file: Callable[..., str]
) -> None:
    _, out, _ = run(file(tie_weight=0.1), "--exact")
    assert "tie weight 0.1 left out" in out
    assert "gap of the solver: 0.000 %" in out
    assert "left out" not in run(file(tie_weight=0.1))[1]


def test_an_optimum_of_nothing_and_no_time(run: Run, file: Callable[..., str]) -> None:
    loads = [[1000, 1000], [900, 900], [800, 800]]
    hard = {"loads": loads, "candidates": [60, 40, 9, 5], "capacity": [0, 1, 1]}
    code, out, _ = run(file(**hard), "--exact", "--time-limit", "0")
    assert code == 0
    assert "bound 0.0 (not proven in time)" in out
    assert "gap of the solver: 0.000 %, at most unknown" in out


def test_without_highs_it_says_what_to_install(
    run: Run, file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    for name in ("exact", "exact_model"):
        monkeypatch.delitem(sys.modules, f"router.core.policies.bfio.{name}", raising=False)
    code, _, err = run(file(), "--exact")
    assert code == 2
    assert "pip install highspy" in err
    assert run(file())[0] == 0


def test_a_budget_beyond_all_bounds(run: Run, file: Callable[..., str]) -> None:
    code, _, err = run(file(), "--moves", "2000000000000000000")
    assert code == 2
    assert "--moves" in err
    assert "less than or equal to 1000000000000" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not an instance: Expected `object`"),
        (json.dumps(INSTANCE | {"loads": [[1], [2, 3]]}), "loads[1] should have 1 entries"),
        (json.dumps(INSTANCE | {"tie_weight": float("nan")}), "at `$.tie_weight`"),
        (json.dumps(INSTANCE | {"loads": [[1e308, 1]] * 3}), "at `$.loads[0][0]`"),
        (
            json.dumps(INSTANCE | {"tie_weight": 1, "weights": [1, 1e-310]}),
            "tie_weight cannot stand beside weights so close to 0",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    run: Run, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    code, out, err = run(str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}")
    assert message in err
    assert err.count("\n") == 1


def test_files_that_cannot_be_read_or_written(
    run: Run, file: Callable[..., str], tmp_path: Path
) -> None:
    missing = run(str(tmp_path / "none.json"))
    assert missing[0] == 2
    assert "No such file" in missing[2]
    unwritable = run(file(), "--json", str(tmp_path / "no" / "out.json"))
    assert unwritable[0] == 2
    assert "--json: cannot write" in unwritable[2]
