"""One log of events, fed to ``evenstep serve`` and to ``pick``: each decision is the same.

The log is recorded before engines that a model plays: arrivals, snapshots, ends. Time is virtual.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.config.setting_sources import load_settings
from router.core.events import Dispatched, SnapshotReceived, WorkerUp
from router.core.prefix.ids import chain, seed
from router.core.types import RunningRequest, Snapshot
from router.pick.ext_proc import ExternalProcessor
from router.pick.pick import Told
from router.proxy.endpoints import relay_of
from router.proxy.splice import KEY
from router.serve import router as composed
from tests.support.core import part, snapshot, token
from tests.support.virtual_time import run_virtually

WORKERS = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}
SLOTS, REQUESTS, STEP_S, BLOCK = 3, 90, 0.01, 16


@dataclass(frozen=True)
class Arrival:
    number: int
    body: bytes


@dataclass(frozen=True)
class Shown:
    worker: str
    snapshot: Snapshot


@dataclass(frozen=True)
class End:
    number: int
    prompt_tokens: int
    output_tokens: int


Event = Arrival | Shown | End


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Side:
    """A router that is put together as its command does it; how it is asked is left open."""

    def __init__(self, policy: str) -> None:
        workers = [
            f"http://127.0.0.{at}:80,id={name},group={group},slots={SLOTS},snapshots={told}"
            for at, (name, group) in enumerate(WORKERS.items(), start=1)
            for told in [f"tcp://127.0.0.{at}:1"]
        ]
        flags = {"workers": workers, "policy": policy, "grpc_port": "9002"}
        settings = load_settings(flags)
        self.router = composed.Router(settings, lambda: settings)
        self.decided: list[tuple[float, int, str]] = []
        apply = self.router.cluster.apply

        def noting(event: Any) -> bool:
            if isinstance(event, Dispatched):
                number = int(event.request_id.removeprefix("es-"), 16)
                self.decided.append((round(now_s(), 6), number, event.worker_id))
            return apply(event)

        self.router.cluster.apply = noting  # type: ignore[method-assign]
        for name in WORKERS:
            self.router.dispatcher.apply(WorkerUp(name))
            self.router.models.learn(name, {"tiny": {}})
        self.tasks = [asyncio.create_task(self.router.dispatcher.run())]

    def take(self, event: Event) -> None:
        match event:
            case Arrival():
                self.tasks.append(asyncio.create_task(self.ask(event.body)))
            case Shown():
                told = SnapshotReceived(event.worker, event.snapshot, now_s())
                self.router.dispatcher.apply(told)
            case End():
                self.end(event)

    async def ask(self, body: bytes) -> None:
        raise NotImplementedError

    def end(self, event: End) -> None:
        assert self.router.picks
        if (pick := self.router.picks.known(token(event.number))) is not None:
            self.router.picks.end(pick, Told(200), "log")

    def scope(self) -> Any:
        path = {"path": "/v1/completions", "query_string": b"", "method": "POST"}
        return {"type": "http", "headers": [], **path}

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        ended = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError | None) for each in ended), ended
        await self.router.client.aclose()


class Serve(Side):
    """``evenstep serve``: engines answer when the log says that the request ends."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.answers: dict[str, asyncio.Future[bytes]] = {}
        self.router.relay.client = self  # type: ignore[assignment]
        self.gone = False

    async def request(self, *given: Any) -> Any:
        name = dict(given[3])[b"x-request-id"].decode()
        answer = self.answers[name] = asyncio.get_running_loop().create_future()
        headers = [(b"content-type", b"application/json")]
        return SimpleNamespace(status=200, headers=headers, read=lambda: answer, close=lambda: None)

    async def ask(self, body: bytes) -> None:
        await (await relay_of(self.router, self.scope(), body)).serve(self)  # type: ignore[arg-type]

    def answer(self, _: Any) -> None:
        """Its client has the answer."""

    def end(self, event: End) -> None:
        counts = {
            "prompt_tokens": event.prompt_tokens,
            "completion_tokens": event.output_tokens,
        }
        self.answers[token(event.number)].set_result(msgspec.json.encode({"usage": counts}))


class OverHttp(Side):
    """What ``ext_authz`` asks."""

    async def ask(self, body: bytes) -> None:
        assert self.router.picks
        scope: Any = {**self.scope(), "path": "/pick/v1/completions", KEY: None}
        self.router.requests.begin(scope)
        reads = self.router.picks.others(scope)
        assert reads
        pick: Any = await reads(self.router, scope, body)
        await pick.place()


class OverGrpc(Side):
    """What ``ext_proc`` asks."""

    async def ask(self, body: bytes) -> None:
        assert self.router.picks

        async def messages() -> AsyncIterator[Any]:
            head, rest = pb.ProcessingRequest(), pb.ProcessingRequest()
            head.protocol_config.request_body_mode = 4  # FULL_DUPLEX_STREAMED
            for key, value in {":method": b"POST", ":path": b"/v1/completions"}.items():
                head.request_headers.headers.headers.add(key=key, raw_value=value)
            yield head
            rest.request_body.body, rest.request_body.end_of_stream = body, True
            yield rest

        processor = ExternalProcessor(self.router.picks, set(), 60.0, 10**6)
        async for answer in processor.Process(messages(), None):
            assert answer.WhichOneof("response") != "immediate_response", answer


