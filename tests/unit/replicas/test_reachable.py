"""The URL at which other replicas find one."""

import socket
from typing import Any

import pytest

from router.replicas.leading import reachable


@pytest.mark.parametrize(
    ("listens", "own", "url"),
    [
        ("http://127.0.0.1:8000", "10.0.0.7", "http://127.0.0.1:8000"),
        ("https://0.0.0.0:8443", "10.0.0.7", "https://10.0.0.7:8443"),
        ("http://[::]:8000", "fd00::7", "http://[fd00::7]:8000"),
        ("http://0.0.0.0:8000", "127.0.1.1", "http://machine:8000"),
        ("http://0.0.0.0:8000", "", "http://machine:8000"),
    ],
)
def test_it_is_the_machines_where_all_addresses_are_listened_on(
    monkeypatch: pytest.MonkeyPatch, listens: str, own: str, url: str
) -> None:
    def resolved(*_: Any) -> Any:
        if not own:
            raise OSError("not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (own, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "machine")
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert reachable(listens) == url
