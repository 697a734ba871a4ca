"""``evenstep agent`` as it is typed, and the power that a router shows for it."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from router.engines.curve_keys import write_key_pair
from tests.conftest import Run
from tests.support.engine import metric
from tests.support.fleet import running_fleet
from tests.support.nvml import FakeNvml, Gpu
from tests.support.server import Server, free_port, running_router, starting, wait_until

TIMEOUT_S = 60.0
MILLIWATTS = (310_500, 200_000, 111_000)


def gpus() -> FakeNvml:
    return FakeNvml([Gpu(f"GPU-{n}", milliwatts, None) for n, milliwatts in enumerate(MILLIWATTS)])


@pytest.fixture
def nvml(tmp_path: Path) -> dict[str, str]:
    """Environment in which ``pynvml`` is a double of it."""
    double = f"import sys\nfrom {__name__} import gpus\nsys.modules[__name__] = gpus()\n"
    (tmp_path / "pynvml.py").write_text(double)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def watts(router: Server) -> dict[str, float]:
    found = re.findall(
        r'^evenstep_worker_power_watts\{.*worker="(\w+)"\} (\S+)$',
        router.get("/metrics").text,
        re.MULTILINE,
    )
    return {worker: float(value) for worker, value in found}


def test_a_router_shows_the_power_of_an_agents_workers(
    tmp_path: Path, nvml: dict[str, str]
) -> None:
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    files = {name: tmp_path / f"{name}.key" for name in ("agent", "router")}
    public = {name: write_key_pair(file) for name, file in files.items()}
    command = [sys.executable, "-m", "router.cli", "agent"]
    command += ["--ranks-of", "a=0+1", "--ranks-of", "b=2", "--interval", "0.1"]
    command += ["--bind", endpoint, "--allowed-key", public["router"]]
    command += ["--secret-key-file", str(files["agent"])]
    flags = ["--policy", "jsq", "--secret-key-file", str(files["router"])]
    with running_fleet(tmp_path, "--workers", "2") as fleet:
        for name, worker in zip("ab", fleet.workers, strict=True):
            url = worker.partition(",")[0]
            spec = f"{url},id={name},slots=4,power={endpoint},server_key={public['agent']}"
            flags += ["--worker", spec]
        with running_router(tmp_path, *flags) as router:
            assert watts(router) == {}
            with starting(command, port, tmp_path / "agent.log", nvml) as agent:
                both = {"a": 510.5, "b": 111.0}
                wait_until(lambda: watts(router) == both, TIMEOUT_S, "the power of both workers")
                idle = "evenstep_idle_energy_joules_total"
                wait_until(lambda: metric(router, idle) > 0, TIMEOUT_S, "what they use at rest")
                assert metric(router, "evenstep_agent_messages_received_total") > 0
                assert metric(router, "evenstep_agent_messages_broken_total") == 0
                agent.process.send_signal(signal.SIGTERM)
                assert agent.process.wait(timeout=TIMEOUT_S) == 0


def test_one_reading(evenstep: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", gpus())
    asked = ["agent", "--once"]
    code, out, _ = evenstep(*asked, "--ranks-of", "w=0+1", "--json", "-")
    assert code == 0
    assert json.loads(out)["ranks"] == [
        {"worker": "w", "rank": 0, "gpus": ["0", "1"], "power_w": 510.5}
    ]
    file = tmp_path / "reading.json"
    assert evenstep(*asked, "--gpus", "2,1", "--json", str(file))[:2] == (
        0,
        "0 (GPU 2): 111.0 W\n1 (GPU 1): 200.0 W\n",
    )
    assert [rank["rank"] for rank in json.loads(file.read_text())["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("nvml", "out", "said"),
    [
        (FakeNvml([Gpu("GPU-a")]), "0 (GPU GPU-a): 300.0 W\n", ""),
        (None, "0 (GPU GPU-a): unknown\n", "pynvml is missing: pip install nvidia-ml-py"),
    ],
)
def test_nvml_is_asked(
    evenstep: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nvml: FakeNvml | None,
    out: str,
    said: str,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", None)
    assert evenstep("agent", "--once", "--gpus", "GPU-a")[:2] == (0, out)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "whose power? Give --gpus 0,1 or --ranks-of WORKER=GPU"),
        ("--gpus 0", "give --bind ENDPOINT, as in --bind tcp://127.0.0.1:5700, or --once"),
        ("--gpus 0,,1", "--gpus: '0,,1' should be GPUs with ',' between them"),
        ("--gpus 0,0", "--gpus: '0,0' names a GPU twice"),
        ("--ranks-of 0", "--ranks-of takes WORKER=GPU[+GPU], as in w0=0+1, got '0'"),
        ("--ranks-of a=0+", "--ranks-of a: '0+' should be GPUs with '+' between them"),
        ("--ranks-of a=0 --ranks-of a=1", "--ranks-of a is given twice: join its GPUs with +"),
        ("--gpus 0,1 --ranks-of a=0", "--gpus and --ranks-of name different GPUs"),
        ("--gpus 0 --bind 5700", "--bind '5700' should be tcp://HOST:PORT or ipc://PATH"),
        ("--gpus 0 --bind tcp://*:5700", "give --secret-key-file and --allowed-key (CURVE)"),
        ("--gpus 0 --bind ipc://x --allowed-key k", "--allowed-key 'k' should be a public CURVE"),
        ("--gpus 0 --bind ipc://x --interval 0.01", "--interval 0.01 must be 0.1 to 5 seconds"),
        ("--gpus 0 --bind ipc://x --interval nan", "--interval nan must be 0.1 to 5 seconds"),
        ("--gpus 0 --bind ipc://x --json -", "--json goes with --once"),
    ],
)
def test_bad_input_is_said_in_one_line(evenstep: Run, flags: str, said: str) -> None:
    code, _, err = evenstep("agent", *flags.split())
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
