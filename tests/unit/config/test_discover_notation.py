import pytest

from router.config.discover_notation import parse_discover
from router.config.setting_sources import load_settings
from router.core.errors import ConfigError
from router.core.types import WorkerSpec


def test_each_port_of_an_address_is_a_rank() -> None:
    given = parse_discover("endpointslices:serving/engines,slots=8,group=east")
    assert given.where == ("serving", "engines")
    url = "http://10.0.0.7"
    assert given.workers("10.0.0.7", [8000]) == [
        WorkerSpec("10.0.0.7:8000", f"{url}:8000", group="east", slots=8)
    ]
    assert given.workers("10.0.0.7", [8000, 8001]) == [
        WorkerSpec(f"10.0.0.7:{8000 + i}#{i}", f"{url}:{8000 + i}", group="east", rank=i, slots=8)
        for i in range(2)
    ]


def test_ranks_count_on_over_the_pods_of_a_group() -> None:
    given = parse_discover("lws:serving/wide,port=8200,ranks=2,kv_events=5557")
    found = given.workers("10.0.0.7", [1], first_rank=3, group="wide-0")
    assert [(spec.url, spec.rank, spec.group, spec.kv_events) for spec in found] == [
        ("http://10.0.0.7:8200", 6, "wide-0", "tcp://10.0.0.7:5557"),
        ("http://10.0.0.7:8201", 7, "wide-0", "tcp://10.0.0.7:5558"),
    ]


def test_ranks_may_be_behind_one_port_with_streams_two_ports_apart() -> None:
    given = parse_discover("dns:engines.serving:8000,shared_ranks=2,snapshots=5600")
    found = given.workers("127.0.0.1", [8000])
    assert [(spec.url, spec.rank, spec.snapshots) for spec in found] == [
        ("http://127.0.0.1:8000", 0, "tcp://127.0.0.1:5600"),
        ("http://127.0.0.1:8000", 1, "tcp://127.0.0.1:5602"),
    ]
    assert parse_discover("dns:a:1").workers("::1", [8000])[0].url == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pods:a/b", "unknown source 'pods'"),
        ("endpointslices:engines", "should be endpointslices:NAMESPACE/SERVICE"),
        ("lws:a", "should be lws:NAMESPACE/NAME"),
        ("dns:host", "should be dns:HOST:PORT"),
        ("file:workers.yaml", "should be file:PATH of a .toml or .json"),
        ("file:workers.toml,slots=8", "should be file:PATH of a .toml or .json"),
        ("dns:a:1,rank=3", "'rank=3' is no key=value of all its workers"),
        ("dns:a:1,slots", "'slots' is no key=value"),
        ("dns:a:1,ranks=2", "ranks=N needs port=N"),
        ("dns:a:1,port=x", "port=x should be a number from 1 to 65535"),
        ("dns:a:1,slot=3", "did you mean slots"),
        ("dns:a:1,slots=x", "slots = 'x'"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_discover(text)
    with pytest.raises(ConfigError, match="discover"):
        load_settings({"discover": (text,)})


def test_sources_may_stand_for_workers() -> None:
    settings = load_settings({"discover": "dns:a:1 file:b.json"})
    assert [each.kind for each in settings.sources] == ["dns", "file"]
