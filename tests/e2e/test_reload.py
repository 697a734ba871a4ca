"""SIGHUP: settings, certificate and log are read again while streams go on."""

import asyncio
import contextlib
import json
import shutil
import signal
import ssl
import sys
from pathlib import Path

import httpx

from tests.support.certificates import certificate, shown
from tests.support.chaos import body
from tests.support.fleet import running_fleet
from tests.support.server import Server, free_port, starting, wait_until

Settings = dict[str, object]
Pair = tuple[Path, Path]


def hang_up(router: Server, said: str) -> None:
    """Send SIGHUP, and wait until the log says so."""
    before = router.log.read_text().count(said)
    router.process.send_signal(signal.SIGHUP)
    wait_until(lambda: router.log.read_text().count(said) > before, 60, said)


def set_up(folder: Path) -> tuple[list[Pair], Settings]:
    """Two certificates with their keys, and settings with copies of the first ones."""
    certificates = [certificate(folder, name) for name in ("one", "two")]
    for file, name in zip(certificates[0], ("now.crt", "now.key"), strict=True):
        shutil.copy(file, folder / name)
    keys = folder / "keys"
    keys.write_text("operator sesame-open-yourself\n")
    keys.chmod(0o600)
    return certificates, {
        "tls_cert": str(folder / "now.crt"),
        "tls_key": str(folder / "now.key"),
        "admin_host": "0.0.0.0",
        "admin_key_file": str(keys),
        "log_level": "warning",
        "policy": "least_tokens",
    }


def write(config: Path, settings: Settings) -> None:
    config.write_text("".join(f"{name} = {json.dumps(v)}\n" for name, v in settings.items()))


async def test_a_stream_goes_on_while_everything_is_read_again(tmp_path: Path) -> None:
    certificates, lines = set_up(tmp_path)
    config = tmp_path / "evenstep.toml"
    port, admin = free_port(), free_port()
    lines["admin_port"] = admin
    serve = [sys.executable, "-m", "router.cli", "serve", "--port", str(port)]
    trusted = ssl.create_default_context()
    for cert, _ in certificates:
        trusted.load_verify_locations(cert)
    with (
        running_fleet(tmp_path, "--workers", "2", "--slots", "4") as fleet,
        contextlib.ExitStack() as stack,
    ):
        write(config, lines | {"workers": fleet.workers[:1]})
        command = [*serve, "--config", str(config)]
        router = stack.enter_context(starting(command, port, tmp_path / "router.log"))
        url = f"https://127.0.0.1:{port}"
        client = httpx.AsyncClient(base_url=url, verify=trusted, timeout=60, trust_env=False)
        await asyncio.to_thread(wait_until, lambda: _answers(url, trusted), 180, "it answers")
        async with (
            asyncio.timeout(120),
            client.stream("POST", "/v1/completions", content=body(900)) as stream,
        ):
            events = stream.aiter_raw()
            first = await anext(events)
            assert shown(port) == certificates[0][0].read_text()

            shutil.copy(certificates[1][0], tmp_path / "now.crt")
            await asyncio.to_thread(hang_up, router, "the key is not the certificate's")
            assert shown(port) == certificates[0][0].read_text()

            shutil.copy(certificates[1][1], tmp_path / "now.key")
            told: Settings = {"log_level": "info", "log_format": "json", "host": "::1"}
            lines["workers"] = fleet.workers[1:]
            write(config, lines | told)
            await asyncio.to_thread(hang_up, router, '"message":"settings read again; changed: ')
            assert shown(port) == shown(admin) == certificates[1][0].read_text()
            assert "take effect at the next start: host" in router.log_tail()

            del lines["tls_cert"], lines["tls_key"]
            write(config, lines)
            await asyncio.to_thread(hang_up, router, "a port that speaks HTTPS does so until")
            config.write_text("grace = 5\n")
            await asyncio.to_thread(hang_up, router, "the settings stay as they are: ")
            assert "unknown setting 'grace'" in router.log_tail()

            rest = b"".join([chunk async for chunk in events])
        assert (first + rest).endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in rest
        second = fleet.workers[1].partition(",")[0]
        await asyncio.to_thread(
            wait_until, lambda: served(url, trusted) == [second], 60, "the first worker has gone"
        )
        await client.aclose()


def served(url: str, trusted: ssl.SSLContext) -> list[str]:
    """URLs of the router's workers."""
    answer = httpx.get(url + "/health", verify=trusted, trust_env=False, timeout=60)
    return [worker["url"] for worker in answer.json()["groups"]["default"]["workers"]]


def _answers(url: str, trusted: ssl.SSLContext) -> bool:
    try:
        answer = httpx.get(url + "/health", verify=trusted, trust_env=False, timeout=60)
        return answer.status_code == 200
    except httpx.TransportError:
        return False
