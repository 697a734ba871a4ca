import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.league.entrant import Engines
from tests.bench.league.entrants import ENTRANTS
from tests.bench.league.own import TUNED, weights
from tests.bench.league.pins import PEERS, Peer
from tests.bench.league.proxies import envoy_config, haproxy_config, haproxy_rows
from tests.bench.league.rust_routers import program_settings
from tests.bench.league.starting import told
from tests.bench.league.workloads import WORKLOADS
from tests.bench.tune_peer_rules import REGIMES

AGENTS = WORKLOADS["agents"]
ROOT = Path(__file__).resolve().parents[3]


def engines(scale: float = 1.0, step_time: tuple[float, ...] = (5e-3, 1e-7, 0.0, 5e-5)) -> Engines:
    urls = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    workers = [f"{url},slots=96" for url in urls]
    return Engines(urls, workers, [], 96, 16, "emulated", scale, step_time)


def test_a_peer_is_pinned_to_one_version_or_says_why_it_cannot_run() -> None:
    for peer in PEERS.values():
        pinned = [re.fullmatch(r"[a-z-]+==\d+(\.\d+)+", each) for each in peer.packages]
        assert all(pinned)
        assert bool(pinned) != bool(peer.cannot)
        assert peer.url.startswith("https://")


def test_an_environment_is_that_of_all_its_pins() -> None:
    two = Peer("https://x", ("one==1.0", "two==2.0"))
    assert replace(two, packages=("one==1.0", "two==2.1")).environment != two.environment
    assert Peer("https://x", ("one==1.0",)).environment.name == "peer-one-1.0"
    for peer in PEERS.values():
        for pin in (word for words in peer.pip for word in words if "==" in word):
            # What is installed beside the packages changes with the product.
            assert pin in peer.packages or pin.endswith(f"=={peer.package.partition('==')[2]}")


