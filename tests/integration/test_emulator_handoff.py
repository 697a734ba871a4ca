"""Prompts computed by one emulated worker and decoded by another, by hand, over real HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.emulator.emulated_fleet import EmulatedFleet
from loadgen.emulator.timer import engine_now_s
from loadgen.engine.engine import Engine
from loadgen.engine.kv_handoff import TransferTime
from loadgen.engine.prefill_settings import PrefillSettings, PrefillTime
from router.core.step_time import StepTime
from tests.support.emulated import QUICK, client, control, emulated, eventually, reading

DECODE, PREFILL = 0, 1
PATH = "/v1/completions"
KEEP = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
LONG = 1000.0
SLOW = StepTime(0.02, 0.0)


@asynccontextmanager
async def pair(
    folder: Path,
    *,
    per_token_s: float = 1e-6,
    latency_s: float = 1e-3,
    expiry_s: float = LONG,
    recompute: bool = False,
    prefill_kv_tokens: int | None = None,
    **settings: Any,
) -> AsyncIterator[EmulatedFleet]:
    """One worker that decodes and one that prefills, in this order."""
    prefill = PrefillSettings(
        workers=1,
        time=PrefillTime(1e-3, per_token_s),
        chunk=100,
        kv_tokens=prefill_kv_tokens,
        transfer=TransferTime(latency_s, 0.0),
        kv_expiry_s=expiry_s,
        recompute=recompute,
    )
    settings = {"kv_tokens": 5000, "max_model_len": 500, **settings}
    async with emulated(folder, prefill=prefill, **settings) as fleet:
        yield fleet


def engine(fleet: EmulatedFleet, rank: int) -> Engine:
    return fleet.workers[rank].model.engine


def prompt(tokens: int = 300, first: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": list(range(first, first + tokens)), "max_tokens": 20}
    return {**body, "ignore_eos": True}


async def post(fleet: EmulatedFleet, rank: int, **body: Any) -> httpx.Response:
    async with client(fleet, rank) as http:
        return await http.post(PATH, json=body)


async def prefill(fleet: EmulatedFleet, **body: Any) -> dict[str, Any]:
    """The first of the two requests; what its answer says of the KV."""
    asked = {**body, "max_tokens": 1, "kv_transfer_params": KEEP}
    answer = (await post(fleet, PREFILL, **asked)).json()
    assert answer["usage"]["prompt_tokens"] == len(body["prompt"])
    assert answer["usage"]["completion_tokens"] == 1
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def events(response: httpx.Response) -> list[Any]:
    *lines, last = [line for line in response.text.splitlines() if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def idle(fleet: EmulatedFleet) -> bool:
    """Whether no engine has a request, or memory in use."""
    engines = [engine(fleet, rank) for rank in (DECODE, PREFILL)]
    return not any(engine.unfinished or engine.used_tokens for engine in engines)


@contextlib.asynccontextmanager
async def asking(fleet: EmulatedFleet, rank: int, **body: Any) -> AsyncIterator[None]:
    """A request whose client leaves when the block ends."""
    task = asyncio.create_task(post(fleet, rank, **body))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_decode_worker_says_what_one_worker_would_have_said(
    tmp_path: Path, stream: bool
) -> None:
    async with pair(tmp_path) as fleet:
        body = {**prompt(), "stream": stream}
        params = await prefill(fleet, **prompt())
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert params["remote_num_tokens"] == 300
        assert (engine(fleet, PREFILL).used_tokens, engine(fleet, PREFILL).unfinished) == (300, 0)

        async with reading(fleet, DECODE) as states:
            split = await post(fleet, DECODE, **body, kv_transfer_params=params)
            computed = 0
            while not (state := await states.next()).finished:
                computed += state.scheduled_prefill_tokens
        whole = await post(fleet, DECODE, **body)

        assert split.status_code == whole.status_code == 200
        if stream:
            texts = [[c["choices"][0]["text"] for c in events(r)] for r in (split, whole)]
            assert [len(text) for text in texts] == [20, 20]
            assert texts[0] == texts[1]
        else:
            assert split.json()["usage"] == whole.json()["usage"]
            assert split.json()["choices"] == whole.json()["choices"]
            assert split.json()["kv_transfer_params"] is None
        assert computed == 0
        assert engine(fleet, PREFILL).kept.fetched_total == 1
        assert idle(fleet)


async def test_chat_with_several_outputs_fetches_its_prompt_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as fleet, client(fleet, PREFILL) as first, client(fleet) as second:
        path = "/v1/chat/completions"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a word " * 50}]}
        asked = {**body, "max_tokens": 9, "max_completion_tokens": 1, "kv_transfer_params": KEEP}
        params = (await first.post(path, json=asked)).json()["kv_transfer_params"]
        body |= {"max_tokens": 5, "n": 3, "ignore_eos": True}
        answer = (await second.post(path, json={**body, "kv_transfer_params": params})).json()
        whole = (await second.post(path, json=body)).json()
        assert answer["choices"] == whole["choices"]
        assert len(answer["choices"]) == 3
        assert answer["usage"] == whole["usage"]
        assert engine(fleet, PREFILL).kept.fetched_total == 1
        assert idle(fleet)


async def test_a_whole_prompt_holds_up_the_barrier_and_one_prefilled_elsewhere_does_not(
    tmp_path: Path,
) -> None:
    async with emulated(
        tmp_path,
        workers=2,
        max_model_len=500,
        prefill=PrefillSettings(workers=1, time=PrefillTime(1e-3, 1e-4), chunk=100),
    ) as fleet:
        bystander, prefiller = 1, 2
        long = {**prompt(), "max_tokens": 450, "prompt": [1]}
        async with asking(fleet, bystander, **long), reading(fleet, bystander) as states:
            await eventually(lambda: engine(fleet, bystander).running != [], "a bystander")
            body = {**prompt(), "max_tokens": 1}
            asked = {**body, "kv_transfer_params": KEEP}
            await post(fleet, prefiller, **asked)
            apart = [await states.next()]
            while apart[-1].step < fleet.workers[bystander].step:
                apart.append(await states.next())
            await post(fleet, 0, **body)
            together = [await states.next()]
            while together[-1].step < fleet.workers[bystander].step:
                together.append(await states.next())
        assert max(state.step_s for state in apart) < 2e-3
        slow = [round(state.step_s, 6) for state in together if state.step_s > 2e-3]
        assert slow == [0.011, 0.011, 0.011]


@pytest.mark.parametrize("recompute", [False, True])
async def test_kv_that_nobody_fetched_in_time_is_gone(tmp_path: Path, recompute: bool) -> None:
    async with pair(tmp_path, expiry_s=0.05, recompute=recompute) as fleet:
        whole = await post(fleet, DECODE, **prompt())
        async with reading(fleet, PREFILL) as states:
            params = await prefill(fleet, **prompt())
            while (await states.next()).kv_groups[0].blocks_used != 300:
                pass
            while (await states.next()).kv_groups[0].blocks_used != 0:
                pass
        assert engine(fleet, PREFILL).kept.expired_total == 1
        late = await post(fleet, DECODE, **prompt(), kv_transfer_params=params)
        if recompute:
            assert late.json()["choices"] == whole.json()["choices"]
        else:
            assert late.status_code == 500
            assert late.json()["error"] == {
                "message": "Internal server error",
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            }
        assert engine(fleet, DECODE).transfers.failed_total == 1
        assert idle(fleet)


async def test_a_stream_whose_kv_is_gone_ends_with_an_error(tmp_path: Path) -> None:
    async with pair(tmp_path) as fleet:
        params = {"do_remote_prefill": True, "remote_engine_id": "none", "remote_request_id": "x"}
        body = {**prompt(), "stream": True, "kv_transfer_params": params, "n": 2}
        answer = await post(fleet, DECODE, **body)
        assert answer.status_code == 200
        assert [event["error"]["code"] for event in events(answer)] == [500]
        await eventually(lambda: idle(fleet), "nothing left")


async def test_an_answer_fails_as_a_whole(tmp_path: Path) -> None:
    async with pair(tmp_path, step_time=SLOW) as fleet:
        params = await prefill(fleet, **prompt())
        # Two prompts, and the KV of one: it can be fetched once.
        body = {**prompt(), "prompt": [prompt()["prompt"]] * 2, "max_tokens": 200}
        answer = await post(fleet, DECODE, **body, kv_transfer_params=params)
        assert answer.status_code == 500
        decode = engine(fleet, DECODE)
        assert (decode.running, decode.waiting, decode.transfers.failed_total) == ([], 0, 1)
        assert engine(fleet, PREFILL).kept.fetched_total == 1
        await eventually(lambda: idle(fleet), "nothing left")


async def test_kv_is_fetched_once_and_lost_with_its_worker(tmp_path: Path) -> None:
    async with pair(tmp_path) as fleet:
        params = await prefill(fleet, **prompt())
        statuses = [
            (await post(fleet, DECODE, **prompt(), kv_transfer_params=params)).status_code
            for _ in range(2)
        ]
        assert statuses == [200, 500]
        params = await prefill(fleet, **prompt())
        await control(fleet, f"/workers/{PREFILL}/fault", kind="kill")
        assert engine(fleet, PREFILL).used_tokens == 0
        killed = await post(fleet, DECODE, **prompt(), kv_transfer_params=params)
        await control(fleet, f"/workers/{PREFILL}/restore")
        restored = await post(fleet, DECODE, **prompt(), kv_transfer_params=params)
        assert (killed.status_code, restored.status_code) == (500, 500)
        anew = await prefill(fleet, **prompt())
        assert anew["remote_engine_id"] != params["remote_engine_id"]
        assert (await post(fleet, DECODE, **prompt(), kv_transfer_params=anew)).is_success
        assert idle(fleet)


async def test_a_prefill_worker_that_dies_under_a_transfer_fails_the_request(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, latency_s=2.0) as fleet:
        params = await prefill(fleet, **prompt())
        asked = asyncio.create_task(post(fleet, DECODE, **prompt(), kv_transfer_params=params))
        await eventually(lambda: engine(fleet, DECODE).transfers.tokens == 300, "a transfer")
        assert (engine(fleet, DECODE).waiting, engine(fleet, DECODE).running) == (1, [])
        await control(fleet, f"/workers/{PREFILL}/fault", kind="kill")
        assert (await asked).status_code == 500
        assert engine(fleet, DECODE).transfers.failed_total == 1
        assert idle(fleet)


async def test_kv_expires_when_the_worker_dies_that_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, slots=1, step_time=SLOW) as fleet:
        async with asking(fleet, DECODE, **{**prompt(1), "max_tokens": 499}):
            await eventually(lambda: engine(fleet, DECODE).running != [], "a request that runs")
            params = await prefill(fleet, **prompt())
            async with asking(fleet, DECODE, **prompt(), kv_transfer_params=params):
                await eventually(lambda: engine(fleet, DECODE).waiting == 1, "a claim")
                await control(fleet, f"/workers/{DECODE}/fault", kind="kill")
        kept = engine(fleet, PREFILL).kept
        assert (len(kept), kept.expired_total) == (1, 0)
        later = "loadgen.emulator.emulated_worker.engine_now_s"
        monkeypatch.setattr(later, lambda scale: engine_now_s(scale) + LONG)
        await eventually(lambda: kept.expired_total == 1, "an expiry")
        assert idle(fleet)


@pytest.mark.parametrize("phase", ["prefilling", "waiting", "fetching", "decoding"])
async def test_a_client_that_leaves_leaves_nothing_behind(tmp_path: Path, phase: str) -> None:
    # Steps so long, or a slot so long taken, that the phase lasts until the client has left.
    per_token_s = 5e-3 if phase == "prefilling" else 1e-6
    latency_s = 2.0 if phase == "fetching" else 1e-3
    step_time = SLOW if phase == "waiting" else QUICK
    async with pair(
        tmp_path, per_token_s=per_token_s, latency_s=latency_s, slots=1, step_time=step_time
    ) as fleet:
        if phase == "prefilling":
            asked = {**prompt(), "kv_transfer_params": KEEP}
            async with asking(fleet, PREFILL, **asked):
                await eventually(lambda: engine(fleet, PREFILL).running != [], phase)
            await eventually(lambda: idle(fleet), "nothing left")
            assert engine(fleet, PREFILL).kept.kept_total == 0
            return
        async with contextlib.AsyncExitStack() as others:
            if phase == "waiting":
                long = {**prompt(1), "max_tokens": 499}
                await others.enter_async_context(asking(fleet, DECODE, **long))
                await eventually(lambda: engine(fleet, DECODE).running != [], "a slot taken")
            params = await prefill(fleet, **prompt())
            asked = {**prompt(), "max_tokens": 200, "kv_transfer_params": params}
            decode = engine(fleet, DECODE)
            async with asking(fleet, DECODE, **asked):
                reached = {
                    "waiting": lambda: decode.waiting == 1,
                    "fetching": lambda: decode.transfers.tokens == 300,
                    "decoding": lambda: decode.running != [],
                }
                await eventually(reached[phase], phase)
            await eventually(lambda: engine(fleet, PREFILL).used_tokens == 0, "KV freed")
        await eventually(lambda: idle(fleet), "nothing left")
        kept = engine(fleet, PREFILL).kept
        assert (kept.freed_total, kept.fetched_total) == ((0, 1) if phase == "decoding" else (1, 0))


async def test_prompts_wait_while_kept_kv_fills_the_prefill_worker(tmp_path: Path) -> None:
    async with pair(tmp_path, prefill_kv_tokens=500) as fleet:
        params = await prefill(fleet, **prompt())
        second = asyncio.create_task(prefill(fleet, **prompt(first=7)))
        await eventually(lambda: engine(fleet, PREFILL).waiting == 1, "a prompt that waits")
        steps = fleet.workers[PREFILL].step
        await eventually(lambda: fleet.workers[PREFILL].step > steps + 3, "more steps")
        assert (engine(fleet, PREFILL).waiting, engine(fleet, PREFILL).used_tokens) == (1, 300)
        assert (await post(fleet, DECODE, **prompt(), kv_transfer_params=params)).is_success
        params = await second
        assert (await post(fleet, DECODE, **prompt(first=7), kv_transfer_params=params)).is_success
        assert idle(fleet)


async def test_what_became_of_kv_is_counted(tmp_path: Path) -> None:
    async with pair(tmp_path) as fleet, client(fleet, PREFILL) as http:
        params = await prefill(fleet, **prompt())
        page = (await http.get("/metrics")).text
        samples = {
            (sample.name, sample.labels.get("event")): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        assert samples["vllm:kv_cache_usage_perc", None] == pytest.approx(300 / 5000)
        assert samples["vllm:num_requests_running", None] == 0
        assert samples["evenstep_emulator_kept_kv_tokens", None] == 300
        assert samples["evenstep_emulator_kv_handoff_total", "prefilled"] == 1
        await post(fleet, DECODE, **prompt(), kv_transfer_params=params)
        await post(fleet, DECODE, **prompt(), kv_transfer_params=params)
        async with httpx.AsyncClient() as control_port:
            told = (await control_port.get(f"{fleet.control.url}/fleet")).json()
        assert [worker["role"] for worker in told["workers"]] == ["both", "prefill"]
        assert told["workers"][PREFILL]["kv_handoff"] == {
            "kept": 0,
            "kept_tokens": 0,
            "prefilled": 1,
            "fetched": 1,
            "freed": 0,
            "expired": 0,
            "failed_loads": 0,
        }
        assert told["workers"][DECODE]["kv_handoff"]["failed_loads"] == 1


async def test_without_prefill_settings_kv_transfer_params_mean_nothing(tmp_path: Path) -> None:
    async with emulated(tmp_path) as fleet:
        answer = await post(fleet, 0, **prompt(), kv_transfer_params=KEEP)
        assert answer.json()["kv_transfer_params"] is None
        assert engine(fleet, 0).used_tokens == 0
        params = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r"}
        assert (await post(fleet, 0, **prompt(), kv_transfer_params=params)).is_success
