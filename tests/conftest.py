"""What tests of several folders share."""

import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from router.cli import main
from router.http.port import DataPlane
from tests.support import plugin_engine
from tests.support.planes import VARIABLE, planes_of

Run = Callable[..., tuple[int, str, str]]

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def evenstep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call ``evenstep`` in this process with arguments: its exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evenstep", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules under vLLM's names, as far as the plug-in asks for them."""
    for name, module in plugin_engine.vllm_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seed", type=int, default=1, help="what the chaos tests go by [1]")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    slow = metafunc.definition.get_closest_marker("slow") is not None
    if planes := planes_of(metafunc.module.__name__, slow=slow):
        metafunc.parametrize("data_plane", planes, indirect=True, scope="module", ids=str)


@pytest.fixture(scope="module", autouse=True)
def data_plane(request: pytest.FixtureRequest) -> Iterator[DataPlane | None]:
    """The data plane of the routers that a test starts; None: the environment names it."""
    plane: DataPlane | None = getattr(request, "param", None)
    with pytest.MonkeyPatch.context() as patch:
        if plane:
            patch.setenv(VARIABLE, plane)
        yield plane


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[object], None]:
    """Print what a test has found, also if it passes."""

    def shown(text: object) -> None:
        with capsys.disabled():
            print(f"\n{text}")  # noqa: T201

    return shown


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """Everything that is random in a chaos test follows from it."""
    return int(request.config.getoption("--chaos-seed"))
