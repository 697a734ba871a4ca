from __future__ import annotations

from typing import Any

import pytest

from engine_patches.plugin.settings import PlugInError, Settings, read_settings
from router.core.wire import is_local

KEY = "a" * 40


def read(**part: Any) -> Settings:
    return read_settings({"evenstep": part, "other": 1})


def test_defaults() -> None:
    assert read(snapshots="tcp://127.0.0.1:5600") == Settings("tcp://127.0.0.1:5600")


def test_all_keys() -> None:
    settings = read(
        snapshots="tcp://0.0.0.0:5600",
        group="g",
        worker="w",
        secret_key_file="engine.key_secret",
        allowed_keys=[KEY],
    )
    expected = Settings("tcp://0.0.0.0:5600", "g", "w", "engine.key_secret", (KEY,))
    assert settings == expected
    assert settings.secured


def test_admission_has_a_default_of_its_own() -> None:
    settings = read(snapshots="ipc:///x", admission={})
    assert settings.admission is not None
    assert settings.admission.policy == "headroom"
    wait = read(snapshots="ipc:///x", admission={"policy": "wait", "thresholds": [2, 3]})
    assert wait.admission is not None
    assert wait.admission.thresholds == (2, 3)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (None, r"needs its settings: --additional-config"),
        ({}, r"evenstep.snapshots is missing"),
        ({"snapshots": "ipc:///s", "end_signal": "yes"}, r"end_signal must be true or false"),
        ({"snapshots": "ipc:///s", "prompt_budget": 7}, r"prompt_budget must be true or false"),
        ({"snapshot": "x"}, r"no key 'snapshot'; known: snapshots, .*; did you mean snapshots\?"),
        ({"snapshots": 5600}, r"snapshots must be a text, got 5600"),
        ({"snapshots": "127.0.0.1:5600"}, r"must be tcp://HOST:PORT or ipc://PATH"),
        ({"snapshots": "udp://127.0.0.1:5600"}, r"must be tcp://HOST:PORT or ipc://PATH"),
        ({"snapshots": "ipc://"}, r"must be tcp://HOST:PORT or ipc://PATH"),
        ({"snapshots": "tcp://127.0.0.1"}, r"needs a host and a port from 1 to 65534"),
        ({"snapshots": "tcp://127.0.0.1:65535"}, r"needs a host and a port from 1 to 65534"),
        ({"snapshots": "tcp://127.0.0.1:*"}, r"needs a host and a port from 1 to 65534"),
        ({"snapshots": "tcp://:5600"}, r"needs a host"),
        ({"snapshots": "tcp://*:5600"}, r"can be reached from other machines: give"),
        ({"snapshots": "tcp://10.0.0.1:5600"}, r"can be reached from other machines: give"),
        ({"snapshots": "tcp://engine:5600"}, r"can be reached from other machines: give"),
        ({"snapshots": "ipc:///x", "allowed_keys": [KEY]}, r"go together: give both"),
        ({"snapshots": "ipc:///x", "secret_key_file": "k"}, r"go together: give both"),
        ({"snapshots": "ipc:///x", "allowed_keys": "k"}, r"list of public CURVE keys of 40"),
        ({"snapshots": "ipc:///x", "allowed_keys": ["k"]}, r"list of public CURVE keys of 40"),
        ({"snapshots": "ipc:///x", "allowed_keys": ["a" * 39 + ","]}, r"alphabet \(Z85\)"),
        ({"snapshots": "ipc:///x", "group": ""}, r"group must be a text, got ''"),
        ({"snapshots": "ipc:///x", "admission": "wait"}, r"admission must be like \{\"policy\""),
        (
            {"snapshots": "ipc:///x", "admission": {"policy": "headrom"}},
            r"evenstep.admission: there is no policy 'headrom'; known: .*; did you mean headroom\?",
        ),
        (
            {"snapshots": "ipc:///x", "admission": {"policy": "alpha_beta"}},
            r"alpha_beta takes requests out of the batch, which vLLM cannot",
        ),
    ],
)
def test_what_cannot_be_used_is_said(part: Any, message: str) -> None:
    with pytest.raises(PlugInError, match=message):
        read_settings({"evenstep": part} if part is not None else {})


def test_no_settings_at_all() -> None:
    with pytest.raises(PlugInError, match="needs its settings"):
        read_settings(None)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("ipc:///run/x", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.5.0.1:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::]:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://eth0:1", False),
    ],
)
def test_only_loopback_is_local(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local


def test_every_rank_has_two_ports_and_a_name() -> None:
    settings = Settings("tcp://127.0.0.1:5600", group="g")
    assert [settings.endpoint(rank) for rank in (0, 1)] == [
        "tcp://127.0.0.1:5600",
        "tcp://127.0.0.1:5602",
    ]
    assert [settings.name(rank) for rank in (0, 1)] == ["g-0", "g-1"]
    assert Settings("ipc:///x", worker="w").name(3) == "w"
    assert [Settings("ipc:///x").endpoint(rank) for rank in (0, 2)] == ["ipc:///x", "ipc:///x.2"]


def test_a_rank_without_a_port_is_refused() -> None:
    with pytest.raises(PlugInError, match="no port is left for rank 3"):
        Settings("tcp://127.0.0.1:65530").endpoint(3)
