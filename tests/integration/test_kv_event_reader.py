"""The router knows caches of engines without the plug-in by their KV events."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import msgspec
import zmq

from router.core.prefix.prefixes import Prefixes
from router.core.types import WorkerSpec
from router.engines.kv_event_reader import KvEventReader
from router.engines.zmq_reader import SocketReader
from tests.integration.test_prefix_metrics import told
from tests.support.emulated import eventually
from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import Server, free_port, running_router, wait_until


def test_prompts_come_to_the_engine_that_has_their_beginning(tmp_path: Path) -> None:
    port = free_port(2)
    flags = ("--no-snapshots", "--kv-events-port", str(port), "--block-tokens", "16")
    with (
        running_fleet(tmp_path, "--workers", "2", "--slots", "4", "--model", "m", *flags) as fleet,
        running_router(tmp_path, *worker_flags(fleet), "--policy", "prefix_score") as router,
    ):
        urls = [spec.partition(",")[0] for spec in fleet.workers]
        # Subscribers hear nothing of what was published before they were there.
        for number in range(1, 1000):
            for url in urls:
                complete(url, [number] * 17)
            if both(router):
                break
        assert both(router)
        found = []
        for number in range(1000, 1006):
            before = told(router, "prefix_blocks")
            prompt = [number, *range(3, 332)]
            assert complete(router.url, prompt) == 0
            wait_until(partial(more, router, before), 60.0, "its blocks are told")
            found += [complete(router.url, [*prompt, 7, 7]) for _ in range(2)]
        assert found == [320] * 12
        assert told(router, "kv_event_messages_received_total") > 6
        assert told(router, "kv_event_messages_broken_total") == 0
        for number in range(6):
            first, *later = [complete(router.url, f"{number}{'even' * 400}") for _ in range(3)]
            assert (first, all(later)) == (0, True), "of texts it is guessed"


def complete(url: str, prompt: str | list[int]) -> int:
    """Tokens of a prompt that the engine found in its cache."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30.0)
    answer.raise_for_status()
    return int((answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def more(router: Server, before: float) -> bool:
    return told(router, "prefix_blocks") >= before + 20


def both(router: Server) -> bool:
    text = router.get("/metrics").text
    return text.count("evenstep_worker_prefix_blocks{") == 2


class Publisher:
    """Publishes messages as vLLM does, and repeats them."""

    def __init__(self, port: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.published = self.context.socket(zmq.XPUB)
        self.replay = self.context.socket(zmq.ROUTER)
        self.published.bind(f"tcp://127.0.0.1:{port}")
        self.replay.bind(f"tcp://127.0.0.1:{port + 1}")
        self.sent: list[bytes] = []
        self.asker = b""

    async def followed(self) -> None:
        await eventually(lambda: bool(self.published.poll(0)), "somebody subscribes")
        self.published.recv()

    def publish(self, *blocks: int, lose: bool = False) -> None:
        """Store blocks, each after the one with the number before."""
        events = [
            {
                "type": "BlockStored",
                "block_hashes": [block],
                "parent_block_hash": block - 1 if block else None,
                "token_ids": [block] * 16,
                "block_size": 16,
            }
            for block in blocks
        ]
        self.sent.append(msgspec.msgpack.encode((1.0, events, 0)))
        if not lose:
            self.send(len(self.sent) - 1, self.sent[-1])

    def send(self, number: int, batch: bytes) -> None:
        self.published.send_multipart((b"", number.to_bytes(8, "big"), batch))

    async def repeat(self, *, ends: bool = True) -> int:
        """Answer a request, unless to its end; returns from where on it asked."""
        await eventually(lambda: bool(self.replay.poll(0)), "somebody asks")
        client, empty, start = self.replay.recv_multipart()
        first = int.from_bytes(start, "big")
        for number in range(first, len(self.sent)):
            frames = (client, empty, b"", number.to_bytes(8, "big"), self.sent[number])
            self.replay.send_multipart(frames)
        self.asker = client
        if ends:
            self.end()
        return first

    def end(self) -> None:
        self.replay.send_multipart((self.asker, b"", b"", b"\xff" * 8, b""))

    def close(self) -> None:
        self.context.destroy(linger=0)


@asynccontextmanager
async def following(
    prefixes: Prefixes, port: int, *, replay: bool
) -> AsyncIterator[tuple[Publisher, KvEventReader]]:
    publisher, sockets = Publisher(port), SocketReader(time.monotonic, lambda: True)
    spec = WorkerSpec(
        "a",
        "http://127.0.0.1:1",
        kv_events=f"tcp://127.0.0.1:{port}",
        kv_replay=f"tcp://127.0.0.1:{port + 1}" if replay else None,
    )
    reader = KvEventReader(
        [WorkerSpec("b", "http://127.0.0.1:2")],
        lambda heard: prefixes.heard(heard.worker_id, heard.cache, heard.received_s),
        prefixes.tells,
        time.monotonic,
        sockets,
    )
    sockets.start()
    reader.start()
    reader.join(spec)
    try:
        await publisher.followed()
        yield publisher, reader
        reader.leave("a")
        reader.leave("b")
    finally:
        sockets.close()
        reader.close()
        publisher.close()


async def holds(prefixes: Prefixes, blocks: Sequence[int] | range) -> None:
    await eventually(lambda: prefixes.held("a") == len(blocks), f"{len(blocks)} blocks are held")


async def test_what_was_missed_is_asked_for() -> None:
    prefixes = Prefixes(1000)
    async with following(prefixes, free_port(2), replay=True) as (publisher, reader):
        publisher.publish(0, 1, lose=True)
        publisher.publish(2)
        assert await publisher.repeat() == 0
        await holds(prefixes, range(3))
        publisher.publish(3, lose=True)
        publisher.publish(4)
        assert await publisher.repeat() == 2
        await holds(prefixes, range(5))
        prefixes.lost("a")  # it was down
        publisher.publish(5)
        assert await publisher.repeat() == 0
        await holds(prefixes, range(6))
        publisher.sent.clear()
        publisher.publish(0)
        assert await publisher.repeat() == 0, "it has started anew"
        await holds(prefixes, range(1))
        assert reader.broken == 0


async def test_an_answer_to_a_question_before_the_restart_answers_nothing() -> None:
    prefixes = Prefixes(1000)
    async with following(prefixes, free_port(2), replay=True) as (publisher, reader):
        publisher.publish(0, lose=True)
        publisher.publish(1)
        await eventually(lambda: reader.received == 1, "it asks")
        publisher.sent.clear()
        publisher.publish(0)
        await eventually(lambda: reader.received == 2, "it has started anew")
        assert await publisher.repeat() == 0
        assert await publisher.repeat() == 0, "it asks again"
        await holds(prefixes, range(1))


async def test_an_answer_to_a_question_before_it_was_down_answers_nothing() -> None:
    prefixes = Prefixes(1000)
    async with following(prefixes, free_port(2), replay=True) as (publisher, reader):
        publisher.publish(0, lose=True)
        publisher.publish(1)
        assert await publisher.repeat(ends=False) == 0
        await holds(prefixes, range(2))
        prefixes.lost("a")
        publisher.publish(2)
        await eventually(lambda: reader.received == 4, "it is up again")
        publisher.end()
        assert await publisher.repeat() == 0, "it asks again"
        await holds(prefixes, range(3))


async def test_messages_that_are_none_end_nothing() -> None:
    prefixes = Prefixes(1000)
    async with following(prefixes, free_port(2), replay=False) as (publisher, reader):
        publisher.publish(0)
        publisher.published.send(b"?")
        publisher.send(1, b"?")
        deep = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
        publisher.send(2, msgspec.msgpack.encode((1.0, [{"type": "", "extra_keys": deep}])))
        publisher.sent += [b"?", b"?"]
        publisher.publish(1)
        await holds(prefixes, range(2))
        assert (reader.broken, reader.received) == (3, 2)


async def test_an_engine_that_answers_nothing_is_heard_all_the_same() -> None:
    prefixes = Prefixes(1000)
    async with following(prefixes, free_port(2), replay=True) as (publisher, reader):
        engine = reader._engines["a"]
        publisher.publish(0)
        await eventually(lambda: reader.received == 1, "it is held")
        assert not prefixes.told
        assert engine.asked_s is not None
        engine.asked_s -= 6.0
        publisher.publish(1)
        await holds(prefixes, range(2))
