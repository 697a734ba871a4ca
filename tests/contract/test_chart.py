"""The Helm chart: what it makes of values, and which values it refuses, with Helm itself."""

import re
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from router.cli import COMMANDS
from router.config.serve_settings import SETTINGS
from tests.support.helm import (
    CHART,
    EXAMPLES,
    KUBERNETES,
    NAMESPACE,
    RELEASE,
    Document,
    complaints,
    config_of,
    helm,
    of_kind,
    only,
    refusal,
    rendered,
    values_of,
)
from tests.support.metric_names import asked, own_metrics

ROOT = CHART.parents[2]
LISTED: Document = {"workers": {"list": ["http://a:8000"]}}
SELECTED: Document = {"workers": {"selector": {"app": "vllm"}}}
example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def pod_of(documents: list[Document]) -> Document:
    spec: Document = only(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def router_of(documents: list[Document]) -> Document:
    (router,) = pod_of(documents)["containers"]
    assert isinstance(router, dict)
    return router


@example
def test_kubernetes_accepts_what_is_made_of_each_example(path: Path) -> None:
    documents = rendered(values_of(path))

    found = [
        each for version in KUBERNETES for one in documents for each in complaints(one, version)
    ]
    assert found == []
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(set(names)) == len(names)


def test_what_kubernetes_would_refuse_is_seen() -> None:
    (deployment,) = of_kind(rendered(LISTED), "Deployment")
    deployment["spec"]["replicaz"] = 1
    pool = only(rendered(values_of(CHART.parent / "examples/inference-pool.yaml")), "InferencePool")
    pool["spec"]["targetPorts"] *= 3

    for version in KUBERNETES:
        assert "replicaz" in "".join(complaints(deployment, version))
        assert "too long" in "".join(complaints(pool, version))


@example
def test_lint_finds_nothing(path: Path) -> None:
    report = helm().lint(CHART, values_of(path), strict=True, kube_version="v1.30.0")

    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@example
def test_every_option_that_is_written_is_one_of_the_command(path: Path) -> None:
    documents = rendered(values_of(path))
    command, *options = router_of(documents)["args"]

    assert command in COMMANDS
    assert options == ["--config", "/etc/evenstep/evenstep.toml"]
    assert config_of(documents).keys() - SETTINGS.keys() == set()


@pytest.mark.parametrize("guide", ["docs/kubernetes.md", "deploy/kubernetes/README.md"])
def test_the_guides_install_what_can_be_installed(guide: str) -> None:
    line = r"^helm install \S+ (\S+) -f (\S+)(?: --set (\S+))?$"
    (found,) = re.findall(line, (ROOT / guide).read_text(), re.MULTILINE)
    chart, values, more = found

    assert ROOT / chart == CHART
    assert rendered(values_of(ROOT / values) | helm().parse_set_string(more))


def test_the_chart_and_the_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert {chart["version"], chart["appVersion"]} == {metadata.version("evenstep")}


def test_a_packaged_chart_has_every_dashboard_and_the_rules(tmp_path: Path) -> None:
    with helm().Chart.load(CHART) as chart, tarfile.open(chart.save(tmp_path)) as packed:
        files = [name for name in packed.getnames() if name.startswith("evenstep/files/")]

    boards = [
        f"evenstep/files/dashboards/{path.name}" for path in (ROOT / "dashboards").glob("*.json")
    ]
    assert sorted(files) == sorted([*boards, "evenstep/files/rules.yml"])


def test_dashboards_and_rules_are_the_repositorys() -> None:
    documents = rendered(values_of(CHART.parent / "examples/three-replicas.yaml"))
    boards = {
        name: yaml.safe_load(text)
        for each in of_kind(documents, "ConfigMap")
        if each["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in each["data"].items()
    }

    assert boards == {
        f"evenstep-{path.name}": yaml.safe_load(path.read_text())
        for path in (ROOT / "dashboards").glob("*.json")
    }
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    assert only(documents, "PrometheusRule")["spec"] == rules


def test_the_rules_find_the_router_by_its_job() -> None:
    documents = rendered(values_of(CHART.parent / "examples/three-replicas.yaml"))
    label = only(documents, "PodMonitor")["spec"]["jobLabel"]
    job = only(documents, "Deployment")["spec"]["template"]["metadata"]["labels"][label]

    assert set(re.findall(r'job="(\w+)"', (CHART / "files/rules.yml").read_text())) == {job}


def test_scaling_asks_for_metrics_that_the_router_has() -> None:
    keda = {"enabled": True, "target": {"name": "vllm"}, "prometheus": "http://p:9090"}
    every = {"waitingTokens": 9, "firstTokenSeconds": 2}
    triggers = only(rendered(SELECTED | {"keda": keda | every}), "ScaledObject")["spec"]["triggers"]
    fewer = only(rendered(SELECTED | {"keda": keda | {"slotsInUse": None}}), "ScaledObject")

    assert len(triggers) == 4
    for each in triggers:
        names = asked(each["metadata"]["query"])
        assert names <= own_metrics() > set()
        assert names
    assert [each["name"] for each in fewer["spec"]["triggers"]] == ["waitingRequests"]


# What the router may ask of the API server, for each way to find engines and one or more replicas.
RIGHTS = {
    "list, one": (LISTED, set()),
    "selector, one": (
        SELECTED,
        {("discovery.k8s.io", "endpointslices", None, "list watch")},
    ),
    "LeaderWorkerSet, one": (
        {"workers": {"leaderWorkerSet": "vllm"}},
        {("", "pods", None, "list watch")},
    ),
    "list, two": (
        {**LISTED, "replicas": 2},
        {
            ("coordination.k8s.io", "leases", f"{RELEASE}-evenstep", "get update"),
            ("coordination.k8s.io", "leases", None, "create"),  # it has no name yet
        },
    ),
}


@pytest.mark.parametrize(("values", "rights"), RIGHTS.values(), ids=RIGHTS)
def test_rights_are_the_least(
    values: Document, rights: set[tuple[str, str, str | None, str]]
) -> None:
    documents = rendered(values)
    roles = of_kind(documents, "Role")

    assert not of_kind(documents, "ClusterRole")
    assert {
        (
            *rule["apiGroups"],
            *rule["resources"],
            *rule.get("resourceNames", [None]),
            " ".join(rule["verbs"]),
        )
        for role in roles
        for rule in role["rules"]
    } == rights
    bound = [
        (each["roleRef"]["name"], each["metadata"]["namespace"])
        for each in of_kind(documents, "RoleBinding")
    ]
    assert bound == [(role["metadata"]["name"], role["metadata"]["namespace"]) for role in roles]
    assert pod_of(documents)["automountServiceAccountToken"] is bool(rights)


def test_engines_elsewhere_are_found_there_and_the_lease_stays_here() -> None:
    values = {"replicas": 2, "workers": {"selector": {"app": "vllm"}, "namespace": "models"}}
    documents = rendered(values)
    places = {
        each["metadata"]["name"]: each["metadata"]["namespace"]
        for each in of_kind(documents, "Role")
    }
    config = config_of(documents)

    assert places == {"demo-evenstep-engines": "models", "demo-evenstep-lease": NAMESPACE}
    service = only(documents, "Service", "demo-evenstep-engines")
    assert service["metadata"]["namespace"] == "models"
    assert config["discover"] == ["endpointslices:models/demo-evenstep-engines,port=8000,ranks=1"]
    assert config["replica_lock"] == f"lease:{NAMESPACE}/demo-evenstep"


@example
def test_pods_are_confined(path: Path) -> None:
    """As the Pod Security Standard "restricted" requires, and with a root that nobody writes to."""
    documents = rendered(values_of(path))
    pods = [pod_of(documents), only(documents, "Pod")["spec"]]

    for pod in pods:
        outer = pod["securityContext"]
        assert outer["runAsNonRoot"]
        assert outer["runAsUser"] == outer["runAsGroup"] == 10001
        assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            inner = container["securityContext"]
            assert inner["allowPrivilegeEscalation"] is False
            assert inner["readOnlyRootFilesystem"] is True
            assert inner["capabilities"] == {"drop": ["ALL"]}
            assert {"requests", "limits"} <= container["resources"].keys()


@example
def test_ports_and_probes_fit_the_mode(path: Path) -> None:
    values = values_of(path)
    documents = rendered(values)
    router, config = router_of(documents), config_of(documents)
    service = only(documents, "Service", "demo-evenstep")
    probes = [router[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]

    ports = {each["name"]: each["containerPort"] for each in router["ports"]}
    # What gateways ask over HTTP is open only where it is wanted.
    hidden = {"http"} if values.get("mode") == "pick" else set()
    assert {each["targetPort"] for each in service["spec"]["ports"]} == ports.keys() - hidden
    assert ports["http"] == config["port"]
    if values.get("mode") == "pick":
        assert ports["grpc"] == config["grpc_port"] == 9002
        asked_for = [probe["grpc"]["service"] for probe in probes]
        assert asked_for == ["liveness", "liveness", "readiness"]
        pool = only(documents, "InferencePool")["spec"]["endpointPickerRef"]
        (port,) = (each for each in service["spec"]["ports"] if each["targetPort"] == "grpc")
        assert (pool["name"], pool["port"]["number"]) == ("demo-evenstep", port["port"])
    else:
        paths = [probe["httpGet"]["path"] for probe in probes]
        assert paths == [
            "/version",
            "/version",
            "/ready" if values.get("replicas", 1) > 1 else "/health",
        ]
        schemes = {probe["httpGet"]["scheme"] for probe in probes}
        assert schemes == {"HTTPS" if "tls" in values else "HTTP"}


def test_a_picker_is_asked_over_http_where_it_is_wanted() -> None:
    values = LISTED | {"mode": "pick", "service": {"pickHttp": True}}
    service = only(rendered(values), "Service", "demo-evenstep")
    assert [each["name"] for each in service["spec"]["ports"]] == ["http", "grpc"]


def test_files_that_the_settings_name_are_mounted() -> None:
    documents = rendered(
        LISTED
        | {"keys": {"clients": "a", "workers": "b", "streams": "c", "admin": "d"}, "tls": "e"}
    )
    named = {
        Path(v)
        for k, v in config_of(documents).items()
        if k.endswith(("_file", "tls_cert", "tls_key"))
    }
    mounts = {
        each["name"]: Path(each["mountPath"]) for each in router_of(documents)["volumeMounts"]
    }
    secrets = {
        mounts[each["name"]]: each["secret"]["secretName"]
        for each in pod_of(documents)["volumes"]
        if "secret" in each
    }

    assert {path.parent for path in named} == secrets.keys()
    assert len(named) == 6
    assert sorted(secrets.values()) == ["a", "b", "c", "d", "e"]


def test_a_pod_has_the_time_that_its_router_takes_to_end() -> None:
    ending = {"updateDelaySeconds": 7, "drainDelaySeconds": 11, "graceSeconds": 13}
    picker = {"mode": "pick", "replicas": 2}
    pods = [
        pod_of(rendered(LISTED | {"ending": ending} | values))
        for values in ({}, {"replicas": 2}, picker)
    ]

    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [34, 34, 41]
    hooks = [pod["containers"][0].get("lifecycle") for pod in pods]
    assert hooks == [None, None, {"preStop": {"sleep": {"seconds": 7}}}]


def test_replicas_are_all_ready_but_of_pickers_only_the_one_that_decides() -> None:
    for mode, rolling, budget in (
        ("serve", {"maxSurge": 1, "maxUnavailable": 0}, 1),
        ("pick", {"maxSurge": "100%", "maxUnavailable": "100%"}, "100%"),
    ):
        documents = rendered(LISTED | {"mode": mode, "replicas": 2})
        strategy = only(documents, "Deployment")["spec"]["strategy"]
        assert strategy["rollingUpdate"] == rolling
        disruption = only(documents, "PodDisruptionBudget")["spec"]
        assert disruption["maxUnavailable"] == budget


def test_a_network_policy_takes_narrower_and_more_rules() -> None:
    api = {"ipBlock": {"cidr": "10.0.0.1/32"}}
    traces = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 4318}]}
    rules = {"enabled": True, "engines": [{"podSelector": {}}], "apiServer": [api]}
    values = LISTED | {"replicas": 2, "networkPolicy": rules | {"egress": [traces]}}
    egress = only(rendered(values), "NetworkPolicy")["spec"]["egress"]
    ports = [{"port": number, "protocol": "TCP"} for number in (443, 6443)]
    assert {"ports": ports, "to": [api]} in egress
    assert traces in egress


