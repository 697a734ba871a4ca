"""What is stale is measured again by the commands of its headers, which can all be run today."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import evidence
from docs.evidence import Job, command_of, jobs, listed, measure
from docs.stale_figures import changed, kept_headers
from loadgen.report.origin import UNKNOWN, Document, Engines, origin
from tests.support.docs import ROOT, text_of
from tests.support.figure_files import write_figures

CODE = ("loadgen/report/numbers.py",)
# What makes a file fresh, or fails, in place of a bench.
WRITE = """
import pathlib, sys
from loadgen.report.origin import Engines, origin
from tests.support.figure_files import write_figures
header = origin(Engines.REAL, ("loadgen/report/numbers.py",))
write_figures(pathlib.Path(sys.argv[1]), {"x": 2}, header)
"""
COMMANDS = sorted(
    {
        (command_of(header), str(file))
        for file, headers in kept_headers()
        for header in headers.values()
        if command_of(header) != UNKNOWN
    }
)


def stale(command: str, **more: object) -> Document:
    return origin(Engines.REAL, CODE) | {"command": command, "code": {CODE[0]: "old"}} | more


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for kept figures; nothing is written into the repository."""
    monkeypatch.setattr(evidence, "OUT", tmp_path / "out")
    monkeypatch.setattr(evidence, "INTERRUPTED", tmp_path / "out/interrupted.json")
    monkeypatch.setattr(evidence, "ROOT", ROOT)
    (tmp_path / "data").mkdir()
    (tmp_path / "write.py").write_text(WRITE)
    return tmp_path / "data"


def keep(data: Path, name: str, command: str, seconds: object = UNKNOWN) -> None:
    """A stale file; the header's time is not this process's."""
    write_figures(data / name, {"x": 1}, stale(command))
    kept = json.loads((data / name).read_text())
    kept["origin"]["seconds"] = seconds
    (data / name).write_text(json.dumps(kept))


def test_the_shortest_comes_first_and_the_unknown_last(data: Path) -> None:
    keep(data, "a.json", "python a.py", 90)
    keep(data, "b.json", ".venv/bin/python b.py")
    keep(data, "c.json", "python c.py", 5)
    keep(data, "d.json", ".venv/bin/python c.py", 7)
    keep(data, "e.json", UNKNOWN)
    write_figures(data / "fresh.json", {}, origin(Engines.REAL, CODE))
    every, unknown = jobs(data)
    assert [(job.command, job.seconds) for job in every] == [
        ("python c.py", 7),
        ("python a.py", 90),
        ("python b.py", None),
    ]
    assert listed(every, unknown).splitlines()[:2] == [
        "      7 s  python c.py",
        "           -> c.json; d.json",
    ]
    assert listed(every, unknown).endswith("no command is known for e.json")


def test_what_is_measured_is_fresh_and_what_fails_stops_nothing(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = f"python {data.parent}/write.py {data}/b.json"
    keep(data, "a.json", "echo no engine; exit 3", 1)
    keep(data, "b.json", writes, 2)
    keep(data, "c.json", "true", 3)
    assert measure(jobs(data)[0], None, data) == 2
    said = capsys.readouterr().out
    assert "failed with 3: no engine" in said
    assert "as stale as before: c.json" in said
    header = json.loads((data / "b.json").read_text())["origin"]
    assert changed(header) == []
    assert header["command"] == writes
    assert [job.command for job in jobs(data)[0]] == ["echo no engine; exit 3", "true"]


def test_the_time_ends_what_runs_and_what_would_be_too_long(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(data, "a.json", "read line < <(tail -f /dev/null)")
    assert measure(jobs(data)[0], 0.01, data) == 1
    assert "interrupted: the time is up" in capsys.readouterr().out
    (job,) = jobs(data)[0]
    assert job.seconds is not None
    job.seconds = 60
    monkeypatch.setattr(evidence, "_run", None)  # It would fail if it were called.
    assert measure([job], 0.5, data) == 0
    assert "the time is up for 1 more; the next: read line" in capsys.readouterr().out


def test_names_are_listed_by_file() -> None:
    job = Job("x", figures=[(Path("a.json"), "studies/one"), (Path("a.json"), "two")])
    assert job.names == "a.json: one, two"


@pytest.mark.parametrize(("command", "file"), COMMANDS)
def test_every_command_can_be_run_today(command: str, file: str) -> None:
    assert list(problems(command)) == []
    sources = "".join(script.read_text() for script in scripts(command))
    assert f"tests/data/{Path(file).parent}" in command + sources


def test_commands_that_cannot_be_run_are_known() -> None:
    assert list(problems("python tests/bench/bench_gone.py --json x")) == [
        "tests/bench/bench_gone.py is missing"
    ]
    assert list(problems("python -m tests.bench.bench_scale --new 3")) == ["--new is unknown"]
    assert list(problems("evenstep figures --no-such x && make nothing")) == [
        "--no-such is unknown",
        "no target nothing",
    ]
    assert list(problems("gapsum.py")) == ["gapsum.py is missing"]


def problems(command: str) -> Iterator[str]:
    """Files, targets and flags of a command line that do not exist."""
    for part in re.sub(r"\$\(.*?\)", "made", command).split(" && "):
        words = shlex.split(part)
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        text = "".join(script.read_text() for script in scripts(part))
        if words[0] == "evenstep":
            text = text_of("docs/commands.md")
        elif words[0] == "make":
            if not re.search(rf"^{words[1]}:", text_of("Makefile"), re.MULTILINE):
                yield f"no target {words[1]}"
        elif words[0] != "cp" and not text:
            yield f"{next((word for word in words if word.endswith('.py')), words[-1])} is missing"
            continue
        for flag in sorted(flags):
            if not re.search(rf"{flag}\b", text):
                yield f"{flag} is unknown"


def scripts(command: str) -> list[Path]:
    """The scripts that it runs, and what lies beside those of a folder of their own."""
    modules = [ROOT / found.replace(".", "/") for found in re.findall(r"-m (tests[\w.]+)", command)]
    named = [ROOT / found for found in re.findall(r"tests/[\w/]+\.py", command)]
    named += [each / "__main__.py" if each.is_dir() else Path(f"{each}.py") for each in modules]
    found = [script for script in named if script.exists()]
    beside = {script.parent for script in found} - {ROOT / "tests/bench"}
    return found + [file for folder in beside for file in folder.rglob("*.py") if file not in found]
