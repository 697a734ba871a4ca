"""Marks of settings say what a running router really takes."""

import ssl
from pathlib import Path

from router.config.serve_settings import SETTINGS, ServeSettings
from router.config.setting import IF_GIVEN, marks_of, metavar_of, unit_of
from router.serve.router import Router

MARKS = {name: marks_of(field) for name, field in SETTINGS.items()}


def names(settings: ServeSettings, tls: ssl.SSLContext | None = None) -> set[str]:
    return set(Router(settings, lambda: settings, tls).reload.names)


async def test_a_router_with_everything_takes_what_is_marked(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("somebody 0123456789abcdef0123456789abcdef\n")
    keys.chmod(0o600)
    settings = ServeSettings(
        policy="jsq",
        workers=("http://127.0.0.1:1",),  # type: ignore[arg-type]
        api_key_file=str(keys),
        admin_key_file=str(keys),
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert names(settings, tls) == {name for name, marks in MARKS.items() if marks["live"]}


async def test_keys_and_certificate_are_taken_only_where_they_were_set() -> None:
    settings = ServeSettings(policy="jsq", workers=("http://127.0.0.1:1",))  # type: ignore[arg-type]
    always = {name for name, marks in MARKS.items() if marks["live"] is True}
    assert names(settings) == always
    assert {name for name, marks in MARKS.items() if marks["live"] == IF_GIVEN} == {
        *("tls_cert", "tls_key", "api_key_file", "admin_key_file")
    }


def test_some_settings_take_another_start() -> None:
    assert not MARKS["port"]["live"]
    assert not MARKS["data_plane"]["live"]


def test_every_setting_has_a_placeholder_and_the_unit_of_its_name() -> None:
    endings = {"_per_s": "per s", "_ms": "ms", "_s": "s", "_bytes": "bytes", "_tokens": "tokens"}
    for name, field in SETTINGS.items():
        assert metavar_of(name, field)
        of_name = next((unit for ending, unit in endings.items() if name.endswith(ending)), None)
        assert of_name in (None, unit_of(name))
