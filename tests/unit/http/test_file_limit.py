"""The limit of open files follows the connections that are to be served."""

import resource
from collections.abc import Iterator

import pytest

from router.file_limit import allow_connections


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit; the soft one is put back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_it_is_raised_as_far_as_needed(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    allow_connections(100)
    assert soft() == 600
    allow_connections(200)
    assert soft() == 656


def test_it_is_said_where_that_is_not_enough(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    allow_connections(10**9)

    assert soft() == hard or hard == resource.RLIM_INFINITY
    assert ("raise ulimit -Hn" in caplog.text) == (hard != resource.RLIM_INFINITY)
