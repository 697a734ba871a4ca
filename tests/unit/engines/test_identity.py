"""Whose stream it is: what both sides say of it must agree, what neither says cannot disagree."""

import dataclasses
from typing import Any

import msgspec
import pytest

from router.core.types import Snapshot, WorkerSpec
from router.engines.worker_identity import foreign_stream, given_names

ANY = Snapshot("full", "default", "default-0", 0, "epoch", 0, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        ({}, {}),
        ({}, {"rank": 3, "worker": "default-3"}),
        ({"rank": 3}, {"rank": 3, "group": "g", "worker": "g-3"}),
        ({"group": "g"}, {}),
        ({"id": "mine"}, {}),
        ({"id": "mine"}, {"worker": "mine"}),
        ({}, {"worker": "theirs"}),
    ],
)
def test_streams_that_may_be_the_workers(worker: dict[str, Any], told: dict[str, Any]) -> None:
    assert verdict(worker, told) is None


@pytest.mark.parametrize(
    ("worker", "told", "reason"),
    [
        ({"rank": 0}, {"rank": 1}, "that of rank 1, not of rank 0"),
        ({"group": "moe"}, {"group": "dense"}, "that of group dense, not of group moe"),
        ({"id": "mine"}, {"worker": "theirs"}, "that of worker theirs, not of worker mine"),
    ],
)
def test_streams_that_cannot_be(worker: dict[str, Any], told: dict[str, Any], reason: str) -> None:
    assert reason in str(verdict(worker, told))


def verdict(worker: dict[str, Any], told: dict[str, Any]) -> str | None:
    spec = dataclasses.replace(WorkerSpec("h:1", "http://h:1"), **worker)
    if spec.rank is not None:
        spec = dataclasses.replace(spec, id=f"h:1#{spec.rank}")
    return foreign_stream(spec, given_names([spec])[spec.id], msgspec.structs.replace(ANY, **told))


def test_ranks_of_one_engine_have_no_names_of_their_own() -> None:
    ranks = [WorkerSpec(f"w{rank}", "http://h:1", rank=rank) for rank in (0, 1)]
    assert given_names(ranks) == {"w0": None, "w1": None}
    assert given_names(ranks[:1]) == {"w0": "w0"}
