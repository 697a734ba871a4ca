"""A router that has no file descriptors left: it says so, and nobody else is to blame."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.raw_http import LAST, Front, connect, exchange, fronted, read_all, replies_in
from tests.support.server import wait_until

ROOM = 60


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with fronted(tmp_path, "--health-interval", "0.05") as front:
        yield front


def limit(pid: int) -> None:
    """Leave it room for some connections only."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    most = len(list(Path(f"/proc/{pid}/fd").iterdir())) + ROOM
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))


def test_it_answers_503_and_all_who_are_there_stay(front: Front) -> None:
    limit(front.router.process.pid)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(front.port)) for _ in range(6 * ROOM)]
        wait_until(
            lambda: b"no file descriptors are left" in front.router.log.read_bytes(),
            60,
            "the log says it",
        )
        told = [sock for sock in idle if _readable(sock)]
        (refused,) = replies_in(read_all(told[0]))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "no file descriptors left" in refused.error["message"]
        (served,) = replies_in(_ask(idle[0]))
        assert served.status == 200
    wait_until(lambda: b" 200 " in exchange(front.port, LAST), 60, "it serves again")
    log = front.router.log.read_text()
    assert "is down" not in log
    assert "raise ulimit -n" in log


def _ask(sock: socket.socket) -> bytes:
    sock.sendall(LAST)
    return read_all(sock)


def _readable(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return False
    finally:
        sock.settimeout(60)
