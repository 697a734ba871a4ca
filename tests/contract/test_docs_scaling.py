"""Every command of docs/scaling.md runs, before emulated workers; the charts' are rendered."""

import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.docs import section_of, text_of
from tests.support.fleet import Fleet, running_fleet
from tests.support.helm import CHART, rendered, values_of
from tests.support.server import Server, free_port, running

PAGE = "docs/scaling.md"
HEADINGS = ("One router", "Replicas", "A gateway", "Kubernetes", "Several deciders")
PORTS = ("--port", "--grpc-port")
ASKED = {"model": "emulated", "prompt": "hello", "max_tokens": 4}


def commands(heading: str) -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", section_of(PAGE, heading), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


def started(stack: ExitStack, command: list[str], fleet: Fleet, folder: Path) -> Server:
    """Run a command of the page with free ports, before the fleet's workers."""
    program, name, *flags = command
    assert program == "evenstep"
    given: dict[str, str] = {}
    for place, flag in enumerate(flags[:-1]):
        if flag in PORTS:
            given[flag] = flags[place + 1] = str(free_port())
    for place, flag in enumerate(flags):
        for shown, worker in zip(("8001", "8002"), fleet.workers, strict=True):
            flag = flag.replace(f"http://127.0.0.1:{shown}", worker.partition(",")[0])
        flags[place] = flag.replace("/run/evenstep", str(folder))
    port = int(given["--port"])
    call = [sys.executable, "-m", "router.cli", name, *flags]
    log = folder / f"router-{port}.log"
    return stack.enter_context(running(call, port, log, ready_s=180.0, ready="/ready"))


@pytest.mark.parametrize("heading", ["One router", "Replicas", "A gateway", "Several deciders"])
def test_commands_serve(heading: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet = stack.enter_context(running_fleet(tmp_path, "--workers", "2"))
        servers = [started(stack, each, fleet, tmp_path) for each in commands(heading)]
        path = "/pick/v1/completions" if heading == "A gateway" else "/v1/completions"
        for server in servers:
            answer = httpx.post(server.url + path, json=ASKED, timeout=60)
            assert answer.status_code == 200, answer.text
            if heading == "A gateway":
                chosen = answer.headers["x-gateway-destination-endpoint"].split(",")[0]
                assert any(chosen in worker for worker in fleet.workers)


def test_charts_are_rendered() -> None:
    for program, verb, name, chart, flag, values, *image in commands("Kubernetes"):
        assert (program, verb, flag) == ("helm", "install", "-f")
        assert image == ["--set", "image.repository=REGISTRY/evenstep"]
        assert CHART.match(chart)
        assert name
        given = values_of(CHART.parents[2] / values)
        given.setdefault("image", {})["repository"] = "registry.example/evenstep"
        assert {"Deployment", "Service"} <= {each["kind"] for each in rendered(given)}


def test_no_command_is_left_out() -> None:
    fenced = re.findall(r"^```bash\n(.*?)^```", text_of(PAGE), re.M | re.S)
    assert sum(map(len, map(commands, HEADINGS))) == "".join(fenced).replace("\\\n", "").count("\n")
    # By tests of their own: test_envoy_up.py starts the one, figures are kept of the other.
    named = set(re.findall(r"`(make [\w-]+|python \S+)`", text_of(PAGE)))
    assert named == {"make up-envoy", "python tests/bench/bench_scale.py"}
