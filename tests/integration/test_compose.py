"""The compose file: what it mounts is there, what it publishes stays here, its commands run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support.prometheus import program
from tests.support.server import Server, free_port, running, wait_until

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "compose"
ROOT = FOLDER.parents[1]
PROFILES = ("emulated", "gpu")


def settings() -> dict[str, str]:
    """What ``.env`` says."""
    lines = (FOLDER / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def services(profile: str) -> dict[str, dict[str, Any]]:
    """Those of a profile, with variables filled in."""
    given = {**settings(), "COMPOSE_PROFILES": profile, "HF_TOKEN": ""}
    text = re.sub(
        r"\$\{(\w+)(?::-)?\}", lambda found: given[found[1]], (FOLDER / "compose.yaml").read_text()
    )
    every: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return {
        name: service
        for name, service in every.items()
        if profile in service.get("profiles", [profile])
    }


def command(name: str, profile: str = "emulated") -> list[str]:
    """What evenstep is started with."""
    return shlex.split(services(profile)[name]["command"])


@pytest.mark.parametrize("profile", PROFILES)
def test_services_of_a_profile_fit_together(profile: str) -> None:
    chosen = services(profile)

    assert {"prometheus", "grafana"} < chosen.keys()
    assert len(chosen) == 4
    published = [port for service in chosen.values() for port in service.get("ports", [])]
    assert sorted(port.split(":")[1] for port in published) == ["3000", "8000", "9090"]
    assert all(port.startswith("127.0.0.1:") for port in published)
    for service in chosen.values():
        shared = service.get("network_mode", "service:").removeprefix("service:")
        assert {*service.get("depends_on", []), *filter(None, [shared])} <= chosen.keys()
    names = [
        service.get("networks", {}).get("default", {}).get("aliases") for service in chosen.values()
    ]
    assert names.count(["router"]) == 1


@pytest.mark.parametrize("profile", PROFILES)
def test_mounted_files_are_there(profile: str) -> None:
    mounts = [
        mount for service in services(profile).values() for mount in service.get("volumes", [])
    ]
    own = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]

    assert len(own) == 6
    assert [path for path in own if not (FOLDER / path).exists()] == []


def test_images_copy_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
        for word in line.split()
    ]
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))

    assert all((ROOT / path).exists() for path in copied)
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    asked = [
        service["build"]
        for profile in PROFILES
        for service in services(profile).values()
        if "build" in service
    ]
    assert {build["target"] for build in asked} == targets - {"build"}
    assert all((FOLDER / build["context"] / build["dockerfile"]).is_file() for build in asked)


def test_the_routers_image_is_made_of_pinned_parts_and_lists_them() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    build = text[text.index(" AS build") : text.index(" AS router")]
    lock = (FOLDER / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)(?= )", lock, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"--extra (\w+)", (FOLDER / "README.md").read_text()))
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    wanted = list(map(Requirement, lines))

    assert re.search(r"^ARG PYTHON=python:[\w.-]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert text.count("FROM ${PYTHON} AS ") == 2
    assert "install --require-hashes --requirement /src/requirements.txt" in build
    assert "install --no-deps /wheels/evenstep-*.whl" in build
    assert "--output-file /opt/evenstep/sbom.cdx.json /opt/evenstep/bin/python" in build
    assert lock.count("==") == len(pinned) == len(re.findall(r"== ?\S+ \\\n +--hash=sha256:", lock))
    assert extras >= {"discovery", "fast", "gateway", "tokenizer", "tracing"}
    assert [str(each) for each in wanted if pinned[each.name] not in each.specifier] == []


def test_the_router_is_not_root_and_its_health_check_tells_how_it_does(tmp_path: Path) -> None:
    text = (FOLDER / "Dockerfile").read_text()
    image = text[text.index(" AS router") : text.index("FROM ${VLLM}")]
    (check,) = re.findall(r"^HEALTHCHECK .*CMD \\\n *(\[.*\])$", image, re.MULTILINE)
    port = free_port()
    command = [sys.executable, *json.loads(check)[1:]]

    def status() -> int:
        environment = {**os.environ, "EVENSTEP_PORT": str(port)}
        return subprocess.run(
            command, env=environment, capture_output=True, check=False, timeout=60
        ).returncode

    assert re.findall(r"^USER (\d+):(\d+)$", image, re.MULTILINE) == [("10001", "10001")]
    assert status() == 1
    emulate = [sys.executable, "-m", "router.cli", "emulate", "--port", str(port)]
    with running(emulate, port, tmp_path / "emulate.log"):
        assert status() == 0


def test_grafana_finds_the_dashboards_where_they_are_mounted() -> None:
    provider = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"][0]
    source = yaml.safe_load((FOLDER / "grafana" / "datasource.yml").read_text())["datasources"][0]
    grafana = services("emulated")["grafana"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in grafana["volumes"])

    folder = (FOLDER / mounted[provider["options"]["path"]]).resolve()
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert folder == ROOT / "dashboards"
    assert home.startswith(provider["options"]["path"])
    assert (folder / Path(home).name).is_file()
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_reads_the_engines_of_the_profile(profile: str, tmp_path: Path) -> None:
    shutil.copy(FOLDER / "engines" / f"{profile}.yml", tmp_path / "engines.yml")
    for name in ("prometheus.yml", "rules.yml"):
        shutil.copy(FOLDER.parent / "prometheus" / name, tmp_path)
    done = subprocess.run(
        [program("promtool"), "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    router = command({"emulated": "router", "gpu": "router-gpu"}[profile], profile)
    ports = set(re.findall(r"http://127\.0\.0\.1:(\d+)", " ".join(router)))
    scraped = yaml.safe_load((tmp_path / "engines.yml").read_text())[0]["targets"]
    assert set(scraped) == {f"router:{port}" for port in ports}


def test_fleet_and_router_run_and_find_each_other(tmp_path: Path) -> None:
    first = free_port(13)
    router_port = free_port()
    moved = {"8000": router_port} | {str(8100 + i): first + i for i in range(13)}

    def here(name: str) -> list[str]:
        line = re.sub(r"\b8[01]\d\d\b", lambda found: str(moved[found[0]]), " ".join(command(name)))
        return [sys.executable, "-m", "router.cli", *line.replace("0.0.0.0", "127.0.0.1").split()]

    with (
        running(here("fleet"), first, tmp_path / "fleet.log"),
        running(here("router"), router_port, tmp_path / "router.log", ready_s=180) as router,
    ):
        wait_until(
            lambda: _followed(router) == 4, 60, "the router follows the state of all four workers"
        )


def _followed(router: Server) -> int:
    """Workers whose state is known from their snapshots."""
    lines = router.get("/metrics").text.splitlines()
    return sum('source="snapshots"' in line and line.endswith(" 1.0") for line in lines)


def test_the_gpu_router_has_a_worker_for_every_rank() -> None:
    serve = [sys.executable, "-m", "router.cli", *command("router-gpu", "gpu"), "--print-config"]
    told = subprocess.run(serve, capture_output=True, text=True, check=True, timeout=60).stdout

    assert told.count("rank = ") == int(settings()["GPUS"])
    vllm = services("gpu")["vllm"]["command"]
    streams = re.search(r'"snapshots": "tcp://127\.0\.0\.1:(\d+)"', vllm[-1])
    assert streams
    for rank in range(int(settings()["GPUS"])):
        assert f"tcp://127.0.0.1:{int(streams[1]) + 2 * rank}" in told
