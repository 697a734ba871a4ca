"""What clients rely on, with the oldest and the newest uvicorn that the router is known to go with.

Each version lies beside the others in the cache folder, and stands before the one of this
environment while some of the tests of connections run.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import uvicorn

from deploy.engine.build import BuildError, cache_folder, ensure, run
from router.http.uvicorn_api import OLDEST
from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import running_router, wait_until

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "0.54.0"
TOO_OLD = "0.52.4"

LOOKED_UP = "tests/unit/http/test_uvicorn_api.py::test_the_installed_one_has_all_of_it"
FILES = (
    "tests/integration/test_malformed_http.py",
    "tests/integration/test_main_server.py",
    "tests/integration/test_relay.py",
    "tests/integration/test_relay_clients.py",
)
# Of malformed requests a few: the parser that finds most of them is not uvicorn's.
SOME = "not (refused_byte or refused_and or asked_for_before or admin) or (refused_and and host)"


@pytest.mark.parametrize("version", [".".join(map(str, (*OLDEST, 0))), NEWEST])
def test_clients_are_served_alike(version: str) -> None:
    if version == uvicorn.__version__:
        pytest.skip("it is installed: all other tests run with it")
    folder = only_uvicorn(version)
    shown = python(folder, "-c", "import uvicorn; print(uvicorn.__version__)")
    assert shown.stdout.strip() == version

    quiet = ("-m", "pytest", "-q", "--no-cov", "-p", "no:cacheprovider")
    done = python(folder, *quiet, LOOKED_UP, *FILES, "-k", SOME)
    assert done.returncode == 0, done.stdout[-4000:]


def test_one_that_will_not_do_is_said_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTEP_DATA_PLANE", "splice")
    with running_fleet(tmp_path) as fleet:
        monkeypatch.setenv("PYTHONPATH", looked_for(only_uvicorn(TOO_OLD)))
        with running_router(tmp_path, *worker_flags(fleet)) as router:
            wait_until(lambda: router.get("/v1/models").json()["data"] != [], 60, "the model")
            asked = {"model": "emulated", "prompt": [1, 2, 3], "max_tokens": 2}
            answer = httpx.post(f"{router.url}/v1/completions", json=asked, timeout=60)

    assert answer.json()["usage"]["completion_tokens"] == 2
    assert "for --data-plane splice: version 0.53 or later" in router.log_tail()


def looked_for(first: Path) -> str:
    """Where modules are looked for, with a folder before all others."""
    return os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))


def python(first: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This interpreter, with a folder where modules are looked for first."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": looked_for(first)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def only_uvicorn(version: str) -> Path:
    """A folder with nothing but this version; the test is skipped if it cannot be had."""

    def make(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-input", "--no-deps"]
        few = ("--retries", "1", "--timeout", "10")
        run(
            [*pip, *few, "--target", str(folder), f"uvicorn=={version}"],
            f"no package index could be reached that has uvicorn {version}: see pip's message",
        )

    folder = cache_folder() / f"uvicorn-{version}"
    try:
        ensure(folder, make)
    except BuildError as error:
        pytest.skip(str(error))
    return folder
