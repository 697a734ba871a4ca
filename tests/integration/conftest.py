"""Engines and routers that several integration tests share."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from router.engines.http_client import HttpClient
from tests.support import relaying
from tests.support.engine import Installation, SharedEngine, installation
from tests.support.engine_clients import GROUP, client_of
from tests.support.peers import Peers
from tests.support.plugin_stream import Routers
from tests.support.relaying import One
from tests.support.scripted import TIMEOUT_S, scripted
from tests.support.server import Server, running_router
from tests.support.splitting import Pair


@pytest.fixture(scope="session")
def engine_installation() -> Installation:
    """The real engine; its tests are skipped without it, unless they are required to run."""
    found = installation()
    if found is not None:
        return found
    reason = "the CPU engine has not been built: run `make engine`"
    if os.environ.get("REQUIRE_ENGINE") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_engine(
    engine_installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedEngine]:
    with contextlib.ExitStack() as stack:
        yield SharedEngine(engine_installation, tmp_path_factory.mktemp("engine"), stack)


@pytest.fixture(scope="module")
def engine(shared_engine: SharedEngine) -> Server:
    """A real engine that no other module's test has killed; one start serves all modules."""
    return shared_engine.server()


@pytest.fixture(scope="module")
def router(
    data_plane: None, engine: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The router before that engine."""
    worker = f"{engine.url},group={GROUP},slots=8"
    folder = tmp_path_factory.mktemp("router")
    with running_router(folder, "--worker", worker) as server:
        yield server


@pytest.fixture(scope="module")
def direct(engine: Server) -> Iterator[openai.OpenAI]:
    """A client of that engine."""
    with client_of(engine) as client:
        yield client


@pytest.fixture(scope="module")
def routed(router: Server) -> Iterator[openai.OpenAI]:
    """A client of that router."""
    with client_of(router) as client:
        yield client


@pytest.fixture
def routers() -> Iterator[Routers]:
    """Those who read an engine's state stream, or try to."""
    routers = Routers()
    yield routers
    routers.close()


@pytest.fixture
async def one() -> AsyncIterator[One]:
    """A router before one engine."""
    async with relaying.routed() as (router, (engine,)):
        yield router, engine


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    """The engines' client before one engine."""
    async with scripted() as servers:
        client = HttpClient(connect_timeout_s=TIMEOUT_S)
        yield Peers(client, servers[0])
        await client.aclose()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """A router before a prefill worker a and a decode worker b."""
    async with relaying.routed(2, prefills=1, kept_s=30.0) as (router, (prefill, decode)):
        yield router, prefill, decode
