"""The --worker flags that ``evenstep emulate`` prints, for this machine and for others."""

import socket
from typing import Any

import pytest

from loadgen.emulator.emulate_command import EmulateOptions, _ready_text
from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.emulator_settings import EmulatorSettings, snapshot_endpoints
from router.config.worker_notation import parse_worker
from router.core.errors import ConfigError

OWN = ",group=default,rank=0,slots=72"
STATE = ",snapshots=tcp://127.0.0.1:8200"


def flags(host: str) -> list[str]:
    settings = EmulatorSettings(
        workers=1, host=host, port=8100, snapshots=snapshot_endpoints(8200, 1)
    )
    lines = _ready_text(EmulatedFleet(settings)).splitlines()
    return [line.split()[1] for line in lines if line.startswith("  --worker")]


def test_a_policy_of_admission_is_told() -> None:
    told = [
        _ready_text(EmulatedFleet(EmulateOptions(admission=given, snapshots=False).settings()))
        for given in (None, '{"policy": "wait", "hold_s": 0.5}')
    ]

    assert "Who enters" not in told[0]
    assert "Who enters: wait" in told[1].splitlines()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8100"),
        ("localhost", "http://localhost:8100"),
        ("::1", "http://[::1]:8100"),
    ],
)
def test_workers_of_this_machine_alone_are_told_once(host: str, url: str) -> None:
    assert flags(host) == [f"{url}{OWN}{STATE}"]


@pytest.mark.parametrize(
    ("host", "here", "elsewhere"),
    [
        ("0.0.0.0", "127.0.0.1", socket.gethostname()),
        ("::", "[::1]", socket.gethostname()),
        ("10.0.0.7", "10.0.0.7", "10.0.0.7"),
        ("fd00::7", "[fd00::7]", "[fd00::7]"),
    ],
)
def test_other_machines_get_a_name_and_no_state_stream(
    host: str, here: str, elsewhere: str
) -> None:
    told = flags(host)

    assert told == [f"http://{here}:8100{OWN}{STATE}", f"http://{elsewhere}:8100{OWN}"]
    assert [parse_worker(spec).slots for spec in told] == [72, 72]


@pytest.mark.parametrize(
    ("ports", "blamed"),
    [
        ({"port": 70_000}, "--port 70000 leaves no room for 4 workers"),
        ({"port": 65_531}, "--snapshot-port 65536 .* or a lower --port"),
        ({"control_port": 70_000}, "--control-port must be from 0 to 65535"),
    ],
)
def test_the_port_that_was_given_is_blamed(ports: dict[str, Any], blamed: str) -> None:
    with pytest.raises(ConfigError, match=f"^{blamed}"):
        EmulateOptions(**ports).settings()
