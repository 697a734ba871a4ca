"""Emulated workers whose admission is a policy's: what clients and the state stream see of it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_patches.admission import read_admission
from loadgen.emulator.emulate_command import EmulateOptions
from loadgen.engine.queues import PolicyOrder
from router.core.errors import ConfigError
from tests.support.emulated import TIMEOUT_S, client, emulated, eventually, reading

KV_TOKENS = 200


async def ask(http: httpx.AsyncClient, prompt: int, output: int, **more: Any) -> str:
    body = {"prompt": [prompt] * prompt, "max_tokens": output, "ignore_eos": True, **more}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("policy", ["off", "headroom", "wait", "memory_checked", "alpha_beta"])
async def test_answers_are_the_same_under_every_policy(tmp_path: Path, policy: str) -> None:
    requests = [(10 + number, 30 + 5 * number) for number in range(12)]
    settings: dict[str, Any] = {"workers": 1, "slots": 8, "kv_tokens": KV_TOKENS}
    admission = read_admission({"policy": policy})
    async with emulated(tmp_path, **settings, admission=admission) as fleet, client(fleet) as http:
        together = await asyncio.gather(*(ask(http, *lengths) for lengths in requests))
        engine = fleet.workers[0].model.engine
        apart = [await ask(http, *lengths) for lengths in requests]
        assert engine.used_tokens == 0

    assert together == apart
    if policy in ("off", "memory_checked"):
        assert (engine.preemptions_total > 0) == (policy == "off")


async def test_the_state_stream_tells_what_admission_would_let_in(tmp_path: Path) -> None:
    admission = read_admission({"policy": "headroom", "headroom": 0.25, "adaptive": False})
    settings: dict[str, Any] = {"workers": 1, "slots": 8, "kv_tokens": KV_TOKENS}
    async with (
        emulated(tmp_path, **settings, admission=admission) as fleet,
        client(fleet) as http,
        reading(fleet) as reader,
    ):
        assert (await reader.full()).admissible_kv_tokens == KV_TOKENS
        asked = asyncio.create_task(ask(http, 100, 80))
        told: list[tuple[int, int | None]] = []
        while not told or told[-1][0]:
            snapshot = await reader.next()
            (kv,) = snapshot.kv_groups
            told.append((kv.blocks_used, snapshot.admissible_kv_tokens))
        await asked

    busy = [(used, admissible) for used, admissible in told if used]
    assert len(busy) >= 70
    assert all(admissible == max(0, 150 - used) for used, admissible in busy)
    assert told[-1] == (0, KV_TOKENS)


async def test_what_can_never_fit_is_refused_and_what_fits_alone_is_not(tmp_path: Path) -> None:
    admission = read_admission({"policy": "headroom", "headroom": 0.25})
    settings: dict[str, Any] = {"workers": 1, "kv_tokens": KV_TOKENS, "admission": admission}
    async with emulated(tmp_path, **settings) as fleet, client(fleet) as http:
        response = await http.post("/v1/completions", json={"prompt": [1] * 200, "max_tokens": 1})
        assert response.status_code == 400
        assert "maximum context length is 200 tokens" in response.json()["error"]["message"]
        assert await ask(http, 190, 10)


async def test_clients_may_say_how_long_their_answers_are(tmp_path: Path) -> None:
    admission = read_admission({"policy": "memory_checked"})
    async with emulated(tmp_path, workers=1, admission=admission) as fleet, client(fleet) as http:
        queue = fleet.workers[0].model.engine._queue
        assert isinstance(queue, PolicyOrder)
        asked = [
            asyncio.create_task(ask(http, 5, 400, vllm_xargs={"evenstep_predicted_tokens": told}))
            for told in (300, "300", -1)
        ]
        await eventually(lambda: len(queue.ledger.running) == len(asked), "all run")
        tickets = list(queue.ledger.running.values())
        await asyncio.gather(*asked)

    assert sorted((t.hint_tokens or 0, t.cap_tokens) for t in tickets) == [
        (0, 400),
        (0, 400),
        (300, 400),
    ]


async def test_a_closed_gate_takes_no_steps(tmp_path: Path) -> None:
    """One waits for a second; it takes the last of four to open at once."""
    admission = read_admission({"policy": "wait", "thresholds": [4], "hold_s": 1.0})
    async with emulated(tmp_path, admission=admission) as fleet, client(fleet) as http:
        worker = fleet.workers[0]
        await ask(http, 5, 1)
        assert worker.step == 1
        await asyncio.gather(*(ask(http, 5, 1) for _ in range(4)))
        assert worker.step == 2


async def test_who_gives_up_before_a_closed_gate_is_forgotten_at_once(tmp_path: Path) -> None:
    """A second of the engine is half an hour here."""
    admission = read_admission({"policy": "wait", "thresholds": [2], "hold_s": 1.0})
    settings: dict[str, Any] = {"workers": 1, "admission": admission, "time_scale": 1800}
    async with (
        emulated(tmp_path, **settings) as fleet,
        client(fleet) as http,
        reading(fleet) as reader,
    ):
        asked = asyncio.create_task(ask(http, 5, 1))
        async with asyncio.timeout(TIMEOUT_S):
            while not (await reader.next()).waiting:
                pass
            asked.cancel()
            snapshot = await reader.next()
            while snapshot.waiting:
                snapshot = await reader.next()
        assert snapshot.finished


def test_the_command_takes_a_name_or_settings() -> None:
    named = EmulateOptions(admission="headroom").settings().admission
    given = EmulateOptions(admission='{"policy": "headroom", "headroom": 0.1}').settings().admission

    assert named == read_admission({"policy": "headroom"})
    assert given == read_admission({"policy": "headroom", "headroom": 0.1})
    assert EmulateOptions().settings().admission is None
    for wrong, message in (
        ("headrom", "--admission: there is no policy 'headrom'.*did you mean headroom"),
        ('{"policy": "headroom", "headroom": 2}', "--admission: headroom: Expected `float` <= 0.5"),
        ("{", "--admission is no JSON"),
    ):
        with pytest.raises(ConfigError, match=message):
            EmulateOptions(admission=wrong).settings()
