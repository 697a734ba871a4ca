"""What snapshots show of a group's work: chunks of prompts, windows, tokens of a step."""

import random

import msgspec
import pytest

from router.core.events import SnapshotReceived, WorkerDown, WorkerUp
from router.core.forecast.forecast import DEFAULT_CHUNK, WorkProfile
from router.core.state.cluster import Cluster
from router.core.step_time import StepTime
from router.core.types import KvGroup, RunningRequest, Snapshot, WorkerSpec
from tests.support.core import running, snapshot


def cluster(cost: StepTime | None = None) -> Cluster:
    made = Cluster([WorkerSpec("w", "http://w")], step_time=cost)
    made.apply(WorkerUp("w"))
    return made


def step(number: int, *told: RunningRequest, computed: int) -> Snapshot:
    return msgspec.structs.replace(
        snapshot("full", number, *told), scheduled_prefill_tokens=computed
    )


def profile(of: Cluster) -> WorkProfile:
    return of.groups["default"].profile(WorkProfile())


def test_a_step_that_leaves_prompt_tokens_shows_what_steps_compute() -> None:
    made = cluster()
    assert profile(made).prefill_chunk == DEFAULT_CHUNK
    made.apply(SnapshotReceived("w", step(1, running("a"), computed=100), 0.0))
    assert profile(made).prefill_chunk == DEFAULT_CHUNK, "the step might have computed more"
    made.apply(SnapshotReceived("w", step(2, running("b", 900, 0, 400), computed=500), 0.0))
    assert profile(made).prefill_chunk == 500
    made.apply(SnapshotReceived("w", step(3, running("b", 900, 0, 100), computed=300), 0.0))
    assert profile(made).prefill_chunk == 500
    other = msgspec.structs.replace(
        step(1, running("c", 900, 0, 800), computed=100), epoch="another"
    )
    made.apply(SnapshotReceived("w", other, 0.0))
    assert profile(made).prefill_chunk == 100, "another engine, with other limits"


@pytest.mark.parametrize(
    ("groups", "window", "share"),
    [
        ([KvGroup(16, 0, 99)], None, 1.0),
        ([KvGroup(16, 0, 99), KvGroup(16, 0, 99, "sliding", 1024)], 1024, 0.5),
        (
            [
                *(KvGroup(16, 0, 99), KvGroup(16, 0, 99, "mamba")),
                *[KvGroup(16, 0, 99, "sliding", 512)] * 3,
            ],
            *(512, 0.75),
        ),
    ],
)
def test_windows_are_those_of_the_kv_groups(
    groups: list[KvGroup], window: int | None, share: float
) -> None:
    made = cluster()
    told = msgspec.structs.replace(snapshot("full", 1), kv_groups=tuple(groups))
    made.apply(SnapshotReceived("w", told, 0.0))
    assert (profile(made).window, profile(made).window_share) == (window, share)


def test_a_cost_that_is_fixed_gives_the_profile() -> None:
    found = profile(cluster(StepTime(5e-3, 1e-7, 4e-5, 1e-5)))
    assert (found.request_tokens, found.prefill_beta) == pytest.approx((400, 100))


def pair(cost: StepTime | None) -> Cluster:
    """Two workers that answer, beside one that computes prompts."""
    specs = [WorkerSpec(each, f"http://{each}") for each in "ab"]
    made = Cluster([*specs, WorkerSpec("p", "http://p", role="prefill")], step_time=cost)
    for each in "abp":
        made.apply(WorkerUp(each))
    if cost is None:
        take_steps(made)
    return made


def take_steps(of: Cluster) -> None:
    """Prompts come computed but for their last token; taking one in costs 150 us."""
    chance = random.Random(0)
    lasting: dict[str, dict[str, tuple[int, int]]] = {"a": {}, "b": {}}  # end, prompt tokens
    for number in range(1, 600):
        work, messages = [], []
        for worker, held in lasting.items():
            new = {
                f"{worker}{number}-{i}": (number + chance.randint(20, 60), chance.randint(1, 8000))
                for i in range(chance.choice((0, 0, 0, 1, 2)))
            }
            held |= new
            load = sum(prompt for _, prompt in held.values())
            work.append(1e-7 * load + 1.5e-4 * len(new))
            done = tuple(i for i, (end, _) in held.items() if end == number)
            for each in done:
                del held[each]
            told = [RunningRequest(i, p, 1, p - 1, 0) for i, (_, p) in new.items()]
            message = snapshot("delta" if number > 1 else "full", number, *told, finished=done)
            messages.append(msgspec.structs.replace(message, scheduled_prefill_tokens=len(new)))
        for worker, message in zip(lasting, messages, strict=True):
            told_s = msgspec.structs.replace(message, step_s=5e-3 + max(work))
            of.apply(SnapshotReceived(worker, told_s, 0.0))


def test_a_fetched_prompt_is_no_work_of_its_length() -> None:
    """Its last token is computed on the decode worker, at the cost of taking a request in."""
    for cost, beta in ((None, 1500), (StepTime(5e-3, 1e-7, 0.0, 1e-5), 100)):
        of = pair(cost)
        group = of.groups["default"]
        assert group.profile(WorkProfile(prefill_beta=7.0)).prefill_beta == 0
        of.apply(WorkerDown("p", "gone"))
        assert group.profile(WorkProfile()).prefill_beta == pytest.approx(beta, rel=0.1)
