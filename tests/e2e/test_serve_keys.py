"""``evenstep serve`` with API keys from a file and from the environment, as an operator runs it."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

ALICE, BOB, ENGINES = "sk-alice-0123456789", "sk-bob-0123456789ab", "sk-engines-01234567"


def ask(router: Server, key: str) -> int:
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    url = f"{router.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60).status_code


def test_keys_from_file_and_environment_until_they_are_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, engines = tmp_path / "keys", tmp_path / "engines"
    keys.write_text(f"alice {ALICE}\n")
    engines.write_text(ENGINES)
    keys.chmod(0o644)
    engines.chmod(0o600)
    monkeypatch.setenv("EVENSTEP_API_KEYS", f"bob {BOB} rate=1/h")
    flags = ("--api-key-file", str(keys), "--worker-api-key-file", str(engines))
    with (
        running_fleet(tmp_path, "--workers", "1", "--step-time", "1e-3,0") as fleet,
        running_router(tmp_path, *flags, "--policy", "jsq", *worker_flags(fleet)) as router,
    ):
        assert [ask(router, key) for key in (ALICE, BOB, BOB, "nobody")] == [200, 200, 429, 401]
        told = router.get("/metrics").text
        assert 'evenstep_key_requests_total{key="alice"} 1.0' in told
        assert 'evenstep_key_limited_total{key="bob",limit="rate"} 1.0' in told
        wait_until(lambda: "key=alice" in router.log.read_text(), 60, "the line is written")

        warning = f"{keys} can be read by everybody on this machine: chmod 600 it"
        assert router.log.read_text().count(warning) == 1
        keys.write_text(f"carol {ALICE}\n")
        router.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "settings read again" in router.log.read_text(), 60, "keys are read")
        assert router.log.read_text().count(warning) == 2
        assert ask(router, ALICE) == 200
        assert 'key_requests_total{key="carol"} 1.0' in router.get("/metrics").text
        keys.write_text("carol\n")
        router.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "stay as they are" in router.log.read_text(), 60, "they are refused")
        assert ask(router, ALICE) == 200
        assert not [key for key in (ALICE, BOB, ENGINES) if key in router.log.read_text() + told]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key-file", "none"], "cannot read the key file none"),
        (["--admin-key-file", "{folder}/empty"], "holds no key: a line each, NAME KEY"),
        (["--worker-api-key-file", "{folder}/empty"], "should hold one key"),
        (["--admin-port", "0", "--admin-host", "0.0.0.0"], "give --admin-key-file"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "empty").write_text("# nobody\n")
    command = [sys.executable, "-m", "router.cli", "serve", "--worker", "http://127.0.0.1:1"]
    command += [flag.format(folder=tmp_path) for flag in flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert message in done.stderr
