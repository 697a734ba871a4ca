"""What holds for WAIT and Nested WAIT as printed, in the emulated engine, whatever comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patches.admission.policies.strict import StrictNestedWait, StrictWait
from engine_patches.admission.protocol import Admission
from loadgen.engine.engine import Engine
from loadgen.engine.queues import Eviction, PolicyOrder
from loadgen.engine.request import EngineRequest

CAPACITY = 60
STEP_S = 0.1
MOST_STEPS = 20_000

jobs = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.integers(1, 20),  # output
        st.integers(0, 2),  # type
        st.floats(0, 200),  # arrival
    ),
    max_size=14,
)


def policies() -> st.SearchStrategy[Admission]:
    counts = st.integers(1, 4)
    wait: st.SearchStrategy[Admission] = st.builds(
        StrictWait, st.lists(counts, min_size=1, max_size=3)
    )
    nested: st.SearchStrategy[Admission] = st.builds(
        StrictNestedWait, st.tuples(counts, counts, counts), st.just((3, 8))
    )
    return wait | nested


@given(
    policy=policies(),
    requests=jobs,
    slots=st.integers(1, 8),
    chunk=st.sampled_from([None, 16]),
    restart=st.booleans(),
)
def test_every_request_ends(
    policy: Admission,
    requests: list[tuple[int, int, int, float]],
    slots: int,
    chunk: int | None,
    restart: bool,
) -> None:
    engine = Engine(
        slots, CAPACITY, chunk=chunk, eviction=Eviction(restart), queue=PolicyOrder(policy)
    )
    coming = sorted(requests, key=lambda job: job[3])
    now_s, ended, begun = 0.0, 0, 0
    while coming or engine.unfinished:
        while coming and coming[0][3] <= now_s:
            prompt, output, kind, arrived_s = coming.pop(0)
            number = str(len(requests) - len(coming))
            engine.add(EngineRequest(number, prompt, output, kind=kind, arrived_s=arrived_s))
        schedule = engine.schedule(now_s)
        begun += 1
        assert begun < MOST_STEPS
        assert engine.used_tokens <= CAPACITY
        if schedule.prefill_tokens or schedule.decode_tokens:
            now_s += STEP_S
            ended += len(engine.advance(now_s))
        elif not schedule.preempted:
            later = [coming[0][3]] if coming else []
            if engine.unfinished:
                assert schedule.wake_s is not None
                later.append(schedule.wake_s)
            assert min(later) > now_s
            now_s = min(later)

    assert ended == len(requests)


def test_a_pause_moves_nothing() -> None:
    engine = Engine(8, CAPACITY, queue=PolicyOrder(StrictWait([2])))
    for number in range(3):
        engine.add(EngineRequest(str(number), 5, 4))
    engine.schedule(0.0)
    engine.advance(0.1)

    assert engine.schedule(0.1).decode_tokens == 0
    assert engine.advance(0.2) == []
    assert engine.load_tokens == pytest.approx(2 * 6)
