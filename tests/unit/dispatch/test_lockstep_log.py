"""The log says which groups are in lockstep."""

import logging

import pytest

from router.core.state.cluster import Cluster
from router.core.types import WorkerSpec
from router.dispatch.lockstep_log import LockstepLog


def test_each_change_is_said_and_each_doubt_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = Cluster([WorkerSpec(i, "", "g") for i in "abc"])
    group, log = cluster.groups["g"], LockstepLog()

    def said() -> list[str]:
        caplog.clear()
        for _ in range(3):
            log.look(group)
        return [record.getMessage() for record in caplog.records]

    unknown = "without the plug-in nobody tells if it is in lockstep: --lockstep g, or g=no"
    assert said() == [f"group g: {unknown}"]
    for worker in group.workers.values():
        worker.ranks = 3
    assert said() == ["group g: in lockstep: all its workers are up or none (by engines)"]
    cluster.set_lockstep(["g=no"])
    assert said() == ["group g: no longer in lockstep (by setting)"]
    cluster.set_lockstep(())
    assert len(said()) == 1
    group.workers["a"].ranks = 2
    doubt = "group g: 2 ranks are in lockstep, and it has 3 workers: one group for each"
    assert said() == ["group g: no longer in lockstep (by engines)", doubt]
    assert said() == []
