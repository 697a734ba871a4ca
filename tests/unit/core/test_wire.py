"""Snapshots as bytes: what is read, what is refused and how that is said."""

import math
from typing import Any, Literal

import msgspec
import pytest

from router.core.errors import SnapshotError
from router.core.types import MOST_RUNNING, RunningRequest, Snapshot
from router.core.wire import (
    MOST_BYTES,
    PowerMessage,
    decode,
    decode_power,
    encode,
    epoch_of,
    full_endpoint,
)
from tests.support.core import LARGE_SNAPSHOT, fields_of, running, snapshot


def changed(**fields: object) -> bytes:
    """An encoded snapshot with fields replaced or added; a field of ``...`` is left out."""
    content = fields_of(snapshot("delta", 1)) | fields
    return msgspec.msgpack.encode({k: v for k, v in content.items() if v is not ...})


@pytest.mark.parametrize("sent", [snapshot("delta", 1), LARGE_SNAPSHOT])
def test_what_is_encoded_is_decoded(sent: Snapshot) -> None:
    assert decode(encode(sent)) == sent


def test_unknown_fields_are_ignored() -> None:
    assert decode(changed(moon_phase={"full": [1, 2]})) == snapshot("delta", 1)


@pytest.mark.parametrize("version", [0, 2, 1 << 40])
def test_another_schema_is_refused_with_the_mend(version: int) -> None:
    with pytest.raises(SnapshotError, match=f"schema {version}, this router schema 1: install"):
        decode(changed(version=version, kind="holographic"))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="not msgpack"),
        pytest.param(encode(LARGE_SNAPSHOT)[:-1], id="cut short"),
        pytest.param(encode(LARGE_SNAPSHOT) + b"\x00", id="something behind it"),
        pytest.param(msgspec.msgpack.encode([1, 2]), id="not a map"),
        pytest.param(b"\x81\xa1\xff\x01", id="a key that is not UTF-8"),
        pytest.param(changed(version=...), id="no version"),
        pytest.param(changed(version="1"), id="version as text"),
        pytest.param(changed(epoch=...), id="a field missing"),
        pytest.param(changed(kind="whole"), id="unknown kind"),
        pytest.param(changed(sequence=1.5), id="wrong type"),
        *[
            pytest.param(changed(**{name: value}), id=f"{name} of {value:g}")
            for name in ("time_s", "step_s", "waited_s", "power_w", "energy_j")
            for value in (-1.0, math.inf, math.nan)
        ],
        pytest.param(changed(running=[{"id": "x"}]), id="a running request cut short"),
        pytest.param(encode(snapshot("full", 1, running("x", 5, 1, 7))), id="more left than all"),
        pytest.param(encode(LARGE_SNAPSHOT) + bytes(MOST_BYTES), id="beyond all bounds"),
        *[
            pytest.param(changed(**{name: value}), id=f"{name} of {value}")
            for name in ("rank", "sequence", "step", "waiting", "slots", "preemptions_total")
            for value in (-1, (1 << 63) - 1)
        ],
        pytest.param(changed(epoch="X").replace(b"X", b"\xff"), id="text that is not UTF-8"),
        pytest.param(b"\x81\xa1x" + b"\x91" * 100_000, id="nested without end"),
    ],
)
def test_anything_else_is_no_snapshot(message: bytes) -> None:
    with pytest.raises(SnapshotError, match=r"^not a snapshot: "):
        decode(message)


@pytest.mark.parametrize(
    ("endpoint", "full"),
    [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        ("tcp://[::1]:65534", "tcp://[::1]:65535"),
        ("ipc:///tmp/worker", "ipc:///tmp/worker.full"),
        ("inproc://worker", "inproc://worker.full"),
    ],
)
def test_full_snapshots_are_asked_for_next_door(endpoint: str, full: str) -> None:
    assert full_endpoint(endpoint) == full


@pytest.mark.parametrize("port", ["", ":", ":0", ":65535", ":-1", ":http", ":5557/"])
def test_a_tcp_endpoint_needs_a_port_with_a_neighbour(port: str) -> None:
    with pytest.raises(SnapshotError, match="needs a port from 1 to 65534"):
        full_endpoint(f"tcp://host{port}")


POWER = PowerMessage("w", 1, 1e9, 300.5, 12.25)


@pytest.mark.parametrize("sent", [POWER, PowerMessage("", 0, 0.0)])
def test_an_agents_message_is_read_back(sent: PowerMessage) -> None:
    assert decode_power(encode(sent)) == sent


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (encode(snapshot("delta", 1)), "not a message of an agent: Invalid value 'delta'"),
        (encode(msgspec.structs.replace(POWER, version=2)), "schema 2, this router schema 1"),
        (encode(msgspec.structs.replace(POWER, power_w=-1.0)), ">= 0.0 - at `\\$.power_w`"),
        (encode(msgspec.structs.replace(POWER, power_w=math.nan)), ">= 0.0 - at `\\$.power_w`"),
        (
            encode(msgspec.structs.replace(POWER, energy_j=math.inf)),
            "<= 1000000000000000.0 - at `\\$.energy_j`",
        ),
        (b"", "not a message of an agent"),
    ],
)
def test_what_is_no_agents_message_is_refused(message: bytes, wrong: str) -> None:
    with pytest.raises(SnapshotError, match=wrong):
        decode_power(message)


@pytest.mark.parametrize(
    ("message", "epoch"),
    [(changed(epoch="e7", waiting=-1), "e7"), (changed(epoch=7), ""), (b"\xc1", ""), (b"", "")],
)
def test_whose_a_refused_message_is_can_be_told_by_its_epoch(message: bytes, epoch: str) -> None:
    assert epoch_of(message) == epoch


def test_what_is_quoted_of_a_message_is_short() -> None:
    with pytest.raises(SnapshotError) as raised:
        decode(changed(kind="x" * 1_000_000))
    assert len(str(raised.value)) < 300


def test_a_reader_of_snapshots_refuses_an_agents_message() -> None:
    with pytest.raises(SnapshotError, match="not a snapshot"):
        decode(encode(POWER))


class OlderSnapshot(msgspec.Struct):
    """The fields that matter of a router that does not know growths."""

    kind: Literal["full", "delta"]
    running: tuple[dict[str, object], ...] = ()


def test_an_older_router_reads_plain_deltas_and_refuses_growths() -> None:
    older = msgspec.msgpack.Decoder(OlderSnapshot)
    placed = RunningRequest("a", 5, 1, place=3)
    plain = snapshot("delta", 1, placed)
    assert older.decode(encode(plain)).running[0]["generated_tokens"] == 1
    growth = msgspec.structs.replace(plain, kind="growth", growths=b"\2")
    assert decode(encode(growth)) == growth
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'growth'"):
        older.decode(encode(growth))


ROW: dict[str, Any] = {"id": "a", "prompt_tokens": 1, "generated_tokens": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"growths": bytes(2 * MOST_RUNNING + 1)},
        {"growths": "text"},
        {"running": [ROW | {"place": -1}]},
        {"running": [ROW | {"place": 2 * MOST_RUNNING}]},
    ],
)
def test_growths_and_places_have_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError):
        decode(changed(kind="growth", **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"blocks_stored": b"sevens."},
        {"blocks_removed": bytes(9)},
        {"chains": [["cmpl-1", 0, bytes(16)], ["cmpl-2", 0, bytes(15)]]},
    ],
)
def test_ids_of_blocks_are_whole(fields: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError, match="an id of a block has 8 bytes"):
        decode(changed(**fields))
