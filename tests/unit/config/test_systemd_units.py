"""The systemd units, as systemd itself understands them."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from router.config.setting_sources import load_settings

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
ANALYZE = shutil.which("systemd-analyze")

needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ANALYZE or "", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / name)
    return parser


@needs_systemd
def test_units_are_understood(tmp_path: Path) -> None:
    """With this environment's evenstep in place of the one that is to be installed."""
    here = str(Path(sys.executable).with_name("evenstep"))
    for path in FOLDER.glob("evenstep.s*"):
        text = path.read_text().replace("/opt/evenstep/bin/evenstep", here)
        (tmp_path / path.name).write_text(text)

    done = analyze("verify", *map(str, tmp_path.iterdir()))

    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_service_can_do_little_but_serve() -> None:
    """Exposure is a tenth of what it says: 2.0 of 10, of which the network alone is 0.5."""
    done = analyze("security", "--offline=true", "--threshold=20", str(FOLDER / "evenstep.service"))

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_service_waits_until_streams_have_ended() -> None:
    service = unit("evenstep.service")["Service"]
    settings = load_settings({}, FOLDER / "evenstep.toml")

    assert service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) > settings.drain_delay_s + settings.grace_s + 10
    assert unit("evenstep.socket")["Socket"]["FileDescriptorName"] == "http"
    assert unit("evenstep.socket")["Socket"]["ListenStream"] == str(settings.port)