def test_versions_stand_in_one_place() -> None:
    pins = [package for peer in PEERS.values() for package in peer.packages]
    assert pins
    for folder in ("router", "loadgen", "engine_patches", "deploy", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            assert not [pin for pin in pins if pin in text], file


def test_an_entrant_is_of_a_peer_that_runs_and_tells_how_it_chose() -> None:
    for name, entrant in ENTRANTS.items():
        assert entrant.name == name
        assert name == entrant.peer or name.startswith(f"{entrant.peer} ")
        assert entrant.peer == "evenstep" or PEERS[entrant.peer].packages
        assert entrant.what
        assert entrant.flags
    assert "--policy" not in ENTRANTS["evenstep"].flags


def test_every_peer_that_runs_stands_in_the_league() -> None:
    runs = {name for name, peer in PEERS.items() if peer.packages}
    assert runs == {entrant.peer for entrant in ENTRANTS.values()} - {"evenstep"}


def test_tuned_weights_are_those_of_the_nearest_cost() -> None:
    assert all(set(by_cost) == {cost for cost, _ in REGIMES} for by_cost in TUNED.values())
    assert weights("kv_cost", engines(step_time=(5e-3, 1e-7, 0.0, 2e-5))) == "64"
    assert weights("kv_cost", engines(step_time=(5e-3, 1e-7, 0.0, 1e-5))) == "8"
    assert weights("prefix_score", engines(step_time=())) == "1,0.5,2"


def test_program_scheduling_is_told_memory_and_costs_on_the_clock() -> None:
    settings = program_settings(engines(scale=2.0), 400_000)
    assert settings["token_capacity_per_dp_rank"] == 400_000
    assert settings["max_active_programs_per_target"] == 96
    assert settings["decode_throughput_model"] == {
        "fixed_step_seconds": 1e-2,
        "batch_step_seconds_per_request": 0.0,
        "context_step_seconds_per_token": 2e-7,
    }
    prefill = settings["prefill_cost_model"]
    assert isinstance(prefill, dict)
    assert prefill["linear_seconds_per_1k_tokens"] == pytest.approx(0.1)
    assert "prefill_cost_model" not in program_settings(engines(step_time=()), 1)


def test_envoy_hashes_sessions_and_has_no_limit_in_reach() -> None:
    config = envoy_config(engines(), 9000, 9001, "MAGLEV")
    (listener,), (cluster,) = config["static_resources"].values()
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    assert route["hash_policy"] == [{"header": {"header_name": "x-session-id"}}]
    assert route["timeout"] == manager["stream_idle_timeout"] == "0s"
    assert cluster["lb_policy"] == "MAGLEV"
    (limits,) = cluster["circuit_breakers"]["thresholds"]
    assert min(limits.values()) >= 100_000
    ends = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    places = [end["endpoint"]["address"]["socket_address"] for end in ends]
    assert places == [
        {"address": "127.0.0.1", "port_value": 8001},
        {"address": "127.0.0.1", "port_value": 8002},
    ]


def test_proxies_reach_engines_of_other_machines() -> None:
    far = replace(engines(), urls=["http://gpu1:8000", "http://gpu2:8000"])
    assert "server engine1 gpu2:8000 check" in haproxy_config(far, 9000, 9001, None)
    config = envoy_config(far, 9000, 9001, "LEAST_REQUEST")
    ends = config["static_resources"]["clusters"][0]["load_assignment"]["endpoints"][0]
    hosts = [
        end["endpoint"]["address"]["socket_address"]["address"] for end in ends["lb_endpoints"]
    ]
    assert hosts == ["gpu1", "gpu2"]
    with pytest.raises(ValueError, match="by http alone"):
        haproxy_config(replace(far, urls=["https://gpu1"]), 9000, 9001, None)


def test_haproxy_queues_before_slots_only_if_asked() -> None:
    plain = haproxy_config(engines(), 9000, 9001, None).splitlines()
    assert "  balance leastconn" in plain
    servers = [line for line in plain if line.startswith("  server ")]
    checks = "check inter 1s fall 3 rise 1 observe layer7 error-limit 5 on-error mark-down"
    assert servers == [
        f"  server engine0 127.0.0.1:8001 {checks}",
        f"  server engine1 127.0.0.1:8002 {checks}",
    ]
    queued = haproxy_config(engines(), 9000, 9001, 96).splitlines()
    assert [line for line in queued if line.startswith("  server ")] == [
        f"{server} maxconn 96" for server in servers
    ]


@pytest.mark.parametrize("name", ["envoy maglev", "haproxy leastconn"])
def test_proxies_tell_what_they_do_about_engines_that_fail(name: str) -> None:
    flags = ENTRANTS[name].flags
    if name.startswith("haproxy"):
        given = haproxy_config(engines(), 9000, 9001, None)
        told = [part.removeprefix("server ") for part in flags.split(", ")]
        assert "retry-on conn-failure" in flags
        assert "observe layer7" in flags
        # A request that does not fit is not sent again.
        longest = max(len(ask.prompt) for asks in AGENTS.sessions(0) for ask in asks)
        (buffer,) = re.findall(r"tune.bufsize (\d+)", given)
        assert int(buffer) > 1.5 * longest
    else:
        given = str(envoy_config(engines(), 9000, 9001, "MAGLEV"))
        told = re.findall(
            r"[a-z_\d]*(?:retry|retries|consecutive|ejection|uneject)[a-z_\d]*", flags
        )
        assert "num_retries 3" in flags
        assert "base_ejection_time 5s" in flags
    assert len(told) > 5
    assert [part for part in told if part not in given] == []


def test_smg_tells_which_flags_the_engines_time_sets() -> None:
    for name, entrant in ENTRANTS.items():
        if entrant.peer == "smg":
            for flag in ("--worker-stall-secs", "--worker-wedge-secs", "--disable-tokenizer-"):
                assert flag in entrant.flags, name


def test_haproxy_statistics_are_those_of_its_servers() -> None:
    page = (
        "# pxname,svname,stot,check_status,\n"
        "clients,FRONTEND,7,,\nengines,engine0,3,L7OK,\nengines,engine1,4,* L7OK,\n"
        "engines,BACKEND,7,,\n"
    )
    rows = haproxy_rows(page)
    assert [(row["svname"], row["stot"], row["check_status"]) for row in rows] == [
        ("engine0", "3", "L7OK"),
        ("engine1", "4", "* L7OK"),
    ]


def test_figures_are_summed_by_the_labels_that_count() -> None:
    found = [
        ("sent", {"worker": "http://127.0.0.1:8002", "code": "200"}, 2.0),
        ("sent", {"worker": "http://127.0.0.1:8002", "code": "500"}, 1.0),
        ("sent", {"worker": "http://127.0.0.1:8001", "code": "200"}, 4.0),
        ("other", {}, 9.0),
    ]
    assert told(found, {"sent": ("worker",)}, engines()) == {"sent 1": 3.0, "sent 0": 4.0}