def test_names_have_no_dots() -> None:
    service = only(rendered(LISTED | {"fullnameOverride": "router.v1.2"}), "Service")
    assert service["metadata"]["name"] == "router-v1-2"


def test_replicas_may_reach_each_other() -> None:
    values = LISTED | {"replicas": 2}
    peers = {"networkPolicy": {"enabled": True, "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}}
    peers["networkPolicy"]["engines"] = [{"podSelector": {}}]
    documents = rendered(values | peers)
    policy = only(documents, "NetworkPolicy")["spec"]
    own = {"podSelector": policy["podSelector"]}
    assert own in policy["ingress"][0]["from"]
    assert {"ports": [{"port": "http"}], "to": [own]} in policy["egress"]


def test_other_settings_begin_other_pods() -> None:
    def mark(**settings: object) -> str:
        deployment = only(rendered(LISTED | {"settings": settings}), "Deployment")
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"])

    assert mark(pool_size=9) == mark(pool_size=9) != mark(pool_size=8)


POOL = {"mode": "pick", "inferencePool": {"enabled": True}}
KEDA = {"enabled": True, "target": {"name": "vllm"}, "prometheus": "http://p:9090"}
REFUSED: dict[str, tuple[Document, str]] = {
    "no engines": ({}, "no engines: give workers.selector"),
    "engines twice": (
        {"workers": {"list": ["http://a:1"], "leaderWorkerSet": "vllm"}},
        "leave one of workers.leaderWorkerSet and workers.list out",
    ),
    "options of a list": (
        {"workers": {"list": ["http://a:1"], "options": "slots=2"}},
        "write options after each URL",
    ),
    "pool without picker": (SELECTED | POOL | {"mode": "serve"}, "set mode to pick"),
    "pool of a list": (LISTED | POOL, "an InferencePool selects pods: give"),
    "pool elsewhere": (
        POOL | {"workers": {"selector": {"app": "v"}, "namespace": "models"}},
        "an InferencePool and its pods are in one namespace",
    ),
    "nine ports": (
        POOL | {"workers": {"selector": {"app": "v"}, "ports": list(range(8000, 8009))}},
        "at most 8 ports",
    ),
    "ports apart": (
        {"workers": {"selector": {"app": "v"}, "ports": [8000, 8002]}},
        "workers.ports: the ports of a pod's ranks follow one another",
    ),
    "a setting of the chart": (
        LISTED | {"settings": {"grace_s": 3}},
        "settings.grace_s: the chart sets it to 30; see values.yaml",
    ),
    "engines among settings": (
        SELECTED | {"settings": {"workers": ["http://a:1"]}},
        "named by workers.list",
    ),
    "a key among settings": (
        LISTED | {"settings": {"api_key_file": "/x"}},
        "settings.api_key_file: keys and certificates come from Secrets",
    ),
    "confined from what": (
        LISTED | {"networkPolicy": {"enabled": True}},
        "networkPolicy.engines: nobody knows the labels of listed engines",
    ),
    "scaling what": (SELECTED | {"keda": KEDA | {"target": {"name": ""}}}, "keda.target.name"),
    "scaling by what": (SELECTED | {"keda": KEDA | {"prometheus": ""}}, "keda.prometheus: the URL"),
    "scaling without trigger": (
        SELECTED | {"keda": KEDA | {"waitingRequests": None, "slotsInUse": None}},
        "none of waitingRequests",
    ),
    "scaling from 5 to 4": (
        SELECTED | {"keda": KEDA | {"minReplicas": 5}},
        r"keda.minReplicas (5) is above keda.maxReplicas (4)",
    ),
    "scaling a list": (LISTED | {"keda": KEDA}, "neither come nor go"),
    "one port for two": (LISTED | {"adminPort": 8000}, "8000 is the clients' port"),
    "certificate of a picker": (
        SELECTED | {"mode": "pick", "tls": "c"},
        "clients connect to the gateway",
    ),
    "unknown value": (LISTED | {"replica": 2}, "additional properties 'replica' not allowed"),
    "unknown mode": (LISTED | {"mode": "proxy"}, "value must be one of 'serve', 'pick'"),
    "no replica": (LISTED | {"replicas": 0}, "minimum: got 0, want 1"),
    "not a URL": ({"workers": {"list": ["a:8000"]}}, "does not match pattern"),
    "no digest": (LISTED | {"image": {"digest": "sha256:1"}}, "does not match pattern"),
    "no share": (SELECTED | {"keda": {"slotsInUse": 1.5}}, "maximum: got 1.5, want 1"),
    "a table as setting": (LISTED | {"settings": {"policy": {"a": 1}}}, "got object, want"),
}


@pytest.mark.parametrize(("values", "reason"), REFUSED.values(), ids=REFUSED)
def test_wrong_values_are_refused_with_a_reason(values: Document, reason: str) -> None:
    assert reason in refusal(values)


def test_every_reason_of_the_templates_is_tested() -> None:
    checks = (CHART / "templates/_checks.tpl").read_text()
    reasons = re.findall(r'fail (?:\(printf )?"([^"%]{6,})', checks)

    unseen = [
        reason
        for reason in reasons
        if not any(reason[:20] in refusal(values) for values, _ in REFUSED.values())
    ]
    assert len(reasons) == checks.count("{{ fail ") + checks.count("{{- fail ")
    assert unseen == []


def test_every_value_has_a_place_in_the_schema() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(value: object, known: Document, at: str) -> list[str]:
        if not isinstance(value, dict) or "properties" not in known:
            return []
        return [
            lacking
            for name, inner in value.items()
            for lacking in (
                [f"{at}{name}"]
                if name not in known["properties"]
                else missing(inner, known["properties"][name], f"{at}{name}.")
            )
        ]

    assert missing(values, schema, "") == []
    assert schema["properties"].keys() - values.keys() == {"global"}
