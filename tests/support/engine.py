"""The real engine: vLLM on the CPU with a tiny or a trained model, as deploy/engine builds them."""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.server import Server, free_port, starting, wait_ready

MODEL = "tiny"

_FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "engine"
READY_S = 300.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Else a shell that forbids byte code makes every start compile all of vLLM.
    "PYTHONDONTWRITEBYTECODE": "",
    # Without it the first request waits some 20 s for a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
}

# Outputs are compared, so no request may find another one's prefix in the cache.
_FLAGS = (
    *("--host", "127.0.0.1", "--served-model-name", MODEL, "--enforce-eager"),
    *("--block-size", "32", "--num-gpu-blocks-override", "4096", "--max-num-seqs", "8"),
    "--no-enable-prefix-caching",
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@dataclass(frozen=True, slots=True)
class Installation:
    """What ``deploy/engine/build.py`` has built.

    Attributes:
        venv: the engine's virtual environment.
        model: the checkpoint to serve, the tiny one of random weights.
        trained: the checkpoint of a trained model.
    """

    venv: Path
    model: Path
    trained: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def vllm(self) -> str:
        """Version of its vLLM."""
        show = "from importlib.metadata import version; print(version('vllm-cpu'))"
        output = subprocess.check_output([str(self.python), "-c", show], text=True)
        return output.strip()


def installation() -> Installation | None:
    """The engine as built for the present pins; None if it is not there, or not whole."""
    command = [sys.executable, str(_FOLDER / "build.py"), "--paths"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if answer.returncode != 0:
        return None
    paths = json.loads(answer.stdout)
    return Installation(*(Path(paths[name]) for name in ("venv", "model", "trained")))


@contextlib.contextmanager
def running_engine(
    where: Installation,
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run an engine until the block ends.

    Args:
        where: the engine and its model.
        folder: for the log.
        flags: further ones of ``vllm serve``; they win over those given here.
        environment: further variables.
    """
    with starting_engine(where, folder, *flags, environment=environment) as server:
        wait_ready(server, READY_S)
        yield server


@contextlib.contextmanager
def starting_engine(
    where: Installation,
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """As ``running_engine``, for engines that start side by side, or again on the same port."""
    port = port or free_port()
    serve = [str(where.python), str(_FOLDER / "serve.py"), str(where.model)]
    with tempfile.TemporaryDirectory(prefix="evenstep-") as scratch:
        places = {"TMPDIR": scratch, "VLLM_CACHE_ROOT": str(where.venv / "vllm-cache")}
        with starting(
            [*serve, *_FLAGS, *flags, "--port", str(port)],
            port,
            folder / f"engine-{port}.log",
            {**ENVIRONMENT, **places, **(environment or {})},
        ) as server:
            yield server


class SharedEngine:
    """One engine for many tests: started when first asked for, and anew once it has died.

    Args:
        where: the engine and its model.
        folder: for logs.
        stack: ends what is started here.
    """

    def __init__(self, where: Installation, folder: Path, stack: contextlib.ExitStack) -> None:
        self._where = where
        self._folder = folder
        self._stack = stack
        self._server: Server | None = None

    def server(self) -> Server:
        """The living engine."""
        if self._server is None or not self._server.alive:
            self._server = self._stack.enter_context(running_engine(self._where, self._folder))
        return self._server


def metric(server: Server, name: str) -> float:
    """Sum of all samples of one metric, on the server's ``/metrics``."""
    text = server.get("/metrics").text
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
    assert values, f"no metric {name}"
    return sum(float(value) for value in values)


def requests_running(engine: Server) -> int:
    """Requests that the engine is computing at this moment."""
    return int(metric(engine, "vllm:num_requests_running"))
