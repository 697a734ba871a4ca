"""What the documentation types at the admin port does what it says, before a running router."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from router.cli import app
from tests.support.docs import section_of, text_of
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, free_port, running_router, wait_until

CHANGES, CLIENTS = "docs/deploy.md", "docs/http-api.md"
SECTION = section_of(CHANGES, "Changing it while it runs")
COMMANDS = re.findall(r"^curl .*", SECTION.partition("```sh")[2].partition("```")[0], re.MULTILINE)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), "--workers", "3") as fleet:
        yield fleet


@pytest.fixture
def admin(fleet: Fleet, tmp_path: Path) -> Iterator[tuple[str, Server]]:
    port = free_port()
    flags = ("--worker", fleet.workers[0], "--admin-port", str(port), "--policy", "jsq")
    with running_router(tmp_path, *flags) as router:
        yield f"http://127.0.0.1:{port}", router


def curl(command: str, admin: str, fleet: Fleet) -> dict[str, Any]:
    """Type a command of the page, for the addresses that there are."""
    for named, worker in zip(("10.0.0.7", "10.0.0.8"), fleet.workers[1:], strict=True):
        command = command.replace(f"http://{named}:8000", worker.partition(",")[0])
    shell = ["bash", "-c", f"ADMIN={admin}; {command}"]
    answer = subprocess.run(shell, capture_output=True, check=True, timeout=60).stdout
    said: dict[str, Any] = json.loads(answer)
    return said


def test_every_command(fleet: Fleet, admin: tuple[str, Server]) -> None:
    url, router = admin
    answers = [curl(command, url, fleet) for command in COMMANDS]

    listed, new, other, drained, undrained, removed, forced, settings, changed = answers
    assert [worker["state"] for worker in listed["workers"]] == ["up"]
    assert (new["id"], new["slots"], other["id"]) == ("new", 64, "other")
    assert [worker["state"] for worker in drained["workers"]] == ["drained"]
    assert [worker["id"] for worker in undrained["workers"]] == ["new"]
    assert (removed["removed"], forced["removed"]) == (["new"], ["other"])
    assert (settings["policy"], changed["policy"]) == ("jsq", "least_tokens")
    assert changed["queue_timeout_s"] == 30
    assert curl(COMMANDS[0], url, fleet) == listed
    for said in ("admin (127.0.0.1): remove worker new, drained", "worker other has left"):
        assert said in router.log.read_text()


def test_the_python_example(fleet: Fleet, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", text_of(CLIENTS), re.MULTILINE | re.DOTALL)
    (example,) = (block for block in blocks if "OpenAI(" in block)
    with running_router(tmp_path, *worker_flags(fleet), "--policy", "jsq") as router:
        code = example.replace("http://127.0.0.1:8000", router.url)
        said = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60
        )
    assert said.stdout.strip()


def test_a_shell_that_knows_the_admin_port_and_its_key(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, port = "sk-operator-0123456789", free_port()
    monkeypatch.setenv("EVENSTEP_ADMIN_URL", f"http://127.0.0.1:{port}/")
    (tmp_path / "keys").write_text(f"me {key}\n")
    flags = ["--admin-port", str(port), "--admin-key-file", str(tmp_path / "keys")]
    with running_router(tmp_path, *worker_flags(fleet), *flags) as router:
        for wrong in ("", "sk-other-0123456789", "Schlüssel\n"):
            monkeypatch.setenv("EVENSTEP_ADMIN_KEY", wrong)
            assert ask("list").exception is not None
        monkeypatch.setenv("EVENSTEP_ADMIN_KEY", key)
        listed = ask("list")
        assert listed.exit_code == 0
        assert "up" in listed.stdout
        elsewhere = ask("list", "--url", router.url)
        assert "/workers is no admin port of a router (it answers 404)" in str(elsewhere.exception)


def test_the_command_loads_nothing_that_takes_long() -> None:
    code = "import sys, router.cli, router.commands.workers_command; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    loaded = {name.partition(".")[0] for name in said.stdout.split()}
    assert not loaded & {"httpx", "httpcore", "fastapi", "pydantic", "numpy", "numba", "zmq"}


def test_the_same_from_a_shell(fleet: Fleet, admin: tuple[str, Server], tmp_path: Path) -> None:
    url, router = admin
    commands = re.search(r"^The same from a shell: `evenstep workers (\w+)`, (.*)", SECTION, re.M)
    assert commands is not None
    for name in (commands[1], *re.findall(r"`(\w+)`", commands[2])):
        assert ask(name, "--help").exit_code == 0

    def state() -> str:
        listed = json.loads(ask("list", "--url", url, "--json", "-").stdout)["workers"]
        return str(listed[-1]["state"])

    assert "joined" not in ask("add", f"{fleet.workers[1]},id=b/č", "--url", url).stdout
    wait_until(lambda: state() == "up", 60, "the newcomer is up")
    assert "drained" in ask("drain", "b/č", "--wait", "5", "--url", url).stdout
    ask("undrain", "b/č", "--url", url)
    assert state() == "up"
    assert "b/č has been removed" in ask("remove", "b/č", "--url", url).stdout
    refused = ask("remove", "b/č", "--url", url)
    assert str(refused.exception) == "no worker is called 'b/č'"
    told = "admin (127.0.0.1): remove worker b/č: refused: no worker is called 'b/č'"
    assert told in router.log.read_text()
    key = tmp_path / "key"
    key.write_text("")
    for wrong in ("--url nowhere", f"--url {url} --key-file {key}", "--url http://127.0.0.1:9"):
        assert ask("list", *wrong.split()).exception is not None


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["workers", *arguments])


def test_with_a_key_where_the_admin_port_wants_one(fleet: Fleet, tmp_path: Path) -> None:
    keys, port = tmp_path / "keys", free_port()
    keys.write_text("operator sesame-open-yourself\n")
    keys.chmod(0o600)
    flags = ("--worker", fleet.workers[0], "--admin-port", str(port), "--policy", "jsq")
    with running_router(tmp_path, *flags, "--admin-key-file", str(keys)):
        url = f"http://127.0.0.1:{port}"
        assert "wants a key" in str(ask("list", "--url", url).exception)
        others = tmp_path / "others"
        others.write_text("guest sesame-stay-shut-please\n")
        refused = ask("list", "--url", url, "--key-file", str(others))
        assert "does not know that key" in str(refused.exception)
        assert " up " in ask("list", "--url", url, "--key-file", str(keys)).stdout
