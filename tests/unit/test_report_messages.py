"""What is published is what the shared types say."""

from __future__ import annotations

import msgspec

from engine_patches.report import SnapshotMessage
from router.types import KvGroup, RunningRequest, Snapshot
from router.wire import decode


def test_the_fields_are_those_of_the_shared_type() -> None:
    mine = {field.name: field.default for field in msgspec.structs.fields(SnapshotMessage)}
    theirs = {field.name: field.default for field in msgspec.structs.fields(Snapshot)}
    assert mine.keys() == theirs.keys()
    for name, default in mine.items():
        # What is left out when it has its default must have the same one where it is read.
        if default is not msgspec.NODEFAULT:
            assert default == theirs[name]


def test_a_message_is_read_as_it_was_meant() -> None:
    message = SnapshotMessage(
        group="g",
        worker="w",
        rank=3,
        epoch="e",
        step=7,
        time_s=1.5,
        step_s=0.25,
        slots=8,
        version=1,
        sequence=9,
        kind="delta",
        running=[RunningRequest("a", 10, 2, 4, 3, 0.5), RunningRequest("b", 1, 0)],
        finished=["c"],
        preempted=("d",),
        waiting=2,
        waiting_tokens=30,
        kv_groups=(KvGroup(16, 1, 10),),
        admissible_kv_tokens=144,
        scheduled_prefill_tokens=5,
        scheduled_decode_tokens=6,
        preemptions_total=1,
        power_w=300.0,
        energy_j=12.0,
    )
    read = decode(msgspec.msgpack.encode(message))
    assert read == Snapshot(
        "delta",
        "g",
        "w",
        3,
        "e",
        9,
        7,
        1.5,
        0.25,
        running=(RunningRequest("a", 10, 2, 4, 3, 0.5), RunningRequest("b", 1, 0)),
        finished=("c",),
        preempted=("d",),
        waiting=2,
        waiting_tokens=30,
        slots=8,
        kv_groups=(KvGroup(16, 1, 10),),
        admissible_kv_tokens=144,
        scheduled_prefill_tokens=5,
        scheduled_decode_tokens=6,
        preemptions_total=1,
        power_w=300.0,
        energy_j=12.0,
    )
