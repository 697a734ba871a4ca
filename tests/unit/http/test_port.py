"""Which hosts only this machine can reach; how an end begins."""

import pytest

from router.http.port import Lifecycle, is_loopback


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


def test_the_drain_is_told_once_it_begins() -> None:
    told: list[bool] = []
    lifecycle = Lifecycle(drain_delay_s=0.0, grace_s=1.0)
    lifecycle.drain()  # nobody asked to be told
    lifecycle = Lifecycle(0.0, 1.0, on_drain=lambda: told.append(lifecycle.draining))
    lifecycle.drain()
    assert told == [True]
