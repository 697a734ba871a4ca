"""deploy/kubernetes: Kubernetes accepts it, and its engines are those that the chart looks for."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from engine_patches.plugin.settings import Settings, read_settings
from router.config.discover_notation import parse_discover
from router.engines.curve_keys import write_key_pair
from tests.support.engine import Installation
from tests.support.helm import (
    CHART,
    KUBERNETES,
    Document,
    complaints,
    config_of,
    only,
    rendered,
    values_of,
)

FOLDER = CHART.parents[1] / "kubernetes"
DOCUMENTS: list[Document] = list(yaml.safe_load_all((FOLDER / "wide-ep.yaml").read_text()))
GROUP = only(DOCUMENTS, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
POD = GROUP["workerTemplate"]["spec"]
(ENGINE,) = POD["containers"]
VALUES = values_of(CHART.parent / "examples" / "wide-ep.yaml")

_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.dp_supervisor import _build_vllm_dp_server_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
validate_parsed_serve_args(args)
ranks = [_build_vllm_dp_server_args(args, rank) for rank in range(args.data_parallel_size_local)]
print(json.dumps([[rank.port, rank.data_parallel_rank] for rank in ranks]))
"""


def command(worker: int, router_key: str = "k" * 40) -> list[str]:
    """What the pod of this index in its group starts: the arguments of ``vllm serve``."""
    (script,) = ENGINE["args"]
    told = {each["name"]: each["value"] for each in ENGINE["env"] if "value" in each}
    # The controller's own, and what ConfigMaps and Secrets say.
    group = {"LWS_GROUP_SIZE": GROUP["size"], "LWS_WORKER_INDEX": worker}
    others = {"LWS_LEADER_ADDRESS": "vllm-0.vllm", "ROUTER_KEY": f"{router_key}\n"}
    variables = {name: str(value) for name, value in (told | group | others).items()}
    show = script.replace("exec vllm serve", "printf '%s\\0'")
    done = subprocess.run(
        [*ENGINE["command"], show], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.removesuffix("\0").split("\0")


def options(arguments: list[str]) -> Mapping[str, str]:
    following = [*arguments[1:], ""]
    return {
        name: next_ for name, next_ in zip(arguments, following, strict=True) if name[:2] == "--"
    }


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    pods = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "engines"},
        "template": GROUP["workerTemplate"],
    }
    assert [each for one in (*DOCUMENTS, pods) for each in complaints(one, version)] == []


def test_each_rank_has_a_port_that_is_scraped_allowed_and_discovered() -> None:
    ranks = int(options(command(0))["--data-parallel-size-local"])
    first = int(options(command(0))["--port"])
    wanted = list(range(first, first + ranks))
    named = {each["name"]: each["containerPort"] for each in ENGINE["ports"]}

    assert [port for name, port in named.items() if name.startswith("rank-")] == wanted
    scraped = [
        named[each["port"]] for each in only(DOCUMENTS, "PodMonitor")["spec"]["podMetricsEndpoints"]
    ]
    assert scraped == wanted
    (allowed,) = only(DOCUMENTS, "NetworkPolicy")["spec"]["ingress"][1]["ports"]
    assert (allowed["port"], allowed["endPort"]) == (wanted[0], wanted[-1])
    assert VALUES["workers"]["ports"] == wanted
    assert named["supervisor"] == int(options(command(0))["--data-parallel-supervisor-port"])


def test_pods_of_a_group_divide_its_ranks() -> None:
    parts = [options(command(worker)) for worker in range(GROUP["size"])]
    size = {int(part["--data-parallel-size"]) for part in parts}
    starts = [int(part["--data-parallel-start-rank"]) for part in parts]
    local = int(parts[0]["--data-parallel-size-local"])

    assert size == {GROUP["size"] * local}
    assert starts == [worker * local for worker in range(GROUP["size"])]
    assert {part["--data-parallel-address"] for part in parts} == {"vllm-0.vllm"}


def plug_in(worker: int, folder: Path, router_key: str) -> Settings:
    told = options(command(worker, router_key))["--additional-config"]
    return read_settings(
        yaml.safe_load(told.replace("/etc/evenstep/key_secret", str(folder / "engine")))
    )


def test_the_router_finds_each_rank_where_it_is(tmp_path: Path) -> None:
    """Its port, its number in the group, and where the plug-in tells its state."""
    router, engine = (write_key_pair(tmp_path / name) for name in ("router", "engine"))
    (text,) = config_of(rendered(VALUES))["discover"]
    given = parse_discover(re.sub(r"server_key=[^,]+", f"server_key={engine}", text))

    assert given.kind == "lws"
    for worker in range(GROUP["size"]):
        parts = options(command(worker))
        first, port = (int(parts[name]) for name in ("--data-parallel-start-rank", "--port"))
        settings = plug_in(worker, tmp_path, router)
        found = given.workers("10.0.0.7", [], first_rank=worker)
        assert [(each.url, each.rank, each.snapshots) for each in found] == [
            (
                f"http://10.0.0.7:{port + place}",
                first + place,
                settings.endpoint(first + place).replace("0.0.0.0", "10.0.0.7"),
            )
            for place in range(int(parts["--data-parallel-size-local"]))
        ]


def test_the_plug_in_accepts_its_settings(tmp_path: Path) -> None:
    router, engine = (write_key_pair(tmp_path / name) for name in ("router", "engine"))
    settings = plug_in(1, tmp_path, router)

    assert engine != router
    assert settings.allowed_keys == (router,)
    assert settings.secured
    slots = re.search(r"slots=(\d+)", VALUES["workers"]["options"])
    assert slots
    assert slots[1] == options(command(0))["--max-num-seqs"]


def test_secrets_and_configmaps_are_those_that_the_guide_makes() -> None:
    guide = (FOLDER / "README.md").read_text()
    made = set(re.findall(r"kubectl create (secret generic|configmap) (\S+)", guide))
    references = [
        *(each["valueFrom"] for each in ENGINE["env"] if "valueFrom" in each),
        *(volume for volume in POD["volumes"] if "secret" in volume),
    ]
    used = {
        (kind, source.get("secretName") or source["name"])
        for reference in references
        for key, kind in (
            ("secret", "secret generic"),
            ("secretKeyRef", "secret generic"),
            ("configMapKeyRef", "configmap"),
        )
        if (source := reference.get(key))
    }

    assert used | {("secret generic", name) for name in VALUES["keys"].values()} == made


@pytest.mark.engine
def test_vllm_accepts_the_command(engine_installation: Installation) -> None:
    parse = [str(engine_installation.python), "-c", _PARSE, *command(1)]
    done = subprocess.run(parse, capture_output=True, text=True, check=False, timeout=200)

    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout.splitlines()[-1]) == [[8000 + n, 8 + n] for n in range(8)]
