"""The real Prometheus: its programs, and a server that scrapes what a test has started."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.prometheus.install import ADVICE, find
from tests.support.server import Server, free_port, running


def program(name: str) -> str:
    """Path of ``prometheus`` or ``promtool``; without it the test is skipped, or fails in CI."""
    path = find(name)
    if path is None:
        missing = f"no {name} here: {ADVICE}"
        if os.environ.get("REQUIRE_PROMETHEUS"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path


@contextlib.contextmanager
def scraping(folder: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Server]:
    """A Prometheus that reads these addresses (``host:port``) by job once a second."""
    port = free_port()
    jobs = [
        {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
        for job, addresses in targets.items()
    ]
    config = folder / "prometheus.yml"
    # JSON is YAML.
    settings = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config.write_text(json.dumps({"global": settings, "scrape_configs": jobs}))
    command = [program("prometheus"), f"--config.file={config}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with running(command, port, folder / "prometheus.log", ready="/-/ready") as server:
        yield server


def ask(server: Server, path: str, **parameters: str | float) -> Any:
    """``data`` of an answer of Prometheus's HTTP API.

    Raises:
        AssertionError: it refuses, for example since a query is wrong.
    """
    answer = httpx.get(f"{server.url}/api/v1/{path}", params=parameters, timeout=30).json()
    assert answer["status"] == "success", answer
    return answer["data"]
