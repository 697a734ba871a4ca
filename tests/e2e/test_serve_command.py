"""``evenstep serve`` as it is typed."""

from __future__ import annotations

import socket
import subprocess
import sys


def test_a_busy_port_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "router.cli", "serve", "--port", port]
        done = subprocess.run(
            [*command, "--worker", "http://127.0.0.1:9"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; try another --port\n"
    )
