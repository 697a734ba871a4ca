"""What the chart starts runs, and its probes and `helm test` see how it does."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from router.config.setting_sources import load_settings
from router.engines.curve_keys import write_key_pair
from tests.support.certificates import certificate
from tests.support.helm import COMING, EXAMPLES, Document, only, rendered, values_of
from tests.support.server import free_port, running, wait_until

EVENSTEP = [sys.executable, "-m", "router.cli"]


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
    certificate(mounted / "tls", "tls")

    file = tmp_path / "evenstep.toml"
    known = [line for line in text.splitlines() if line.split()[0] not in COMING]
    file.write_text("\n".join(known).replace("/etc/evenstep/keys", str(mounted)))
    settings = load_settings({}, file)

    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    given = values_of(path).get("settings", {})
    shown = settings.model_dump(mode="json")
    assert {name: shown[name] for name in given} == given


def test_probes_and_helm_test_see_how_the_router_does(tmp_path: Path) -> None:
    engine, port, admin = free_port(4), free_port(), free_port()
    documents = rendered({"workers": {"list": [f"http://127.0.0.1:{engine}"]}, "adminPort": admin})
    (router,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    (test,) = only(documents, "Pod")["spec"]["containers"]
    file = tmp_path / "evenstep.toml"
    here = config_text(documents).replace("port = 8000", f"port = {port}")
    file.write_text(here.replace("0.0.0.0", "127.0.0.1"))
    serve = [
        argument.replace("/etc/evenstep/evenstep.toml", str(file)) for argument in router["args"]
    ]
    emulate = [*EVENSTEP, "emulate", "--workers", "1", "--port", str(engine)]

    def probed() -> Mapping[str, int]:
        url = f"http://127.0.0.1:{port}"
        kinds = ("startup", "liveness", "readiness")
        paths = {kind: router[f"{kind}Probe"]["httpGet"]["path"] for kind in kinds}
        return {kind: httpx.get(url + path).status_code for kind, path in paths.items()}

    def helm_test(patience_s: float) -> int:
        told = {"URL": f"http://127.0.0.1:{port}/health", "PATIENCE_S": str(patience_s)}
        assert told.keys() == {each["name"] for each in test["env"]}
        done = subprocess.run(
            [sys.executable, *test["command"][1:]],
            env={**os.environ, **told}, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        return done.returncode

    with running([*EVENSTEP, *serve], port, tmp_path / "router.log", ready="/version", ready_s=180):
        assert probed() == {"startup": 200, "liveness": 200, "readiness": 503}
        assert helm_test(0) == 1
        with running(emulate, engine, tmp_path / "engine.log"):
            wait_until(lambda: probed()["readiness"] == 200, 60, "the router is ready")
            assert helm_test(30) == 0
        wait_until(lambda: probed()["readiness"] == 503, 60, "the router is no longer ready")
        assert probed() == {"startup": 200, "liveness": 200, "readiness": 503}
