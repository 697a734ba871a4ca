"""Generated pages and dashboards are what the code says, with everything in them."""

import re
import sys

import pytest

from docs import generate
from docs.generate import COMMAND, FOLDER, main, stale
from router.cli import COMMANDS
from router.config.serve_settings import ServeSettings
from router.config.setting_sources import PREFIX, flag_name
from tests.support.metric_names import own_metrics


def page(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_no_generated_file_is_stale() -> None:
    names = [path.name for path in stale()]
    assert not names, f"not up to date: {', '.join(names)}; run {COMMAND}"


def test_a_stale_file_is_named_with_the_command_that_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate, "stale", lambda: {FOLDER / "settings.md": "new"})
    monkeypatch.setattr(sys, "argv", ["generate", "--check"])
    with pytest.raises(SystemExit, match=r"not up to date: settings\.md; run python -m docs\."):
        main()


def test_every_setting_has_a_row_with_its_flag_and_its_variable() -> None:
    rows = re.findall(r"^\| `(\w+)`<br>`([\w-]+)`<br>`(\w+)` \|", page("settings.md"), re.MULTILINE)
    names = ServeSettings.model_fields
    assert sorted(rows) == sorted((n, flag_name(n), PREFIX + n.upper()) for n in names)


def test_every_command_has_a_section_with_its_example() -> None:
    text = page("commands.md")
    assert re.findall(r"^## evenstep (.+)$", text, re.MULTILINE) == list(COMMANDS)
    for command in COMMANDS.values():
        assert f"\n$ {command.example}\n" in text


def test_options_are_settings_only_where_a_command_takes_settings() -> None:
    sections = dict(
        re.findall(r"^## evenstep (.+?)\n(.*?)(?=^## |\Z)", page("commands.md"), re.M | re.S)
    )
    taking = {name for name, text in sections.items() if "[settings](settings.md)" in text}
    assert taking == {"serve", "pick", "observe"}
    assert "| `--port FIRST` | `8100` |" in sections["emulate"]


def test_every_metric_is_in_the_table() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", page("metrics.md"), re.MULTILINE)) == own_metrics()
