"""The stack of processes that ``make up`` starts."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.prometheus import program
from tests.support.server import wait_until

UP = (sys.executable, "-m", "deploy.local.up", "--workers", "2")
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


@contextmanager
def up(folder: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The command, once it has said that all runs, and the URLs that it named."""
    process = subprocess.Popen(
        UP,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("Ctrl-C"):
                break
        else:
            raise AssertionError("".join(said))
        yield process, dict(re.findall(r"^(\w+) +(\S.*)$", "".join(said), re.MULTILINE))
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stdout.close()


def gone(url: str) -> bool:
    try:
        httpx.get(url, timeout=5)
    except httpx.ConnectError:
        return True
    return False


def test_everything_is_scraped_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    program("prometheus")
    with up(tmp_path) as (process, urls):
        router, prometheus = urls["router"].split()[0], urls["prometheus"]

        def health() -> list[str]:
            answer = httpx.get(f"{prometheus}/api/v1/targets", timeout=WAIT_S).json()
            return [target["health"] for target in answer["data"]["activeTargets"]]

        wait_until(lambda: health() == ["up"] * 3, WAIT_S, "router and engines are scraped")
        assert httpx.get(urls["page"], timeout=WAIT_S).text.startswith("<!doctype html>")
        rules = httpx.get(f"{prometheus}/api/v1/rules", timeout=WAIT_S).json()
        groups = rules["data"]["groups"]
        assert len(groups[0]["rules"]) > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0

    assert gone(router)
    assert gone(urls["page"])
    assert gone(prometheus)
    assert list(tmp_path.iterdir()) == []


def test_without_prometheus_it_says_how_to_get_it_and_goes_on(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    with up(tmp_path, PATH=str(nothing), EVENSTEP_CACHE=str(nothing)) as (_, urls):
        assert urls["prometheus"].startswith("not found: install prometheus")
        assert httpx.get(urls["router"].split()[0] + "/health", timeout=WAIT_S).is_success

    assert gone(urls["router"].split()[0])


def test_a_fresh_clone_lays_prometheus_beside_the_engine(tmp_path: Path) -> None:
    bin_, made, cache = tmp_path / "bin", tmp_path / "made", tmp_path / "cache"
    (made / "usr" / "bin").mkdir(parents=True)
    for name in ("prometheus", "promtool"):
        (made / "usr" / "bin" / name).symlink_to(program(name))
    bin_.mkdir()
    for name in ("dpkg-deb", "tar", "rm"):
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"no {name} here")
        (bin_ / name).symlink_to(path)
    control = made / "DEBIAN" / "control"
    control.parent.mkdir()
    control.write_text(
        "Package: prometheus\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n"
    )
    package = tmp_path / "prometheus_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(made), str(package)], check=True)
    # Stands for the network: it has what Debian's mirrors would.
    apt = bin_ / "apt-get"
    apt.write_text(f"#!/bin/sh\n{shutil.which('cp')} {package} .\n")
    apt.chmod(0o755)
    with up(tmp_path, PATH=str(bin_), EVENSTEP_CACHE=str(cache)) as (_, urls):
        assert httpx.get(f"{urls['prometheus']}/-/ready", timeout=WAIT_S).is_success
    assert (cache / "prometheus" / "usr" / "bin" / "prometheus").exists()


def test_a_part_that_fails_ends_all_and_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [*UP, "--policy", "nope"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )

    assert done.returncode == 1
    assert "up: evenstep serve ended with 2" in done.stderr
    assert "unknown policy 'nope'" in done.stderr
    assert done.stdout == "ended: fleet, router\n"
    assert list(tmp_path.iterdir()) == []
