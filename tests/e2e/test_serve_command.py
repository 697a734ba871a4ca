"""``evenstep serve`` as it is typed."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_busy_port_is_said_in_one_line(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "router.cli", "serve", "--port", "0", flag, port]
        done = subprocess.run(
            [*command, "--worker", "http://127.0.0.1:9"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; try another {flag}\n"
    )


@pytest.mark.parametrize("flag", ["--host", "--admin-host"])
def test_an_address_of_another_machine_is_no_fault_of_the_port(flag: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("operator sesame-open-yourself\n")
    keys.chmod(0o600)
    command = [sys.executable, "-m", "router.cli", "serve", "--worker", "http://127.0.0.1:9"]
    done = subprocess.run(
        [*command, "--port", "0", "--admin-port", "0", "--admin-key-file", keys, flag, "192.0.2.1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot listen on 192.0.2.1:0: Cannot assign requested address; "
        f"try another {flag}\n"
    )


def test_one_port_is_not_two() -> None:
    command = [sys.executable, "-m", "router.cli", "serve", "--worker", "http://127.0.0.1:9"]
    done = subprocess.run(
        [*command, "--port", "8000", "--admin-port", "8000"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: --admin-port 8000 is --port as well; give another\n"
