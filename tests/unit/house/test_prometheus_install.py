"""`make prometheus`: both programs, or a reason why not."""

from pathlib import Path

import pytest

from deploy.prometheus.install import main


def test_one_program_of_two_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVENSTEP_CACHE", str(tmp_path / "cache"))
    # Nothing can be downloaded either: there is no apt-get.
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    for name in ("prometheus", "promtool"):
        assert main() == 1, name
        assert "put prometheus and promtool on the PATH" in capfd.readouterr().err
        program = programs / name
        program.touch()
        program.chmod(0o755)

    assert main() == 0
    assert capfd.readouterr().out == f"{programs}\n"