@dataclass
class Model:
    """Engines that step together, ten milliseconds each; what they hold, by worker."""

    inside: dict[str, dict[int, list[int]]] = field(
        default_factory=lambda: {name: {} for name in WORKERS}
    )
    stored: dict[str, bytes] = field(default_factory=lambda: dict.fromkeys(WORKERS, b""))
    step: int = 0

    def advance(self, prompts: dict[int, list[int]]) -> tuple[list[Shown], list[End]]:
        self.step += 1
        shown, ends = [], []
        for name, held in self.inside.items():
            finished = []
            for number, (prompt, made, output) in list(held.items()):
                held[number][1] = made + 1
                if not made:
                    self.stored[name] += chain(prompts[number], seed())
                if made + 1 == output:
                    finished.append(number)
                    ends.append(End(number, prompt, output))
            running = [
                RunningRequest(part(number), prompt, made)
                for number, (prompt, made, _) in held.items()
                if number not in finished
            ]
            for number in finished:
                del held[number]
            told = snapshot(
                "full",
                self.step,
                *running,
                finished=tuple(map(part, finished)),
                slots=SLOTS,
                step_s=STEP_S,
            )
            told = msgspec.structs.replace(
                told, cache_block=BLOCK, blocks_stored=self.stored[name], ranks=2
            )
            shown.append(Shown(name, told))
        return shown, ends


async def record(side: Side) -> list[tuple[float, Event]]:
    """Play requests of six conversations, and what their engines tell."""
    dice, model, log, number = random.Random(3), Model(), list[tuple[float, Event]](), count(1)
    talks = [[1000 * talk + at for at in range(40)] for talk in range(6)]
    prompts, outputs, entered = dict[int, list[int]](), dict[int, int](), 0

    def take(event: Event) -> None:
        log.append((now_s(), event))
        side.take(event)

    while len(prompts) < REQUESTS or any(model.inside.values()) or entered < len(prompts):
        for _ in range(dice.choice((0, 0, 1, 4)) if len(prompts) < REQUESTS else 0):
            talk, name = dice.choice(talks), next(number)
            talk += (dice.randrange(9000) for _ in range(dice.randrange(8, 60)))
            prompts[name], outputs[name] = list(talk), dice.randint(1, 25)
            fields = {"model": "tiny", "prompt": talk, "max_tokens": dice.choice((25, 50))}
            take(Arrival(name, msgspec.json.encode(fields)))
            if dice.random() < 0.5:  # else the next one comes at once
                await asyncio.sleep(0.001)
        await asyncio.sleep(STEP_S)
        for _, name, worker in side.decided[entered:]:
            model.inside[worker][name] = [len(prompts[name]), 0, outputs[name]]
        entered = len(side.decided)
        shown, ends = model.advance(prompts)
        late = [end for end in ends if dice.random() < 0.5]
        told: list[Event] = [*(end for end in ends if end not in late), *shown, *late]
        for each in told:
            take(each)
            await asyncio.sleep(0.0001)
    return log


async def replay(side: Side, log: list[tuple[float, Event]]) -> None:
    for at_s, event in log:
        if at_s > now_s():
            await asyncio.sleep(at_s - now_s())
        side.take(event)
    await asyncio.sleep(STEP_S)


def played(
    make: Callable[[], Side], log: list[tuple[float, Event]], patch: pytest.MonkeyPatch
) -> Side:
    """A side after the log; an empty one is recorded."""
    numbers, found = count(1), list[Side]()

    async def run() -> None:
        found.append(side := make())
        if log:
            await replay(side, log)
        else:
            log.extend(await record(side))
            await asyncio.sleep(STEP_S)
        await side.close()

    with patch.context() as patched:
        clock = SimpleNamespace(monotonic=now_s, time=lambda: 0.0)
        patched.setattr(composed, "time", clock)
        dice = SimpleNamespace(urandom=lambda size: next(numbers).to_bytes(size))
        patched.setattr("router.proxy.client_request.os", dice)
        run_virtually(run())
    return found[0]


@pytest.mark.parametrize("policy", ["bfio", "prefix_score", "least_tokens"])
@pytest.mark.parametrize("way", [OverHttp, OverGrpc])
def test_each_decision_is_that_of_serve(
    policy: str, way: type[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[float, Event]] = []
    serve = played(lambda: Serve(policy), log, monkeypatch)
    pick = played(lambda: way(policy), log, monkeypatch)

    assert pick.decided == serve.decided
    arrived = [event.number for _, event in log if isinstance(event, Arrival)]
    assert sorted(number for _, number, _ in serve.decided) == arrived
    assert {worker for *_, worker in serve.decided} == WORKERS.keys()
    # It was a choice: requests waited, and prefixes were seen.
    queues = pick.router.dispatcher.queues.values()
    assert all(queue.stats.pool_wait_s.total > 1 for queue in queues)
    assert all(queue.group.hit_totals.predicted_tokens > 1000 for queue in queues)
