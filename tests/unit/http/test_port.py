"""Which hosts only this machine can reach."""

import pytest

from router.http.port import is_loopback


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.8.7", "::1", "[::1]", "localhost", "LocalHost"]
)
def test_names_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.0.2.1", "::", "router.example", "localhost.example", ""]
)
def test_names_that_others_may_reach(host: str) -> None:
    assert not is_loopback(host)
