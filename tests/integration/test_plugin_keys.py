"""Whom the plug-in lets read its stream, and key files that it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates, load_certificate

from engine_patches.plugin.compat import EngineView
from engine_patches.plugin.reporter import Reporter
from engine_patches.plugin.settings import PlugInError, Settings
from router.core.wire import decode, full_endpoint
from tests.support.plugin_engine import FakeScheduler, Request
from tests.support.plugin_stream import Engine, Routers, ask_full
from tests.support.server import free_port

pytestmark = pytest.mark.usefixtures("vllm")


class Keys:
    """Certificates of an engine, of a router and of a stranger."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            name: create_certificates(folder, name) for name in ("engine", "router", "stranger")
        }

    def pair(self, name: str) -> tuple[bytes, bytes]:
        public, secret = load_certificate(self.files[name][1])
        assert secret is not None
        return public, secret

    def client(self, name: str) -> tuple[bytes, bytes, bytes]:
        return (*self.pair(name), self.pair("engine")[0])


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def secured(keys: Keys) -> Iterator[Engine]:
    allowed = (keys.pair("router")[0].decode(),)
    settings = Settings(
        f"tcp://127.0.0.1:{free_port(2)}",
        secret_key_file=keys.files["engine"][1],
        allowed_keys=allowed,
    )
    engine = Engine(settings)
    yield engine
    engine.reporter.close()


def test_a_router_with_an_allowed_key_reads(secured: Engine, keys: Keys, routers: Routers) -> None:
    endpoint = secured.reporter.endpoint
    stream = routers.subscribed(endpoint, keys.client("router"))
    dealer = routers.asker(endpoint, keys.client("router"))
    secured.add_request(Request("a", 5))
    secured.step()
    assert [one.id for one in decode(stream.recv()).running] == ["a"]
    assert [one.id for one in ask_full(dealer).running] == ["a"]


def test_nobody_else_gets_anything(secured: Engine, keys: Keys, routers: Routers) -> None:
    endpoint = secured.reporter.endpoint
    strangers = [
        routers.connect(kind, address, client)
        for kind, address in ((zmq.SUB, endpoint), (zmq.DEALER, full_endpoint(endpoint)))
        for client in (keys.client("stranger"), ())
    ]
    for stranger in strangers:
        if stranger.type == zmq.DEALER:
            stranger.send(b"", zmq.NOBLOCK)
    # Two heartbeats later they would have had their share.
    friend = routers.subscribed(endpoint, keys.client("router"))
    friend.recv()
    assert not any(stranger.poll(0) for stranger in strangers)


def refused(file: str, said: str) -> None:
    """A reporter with this key file says what is wrong with it."""
    settings = Settings("tcp://127.0.0.1:5600", secret_key_file=file, allowed_keys=("a" * 40,))
    with pytest.raises(PlugInError, match=rf"secret_key_file.* {said}"):
        Reporter(EngineView(FakeScheduler()), settings)


def test_a_key_file_that_cannot_be_used_is_said(keys: Keys) -> None:
    refused(keys.files["engine"][0], "holds no secret key")
    refused("nowhere", "there is no file nowhere")


@pytest.mark.parametrize("secret", ["#" * 40, "a" * 39 + ",", "short", "a" * 40])
def test_a_malformed_key_is_no_port_that_cannot_be_bound(keys: Keys, secret: str) -> None:
    file = Path(keys.files["engine"][1])
    before = keys.pair("engine")[1].decode()
    file.write_text(file.read_text().replace(before, secret))
    refused(str(file), "holds no CURVE key pair")
