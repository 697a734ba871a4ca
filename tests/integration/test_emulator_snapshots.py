import asyncio
from pathlib import Path

import pytest

from loadgen.emulator.record import read_record
from router.core.step_time import StepTime
from router.core.types import RunningRequest, Snapshot
from tests.support.emulated import client, emulated, eventually, reading


def apply(state: dict[str, RunningRequest], snapshot: Snapshot) -> dict[str, RunningRequest]:
    gone = {*snapshot.finished, *snapshot.preempted}
    after = {
        id_: RunningRequest(id_, r.prompt_tokens, r.generated_tokens + 1)
        for id_, r in state.items()
        if id_ not in gone
    }
    return {**after, **{request.id: request for request in snapshot.running}}


def load_tokens(snapshot: Snapshot) -> int:
    return sum(r.prompt_tokens + r.generated_tokens for r in snapshot.running)


async def test_the_stream_tells_what_the_engine_does(tmp_path: Path) -> None:
    record = tmp_path / "steps.csv"
    settings = {"workers": 2, "slots": 3, "kv_tokens": 120, "record": record}
    async with emulated(tmp_path, **settings) as fleet, client(fleet) as http:
        engine = fleet.workers[0].model.engine
        async with reading(fleet) as reader:
            full = await reader.full()
            state = {request.id: request for request in full.running}
            sequence = full.sequence
            calls = [
                asyncio.create_task(
                    http.post(
                        "/v1/completions",
                        json={"prompt": [1] * (5 + i), "max_tokens": 60, "ignore_eos": True},
                    )
                )
                for i in range(6)
            ]
            finished: list[str] = []
            preempted: list[str] = []
            loads: dict[int, int] = {}
            last = full
            while len(finished) < 6:
                last = await reader.next()
                if last.sequence <= sequence:
                    continue
                assert last.sequence == sequence + 1
                sequence = last.sequence
                state = apply(state, last)
                loads[last.step] = sum(r.prompt_tokens + r.generated_tokens for r in state.values())
                finished += last.finished
                preempted += last.preempted
                assert len(state) <= last.slots == 3
                (kv,) = last.kv_groups
                assert kv.blocks_used == loads[last.step]
            await asyncio.gather(*calls)
        assert state == {}
        assert len(set(finished)) == 6
        assert last.preemptions_total == engine.preemptions_total == len(preempted) > 0
    rows = read_record(record)
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert {row.stepped for row in rows} == {"all"}
    assert all(row.running[1] == 0 and row.running[0] > 0 for row in rows)
    assert all(row.load_tokens[0] <= 120 for row in rows)
    shown = [(row.load_tokens[0], loads[row.step - 1]) for row in rows if row.step - 1 in loads]
    assert all(load >= before for load, before in shown if before <= 120)


async def test_idle_workers_step_along_with_the_barrier(tmp_path: Path) -> None:
    async with emulated(tmp_path, workers=2) as fleet, client(fleet) as http:
        async with reading(fleet, rank=1) as idle:
            await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 9})
            steps: list[tuple[int, object, float | None]] = []
            while len(steps) < 9:
                snapshot = await idle.next()
                if snapshot.step_s > 0:
                    steps.append((snapshot.step, snapshot.running, snapshot.power_w))
        assert steps == [(step, (), 100.0) for step in range(1, 10)]


async def test_alone_an_idle_worker_sleeps(tmp_path: Path) -> None:
    async with emulated(tmp_path, workers=2, barrier=False) as fleet, client(fleet) as http:
        await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 9})
        assert [worker.step for worker in fleet.workers] == [9, 0]


async def test_energy_counts_steps_and_rest_in_engine_seconds(tmp_path: Path) -> None:
    time = StepTime(base_s=2e-3, per_token_s=0.0)
    settings = {"step_time": time, "time_scale": 3.0}
    async with emulated(tmp_path, **settings) as fleet, client(fleet) as http:
        worker = fleet.workers[0]
        async with reading(fleet) as reader:
            rested_j = (await reader.full()).energy_j
            await http.post("/v1/completions", json={"prompt": [1], "max_tokens": 10})
            while (snapshot := await reader.next()).step < 10:
                pass
            assert rested_j is not None
            assert snapshot.energy_j is not None
            assert snapshot.power_w == 400.0
            assert snapshot.step_s == pytest.approx(2e-3)
            assert snapshot.energy_j - rested_j >= 10 * 2e-3 * 400
            await eventually(lambda: worker.model.power_w == 100.0, "it rests")
            while (snapshot := await reader.next()).step_s > 0:
                pass
            assert (snapshot.step, snapshot.power_w) == (10, 100.0)
