import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer
from zmq.auth import load_certificate

from router.cli import COMMANDS, GROUPS, PANELS
from router.config.serve_settings import ServeSettings
from router.config.setting_sources import flag_name, load_settings
from router.core.errors import ConfigError, InputError, UpstreamError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(evenstep: Run) -> Run:
    return evenstep


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, object], None]:
    """Put a function in the place of a module's that a command imports."""

    def replace(module_name: str, attribute: str, function: object) -> None:
        module = ModuleType(module_name)
        setattr(module, attribute, function)
        monkeypatch.setitem(sys.modules, module_name, module)

    return replace


def test_help_lists_the_commands_and_ends_with_an_example(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"\n  {name.partition(' ')[0]} " in out for name in COMMANDS)
    assert out.rstrip().rpartition("\n")[2].startswith("    evenstep serve --worker")


def test_help_lists_each_command_once_in_its_panel(run: Run) -> None:
    _, out, _ = run("--help")
    panels = {
        name: re.findall(r"^  (\w+)  ", part, re.MULTILINE)
        for name in PANELS
        for part in [out.partition(f"\n{name}:\n")[2].partition("\n\n")[0]]
    }
    assert panels == {panel: [*names] for panel, names in PANELS.items()}
    wanted = [*GROUPS, *(name for name in COMMANDS if " " not in name)]
    assert sorted(name for names in panels.values() for name in names) == sorted(wanted)
    assert "..." not in out.partition("Run:")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_ends_with_an_example(run: Run, command: str) -> None:
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert out.startswith(f"Usage: evenstep {command} [OPTIONS]")
    assert out.rstrip().endswith(COMMANDS[command].example)


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_each_group_lists_its_commands(run: Run, group: str) -> None:
    code, out, _ = run(group, "--help")
    assert code == 0
    members = [name for name in COMMANDS if name.startswith(f"{group} ")]
    assert members
    assert all(f"\n  {name.rpartition(' ')[2]} " in out for name in members)


def test_help_of_serve_names_every_setting(run: Run) -> None:
    _, out, _ = run("serve", "--help")
    assert all(f"  {flag_name(setting)} " in out for setting in ServeSettings.model_fields)


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("evenstep 0.")


def test_printed_configuration_loads_back(run: Run, tmp_path: Path) -> None:
    worker = "http://a:1,slots=4,snapshots=tcp://127.0.0.1:5"
    code, out, _ = run("serve", "--worker", worker, "--queue-timeout", "7", "--print-config")
    assert code == 0
    path = tmp_path / "printed.toml"
    path.write_text(out)
    assert load_settings({}, path) == load_settings({"workers": [worker], "queue_timeout_s": 7})
    assert run("serve", "--config", str(path), "--print-config")[1] == out


def test_the_variable_for_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evenstep.toml"
    path.write_text("port = 4321\n")
    monkeypatch.setenv("EVENSTEP_CONFIG", str(path))
    assert "port = 4321" in run("serve", "--print-config")[1]


def test_serve_runs_the_server_with_the_settings(
    run: Run, replaced: Callable[[str, str, object], None]
) -> None:
    served: list[ServeSettings] = []
    replaced("router.serve.router", "run", lambda settings, _: served.append(settings))
    assert run("serve", "--worker", "http://a:1", "--worker", "http://a:2", "--port", "0")[0] == 0
    assert [worker.id for worker in served[0].workers] == ["a:1", "a:2"]
    assert served[0].port == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "abc"], "error: port = 'abc' should be a valid integer"),
        (["--host", ""], "error: host = '' should have at least 1 character (from --host)"),
        (["--policy", "bfoi"], "error: unknown policy 'bfoi'; did you mean bfio? (from --policy)"),
        (["--worker", "http://a:1,slot=3"], "error: worker http://a:1,slot=3: unknown key 'slot'"),
        (["--config", "/nowhere.toml"], "error: cannot read /nowhere.toml: No such file"),
        ([], "error: no workers: give at least one"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("serve", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["serve", "--prot", "1"], ["serv"], ["serve", "--port"]])
def test_bad_usage_is_exit_2_without_a_traceback(run: Run, arguments: list[str]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert "Error: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("error", "code"), [(ConfigError, 2), (InputError, 2), (UpstreamError, 1)])
def test_exit_codes(
    run: Run,
    replaced: Callable[[str, str, object], None],
    error: type[Exception],
    code: int,
) -> None:
    def fail() -> None:
        raise error("[red]two\nlines[/red]")

    replaced("loadgen.demo.demo_command", "demo", fail)
    assert run("demo") == (code, "", "error: [red]two lines[/red]\n")


def test_other_commands_get_their_arguments_as_they_are(
    run: Run, replaced: Callable[[str, str, object], None]
) -> None:
    got: list[tuple[str, list[str], bool]] = []

    def replay(
        url: Annotated[str, typer.Option()],
        json: Annotated[list[str], typer.Option()],
        fast: Annotated[bool, typer.Option("--fast/--no-fast")] = False,
    ) -> None:
        """Send things."""
        got.append((url, json, fast))

    replaced("loadgen.replay.replay_command", "replay", replay)
    assert run("replay", "--json", "-", "--url=u", "--fast", "--json", "x")[0] == 0
    assert got == [("u", ["-", "x"], True)]
    code, _, err = run("replay", "--ulr", "u")
    assert code == 2
    assert "No such option: --ulr" in err


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--print-config"]])
def test_what_a_command_does_not_need_is_not_imported(arguments: list[str]) -> None:
    script = (
        "import sys; from router.cli import main; sys.argv[0] = 'evenstep'\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    packages = {name.partition(".")[0] for name in done.stderr.split()}
    assert not packages & {"loadgen", "engine_patches", "matplotlib", "vllm", "uvicorn"}


def test_keys_are_made_for_their_owner_only(run: Run, tmp_path: Path) -> None:
    file, said = tmp_path / "keys", tmp_path / "said.json"
    code, out, _ = run("keygen", str(file), "--json", str(said))
    assert code == 0
    public, secret = load_certificate(file)
    assert out.encode() == public + b"\n"
    assert secret is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(said.read_text()) == {"file": str(file), "public_key": out.strip()}

    unsaid = tmp_path / "unsaid.json"
    code, _, err = run("keygen", str(file), "--json", str(unsaid))
    assert not unsaid.exists()
    assert run("keygen", str(unsaid), "--json", str(unsaid))[0] == 2
    assert not unsaid.exists()
    assert (code, load_certificate(file)) == (2, (public, secret))
    assert "exists; name another file" in err
    assert f"evenstep keygen --public {file} prints the public key" in err
    assert run("keygen", "--public", str(file))[:2] == (0, public.decode() + "\n")
    assert run("keygen", "--public", str(tmp_path / "none"))[0] == 2
    assert load_certificate(file) == (public, secret)
    code, out, _ = run("keygen", str(tmp_path / "other"), "--json", "-")
    assert json.loads(out).keys() == {"file", "public_key"}
    assert run("keygen", str(tmp_path / "no" / "keys"))[0] == 2
    assert run("keygen", str(tmp_path / "third"), "--json", str(tmp_path / "no" / "x"))[0] == 2
    assert not (tmp_path / "third").exists()
