"""What of a certificate's files cannot be used is said."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from router.config.setting_sources import load_settings
from router.core.errors import ConfigError
from router.http.tls import load, server_context
from tests.support.certificates import certificate, shown


def test_key_and_certificate_belong_together(tmp_path: Path) -> None:
    one, two = (certificate(tmp_path, name) for name in ("one", "two"))
    both = tmp_path / "both.pem"
    both.write_text(one[0].read_text() + one[1].read_text())
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", one[1], "-out", locked, "-passout", "pass:word"],
        check=True,
        capture_output=True,
        timeout=60,
    )

    def settings(cert: Path | None, key: Path | None) -> None:
        given = {"tls_cert": cert and str(cert), "tls_key": key and str(key)}
        assert load_settings({name: v for name, v in given.items() if v}).tls is not None

    settings(*one)
    settings(both, None)
    for cert, key, wrong in (
        (one[0], two[1], "the key is not the certificate's"),
        (one[0], None, "should be PEM: the certificate, and its key without a password"),
        (one[0], locked, "should be PEM: the certificate, and its key without a password"),
        (one[0], tmp_path / "none", f"cannot read {tmp_path / 'none'}: No such file"),
        (None, one[1], "tls_key needs --tls-cert"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            settings(cert, key)


def pems(files: tuple[Path, Path]) -> tuple[bytes, bytes]:
    return files[0].read_bytes(), files[1].read_bytes()


async def test_what_cannot_be_used_takes_nothing_away_from_what_is_in_use(tmp_path: Path) -> None:
    one, two = (certificate(tmp_path, name) for name in ("one", "two"))
    context = server_context(*pems(one))
    with pytest.raises(ConfigError, match="the key is not the certificate's"):
        load(context, two[0].read_bytes(), one[1].read_bytes())
    async with await asyncio.start_server(
        lambda _, w: w.close(), "127.0.0.1", ssl=context
    ) as server:
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.to_thread(shown, port) == one[0].read_text()
