"""Whatever a well-formed snapshot says, it is refused or taken in, and so is the next good one."""

import math
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.errors import SnapshotError
from router.core.events import SnapshotReceived
from router.core.forecast.end_signals import ProvenSignal
from router.core.forecast.look_ahead import LookAhead
from router.core.policies.policy_table import POLICIES, PolicySettings
from router.core.queue.pool import Pool
from router.core.rounds.decider import Decider
from router.core.state.group import Group
from router.core.types import Dispatch, Snapshot, WorkerSpec
from router.core.wire import decode
from tests.support.core import fields_of, part, running, snapshot

NUMBER = st.sampled_from([-(1 << 63), -1, 0, 1, 7, 1 << 32, 1 << 53, (1 << 63) - 1])
FLOAT = st.sampled_from([-math.inf, -1.0, 0.0, 5e-324, 0.5, 1.0, 1e15, 1e308, math.inf, math.nan])
ID = st.sampled_from(["", "x", "\n", part(1), part(1, 1), part(2)])
IDS = st.lists(ID, max_size=3)
ROW = st.fixed_dictionaries(
    {"id": ID, "prompt_tokens": NUMBER, "generated_tokens": NUMBER},
    optional={
        **dict.fromkeys(("prefill_left", "cached_tokens", "place"), NUMBER),
        "end_probability": FLOAT,
    },
)
KV = st.fixed_dictionaries(dict.fromkeys(("block_size", "blocks_used", "blocks_total"), NUMBER))
SAID = st.fixed_dictionaries(
    {"kind": st.sampled_from(["full", "delta", "growth"])},
    optional={
        **dict.fromkeys(("rank", "sequence", "step", "waiting", "waiting_tokens"), NUMBER),
        **dict.fromkeys(("slots", "admissible_kv_tokens", "preemptions_total"), NUMBER),
        **dict.fromkeys(("waiting_routed", "scheduled_decode_tokens"), NUMBER),
        **dict.fromkeys(("time_s", "step_s", "waited_s", "power_w", "energy_j"), FLOAT),
        **dict.fromkeys(("finished", "preempted"), IDS),
        "epoch": st.sampled_from(["e1", "e2", ""]),
        "running": st.lists(ROW, max_size=3),
        "growths": st.binary(max_size=9),
        "kv_groups": st.lists(KV, max_size=2),
    },
)


def good(sequence: int) -> Snapshot:
    return snapshot("full", sequence, running(part(1), 100, 10), slots=8, step_s=0.01)


@settings(deadline=None)
@given(st.lists(SAID, max_size=4))
@example([{"kind": "delta", "running": [{"id": "x", "prompt_tokens": 1, "generated_tokens": -5}]}])
@example([{"kind": "delta", "sequence": 1 << 53}])
@example([{"kind": "growth", "sequence": 2, "growths": b"\3" * 900}])
@example([{"kind": "full", "kv_groups": [{"block_size": 1, "blocks_used": 0, "blocks_total": 0}]}])
def test_the_next_good_snapshot_is_taken_in(said: list[dict[str, Any]]) -> None:
    group = Group("default")
    group.join(WorkerSpec("a", ""))
    group.note_health("a", None)
    look_ahead = LookAhead(ProvenSignal())
    policy = POLICIES["fcfs"].make(PolicySettings())
    decider = Decider(group, Pool(8, 5.0, 60.0), policy, policy, Dispatch.POOL, look_ahead)
    group.receive(SnapshotReceived("a", good(1), 0.0))
    for fields in said:
        content = {**fields_of(snapshot("delta", 2)), **fields}
        try:
            told = decode(msgspec.msgpack.encode(content))
        except SnapshotError:
            continue
        decider.learn(step_complete=group.receive(SnapshotReceived("a", told, 0.0)))
    for sequence in (70_000, 70_001):
        decider.learn(step_complete=group.receive(SnapshotReceived("a", good(sequence), 0.0)))
    worker = group.workers["a"]
    assert worker.feed is not None
    assert (worker.feed.sequence, worker.load_tokens, worker.requests) == (70_001, 110, 1)
    look_ahead.advance(256)
    assert math.isfinite(group.energy.joules.total_j)
    outlook = look_ahead.outlook(group.running(), 1, 8)
    assert math.isfinite(outlook.work.sum())
