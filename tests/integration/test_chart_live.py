"""What the chart starts runs, and its probes and `helm test` see how it does."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.config.flags import usable
from router.config.setting_sources import load_settings
from router.engines.curve_keys import write_key_pair
from tests.support.certificates import certificate
from tests.support.helm import EXAMPLES, Document, only, rendered, values_of
from tests.support.server import free_port, running, wait_until

EVENSTEP = [sys.executable, "-m", "router.cli"]
# It has nothing to compile.
QUICK: Document = {"settings": {"policy": "jsq"}}


def config_text(documents: list[Document]) -> str:
    text = only(documents, "ConfigMap", "demo-evenstep")["data"]["evenstep.toml"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_router_accepts_its_config_file(path: Path, tmp_path: Path) -> None:
    text = config_text(rendered(values_of(path)))
    mounted = tmp_path / "keys"
    for name in ("clients", "workers", "streams", "admin", "tls"):
        (mounted / name).mkdir(parents=True)
    for name in ("clients", "admin"):
        (mounted / name / "keys").write_text(f"{name} {'k' * 24}\n")
    (mounted / "workers" / "key").write_text("of-engines")
    write_key_pair(mounted / "streams" / "key_secret")
    (mounted / "streams" / "engine.key").write_text(write_key_pair(tmp_path / "engine"))
    certificate(mounted / "tls", "tls")

    file = tmp_path / "evenstep.toml"
    file.write_text(text.replace("/etc/evenstep/keys", str(mounted)))
    # In a pod the API is known; here it is not asked.
    settings = load_settings({"kubernetes_api": "http://127.0.0.1:9"}, file)

    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert usable(settings) is settings
    given = values_of(path).get("settings", {})
    shown = settings.model_dump(mode="json")
    assert {name: shown[name] for name in given} == given


@pytest.fixture
def engine() -> int:
    return free_port(4)


def start(documents: list[Document], folder: Path, **ports: int) -> list[str]:
    """The command of the pod, here and at these ports."""
    (router,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    text = config_text(documents).replace("0.0.0.0", "127.0.0.1")
    for name, port in ports.items():
        text = re.sub(rf"^{name} = \d+$", f"{name} = {port}", text, flags=re.MULTILINE)
    file = folder / "evenstep.toml"
    file.write_text(text)
    return [
        *EVENSTEP,
        *(one.replace("/etc/evenstep/evenstep.toml", str(file)) for one in router["args"]),
    ]


def probes(documents: list[Document]) -> dict[str, Document]:
    (router,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return {kind: router[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}


def test_probes_and_helm_test_see_how_the_router_does(engine: int, tmp_path: Path) -> None:
    port, admin = free_port(), free_port()
    engines = {"workers": {"list": [f"http://127.0.0.1:{engine}"]}}
    documents = rendered(engines | QUICK | {"adminPort": admin})
    (test,) = only(documents, "Pod")["spec"]["containers"]
    serve = start(documents, tmp_path, port=port)
    emulate = [*EVENSTEP, "emulate", "--workers", "1", "--port", str(engine)]

    def probed() -> Mapping[str, int]:
        url = f"http://127.0.0.1:{port}"
        return {
            kind: httpx.get(url + probe["httpGet"]["path"], timeout=60).status_code
            for kind, probe in probes(documents).items()
        }

    def helm_test(patience_s: float) -> int:
        told = {"URL": f"http://127.0.0.1:{port}/health", "PATIENCE_S": str(patience_s)}
        assert told.keys() == {each["name"] for each in test["env"]}
        done = subprocess.run(
            [sys.executable, *test["command"][1:]],
            env={**os.environ, **told}, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        return done.returncode

    with running(serve, port, tmp_path / "router.log", ready="/version", ready_s=120):
        assert probed() == {"startup": 200, "liveness": 200, "readiness": 503}
        assert helm_test(0) == 1
        with running(emulate, engine, tmp_path / "engine.log"):
            wait_until(lambda: probed()["readiness"] == 200, 60, "the router is ready")
            assert helm_test(30) == 0
        wait_until(lambda: probed()["readiness"] == 503, 60, "the router is no longer ready")
        assert probed() == {"startup": 200, "liveness": 200, "readiness": 503}


def test_probes_of_a_picker_see_that_it_drains(tmp_path: Path) -> None:
    ports = {"port": free_port(), "grpc_port": free_port(), "admin_port": free_port()}
    values = {"mode": "pick", "workers": {"list": ["http://127.0.0.1:9"]}}
    documents = rendered(values | QUICK | {"ending": {"drainDelaySeconds": 60}})
    pick = start(documents, tmp_path, **ports)
    with (
        running(
            pick, ports["port"], tmp_path / "pick.log", ready="/version", ready_s=120
        ) as router,
        grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel,
    ):
        check = health_pb2_grpc.HealthStub(channel).Check

        def serving() -> dict[str, bool]:
            return {
                kind: check(health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])).status
                == health_pb2.HealthCheckResponse.SERVING
                for kind, probe in probes(documents).items()
            }

        assert serving() == {"startup": True, "liveness": True, "readiness": True}
        router.process.terminate()
        wait_until(lambda: not serving()["readiness"], 60, "the picker is no longer ready")
        assert serving() == {"startup": True, "liveness": True, "readiness": False}
