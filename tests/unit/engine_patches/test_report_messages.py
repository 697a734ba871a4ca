"""What is published is what the shared types say."""

from typing import Any

import msgspec
import pytest

from engine_patches.stream.publisher import SnapshotMessage
from router.core.types import Snapshot
from router.core.wire import decode
from tests.support.core import LARGE_SNAPSHOT


def test_the_fields_are_those_of_the_shared_type() -> None:
    mine = {field.name: field.default for field in msgspec.structs.fields(SnapshotMessage)}
    theirs = {field.name: field.default for field in msgspec.structs.fields(Snapshot)}
    assert mine.keys() == theirs.keys()
    for name, default in mine.items():
        # What is left out when it has its default must have the same one where it is read.
        if default is not msgspec.NODEFAULT:
            assert default == theirs[name]


@pytest.mark.parametrize("sequence", [tuple, list])
def test_a_message_is_read_as_it_was_meant(sequence: type) -> None:
    told: dict[str, Any] = msgspec.structs.asdict(LARGE_SNAPSHOT)
    told |= {name: sequence(told[name]) for name in ("running", "finished", "preempted")}
    message = SnapshotMessage(**told)

    assert decode(msgspec.msgpack.encode(message)) == LARGE_SNAPSHOT
