"""Real engines under KV pressure, alike but for who enters them."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine_patches.plugin.compat import HIDDEN_LENGTH_KEY
from engine_patches.plugin.compat_admission import PREDICTED_KEY
from loadgen.simulator.admission.scenarios import Requests, scenario_of
from tests.support.engine import MODEL, READY_S, Installation, metric, starting_engine
from tests.support.engine_python import ROOT
from tests.support.server import Server, free_port, wait_ready

SCENARIO = scenario_of("chat70b")
BLOCK_TOKENS = 32
BLOCKS = -(-SCENARIO.kv_tokens // BLOCK_TOKENS)
MAX_TOKENS = SCENARIO.source.cap_tokens
VLLM = "vLLM's own order"
WAYS: Mapping[str, tuple[Mapping[str, Any] | None, tuple[str, ...]]] = {
    VLLM: (None, ()),
    "vLLM's watermark 5 %": (None, ("--watermark", "0.05")),
    "headroom": ({"policy": "headroom"}, ()),
    "memory_checked, true lengths": ({"policy": "memory_checked"}, ()),
}
_LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Pressed:
    """What one engine made of the requests.

    Attributes:
        preemptions: by the engine's counter.
        output_tokens: by the engine's counter.
        pressed_tokens: of these, while requests waited.
        pressed_s: for how long some did.
        whole_s: until the last answer.
        latency_mean_s: from the sending of all to an answer.
    """

    preemptions: int
    output_tokens: int
    pressed_tokens: int
    pressed_s: float
    whole_s: float
    latency_mean_s: float

    @property
    def throughput_tok_s(self) -> float:
        """While requests waited."""
        return self.pressed_tokens / self.pressed_s


@contextlib.contextmanager
def engines(where: Installation, folder: Path, ways: Sequence[str]) -> Iterator[dict[str, Server]]:
    """One engine for each way."""
    with contextlib.ExitStack() as stack:
        servers = {way: stack.enter_context(_starting(where, folder, *WAYS[way])) for way in ways}
        for server in servers.values():
            wait_ready(server, len(ways) * READY_S)
        yield servers


def _starting(
    where: Installation, folder: Path, admission: Mapping[str, Any] | None, flags: Sequence[str]
) -> contextlib.AbstractContextManager[Server]:
    settings: dict[str, Any] = {"snapshots": f"tcp://127.0.0.1:{free_port(2)}"}
    if admission is not None:
        settings["admission"] = admission
    return starting_engine(
        where,
        folder,
        *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
        *("--additional-config", json.dumps({"evenstep": settings})),
        *("--logits-processors", "engine_patches.hidden_length:HiddenLength"),
        # One block is a placeholder.
        *("--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-seqs", str(SCENARIO.slots)),
        *("--max-num-batched-tokens", str(SCENARIO.chunk), "--max-model-len", "4096"),
        *flags,
        environment={"PYTHONPATH": str(ROOT)},
    )


def press(server: Server, count: int, seed: int) -> Pressed:
    """Send chat70b's requests all at once; they end at lengths that only a hint would tell."""
    return asyncio.run(_press(server, SCENARIO.source.draw(SCENARIO.rate, count, seed)))


async def _press(server: Server, requests: Requests) -> Pressed:
    before = _counters(server)
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=_LIMIT_S) as client:
        began_s = time.perf_counter()
        pairs = zip(requests.prompt_tokens, requests.output_tokens, strict=True)
        async with asyncio.TaskGroup() as group:
            answers: list[asyncio.Task[float]] = []
            watch = group.create_task(_until_nobody_waits(client, began_s, answers))
            answers += [
                group.create_task(_answer(client, number, int(prompt), int(output)))
                for number, (prompt, output) in enumerate(pairs)
            ]
        whole_s = time.perf_counter() - began_s
        latencies_s = [answer.result() for answer in answers]
        pressed_s, pressed_tokens = watch.result()
    after = _counters(server)
    made = {name: round(after[name] - before[name]) for name in after}
    assert made["generation_tokens"] == requests.output_tokens.sum(), "of every answer"
    return Pressed(
        made["num_preemptions"],
        made["generation_tokens"],
        round(pressed_tokens - before["generation_tokens"]),
        pressed_s,
        whole_s,
        sum(latencies_s) / len(latencies_s),
    )


async def _answer(client: httpx.AsyncClient, number: int, prompt: int, output: int) -> float:
    began_s = time.perf_counter()
    body = {
        "model": MODEL,
        "prompt": [10 + (number * 7 + place) % 240 for place in range(prompt)],
        "max_tokens": MAX_TOKENS,
        "vllm_xargs": {HIDDEN_LENGTH_KEY: output, PREDICTED_KEY: output},
    }
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    made = answer.json()["usage"]["completion_tokens"]
    assert made == output, f"{made} tokens for {output}, prompt {prompt}"
    return time.perf_counter() - began_s


async def _until_nobody_waits(
    client: httpx.AsyncClient, began_s: float, answers: Sequence[asyncio.Task[float]]
) -> tuple[float, float]:
    """Seconds until no request waits any more, and the tokens counted by then."""
    waited = False
    while True:
        over = all(answer.done() for answer in answers)
        found = _parse((await client.get("/metrics")).text)
        if waited and not found["num_requests_waiting"]:
            return time.perf_counter() - began_s, found["generation_tokens"]
        waited |= found["num_requests_waiting"] > 0
        assert waited or not over, "all were answered, and nobody was seen to wait: send more"
        await asyncio.sleep(0.25)


_COUNTERS = ("generation_tokens", "num_preemptions")


def _counters(server: Server) -> dict[str, float]:
    return {name: metric(server, f"vllm:{name}_total") for name in _COUNTERS}


def _parse(text: str) -> dict[str, float]:
    names = {"vllm:num_requests_waiting": "num_requests_waiting"}
    names |= {f"vllm:{name}_total": name for name in _COUNTERS}
    found = dict.fromkeys(names.values(), 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in names:
            found[names[name]] += float(line.rsplit(" ", 1)[1])
    return found
