"""Marks of settings say what a running router really takes."""

from __future__ import annotations

import ssl
from pathlib import Path

from router.config.marks import TakenBy, mark_of, marked
from router.config.settings import ServeSettings
from router.serve.router import Router

FIELDS = ServeSettings.model_fields


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
    assert names(settings, tls) == {name for name, field in FIELDS.items() if mark_of(field)}


async def test_keys_and_certificate_are_taken_only_where_they_were_set() -> None:
    settings = ServeSettings(policy="jsq", workers=("http://127.0.0.1:1",))  # type: ignore[arg-type]
    always = {n for n, f in FIELDS.items() if (part := mark_of(f)) and not part.only_if_set}
    assert names(settings) == always


def test_every_part_has_settings_and_some_settings_have_no_part() -> None:
    assert all(marked(FIELDS, part) for part in TakenBy)
    assert mark_of(FIELDS["port"]) is None
