"""Where the lines of a recorder go: a file, and readers of the admin port."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from loadgen.traces.recordings import load_recording
from router.admin.admin_port import create_admin, serving
from router.admin.operator_routes import add_recording
from router.admin.status_page import Streams
from router.core.errors import ConfigError
from router.core.state.cluster import Cluster
from router.http.listening import listen
from router.recording.lines import read
from router.recording.record_file import RecordFile
from router.recording.recorder import Recorder, Setting
from tests.support.clusters import cluster_of, show
from tests.support.core import snapshot
from tests.support.scripted import TIMEOUT_S, until


def recorder_of(cluster: Cluster) -> Recorder:
    return Recorder(cluster, Setting("serve"), lambda: 0.0, 0.0)


def step(cluster: Cluster, number: int) -> None:
    for worker in "ab":
        show(cluster, snapshot("full", number, step_s=0.5), worker_id=worker)


@contextlib.asynccontextmanager
async def recording_to(path: Path, cluster: Cluster) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(RecordFile(path, recorder_of(cluster)).run())
    await until(lambda: bool(cluster.watchers))
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
async def test_what_happens_is_in_the_file_at_once_and_all_of_it_at_the_end(
    tmp_path: Path, name: str
) -> None:
    path, cluster = tmp_path / name, cluster_of()
    path.write_text("of an earlier run")
    async with recording_to(path, cluster):
        step(cluster, 1)
        await until(lambda: path.stat().st_size > 0 and bool(load_recording(path).steps))
        assert not load_recording(path).complete or not name.endswith(".gz")
        step(cluster, 2)
    recording = load_recording(path)
    assert (recording.complete, recording.steps[-1].step) == (True, 2)
    assert not cluster.watchers


async def test_lines_whose_writing_has_not_begun_at_the_end_are_written(tmp_path: Path) -> None:
    path, cluster = tmp_path / "r.jsonl", cluster_of()
    file, busy = RecordFile(path, recorder_of(cluster)), threading.Event()
    file._thread.submit(busy.wait)
    task = asyncio.create_task(file.run())
    await until(lambda: bool(cluster.watchers))
    task.cancel()
    threading.Timer(0.1, busy.set).start()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert load_recording(path).complete


@pytest.mark.parametrize("name", ["full", "full.gz"])
async def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, cluster = tmp_path / name, cluster_of()
    path.symlink_to("/dev/full")
    caplog.set_level(logging.WARNING)
    async with recording_to(path, cluster) as task:
        step(cluster, 1)
        await asyncio.wait_for(task, TIMEOUT_S)
        assert not cluster.watchers
        step(cluster, 2)
    assert f"the recording {path} ends here, it cannot be written: No space left" in caplog.text


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "r.jsonl"
    with pytest.raises(ConfigError, match=f"--record: cannot write {path}: No such file"):
        RecordFile(path, recorder_of(cluster_of()))


@contextlib.asynccontextmanager
async def admin(cluster: Cluster, streams: Streams) -> AsyncIterator[httpx.AsyncClient]:
    routes = [partial(add_recording, recorder=recorder_of(cluster), streams=streams)]
    transport = httpx.ASGITransport(create_admin(routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


async def test_the_admin_port_tells_what_happens_for_a_while() -> None:
    cluster = cluster_of()
    async with admin(cluster, Streams()) as http:
        answer = asyncio.create_task(http.get("/recording?seconds=0.5"))
        await until(lambda: bool(cluster.watchers))
        step(cluster, 1)
        step(cluster, 2)
        lines = (await answer).content.splitlines(keepends=True)
        assert [line.step for line in read(lines, "answer").steps][-1] == 2
        assert not cluster.watchers


async def test_what_is_told_last_is_in_the_answer() -> None:
    """After the first lines it looks once more in so short a time: at its end."""
    cluster = cluster_of()
    async with admin(cluster, Streams()) as http:
        answer = asyncio.create_task(http.get("/recording?seconds=0.2"))
        await until(lambda: bool(cluster.watchers))
        step(cluster, 1)
        assert read((await answer).content.splitlines(keepends=True), "answer").steps


async def test_a_reader_that_leaves_costs_nothing_more() -> None:
    cluster, streams = cluster_of(), Streams()
    routes = [partial(add_recording, recorder=recorder_of(cluster), streams=streams)]
    with listen("127.0.0.1", 0, "--admin-port") as listener:
        async with serving(create_admin(routes), streams, listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /recording?seconds=3600 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await reader.readuntil(b'{"recording":1')
            assert cluster.watchers
            writer.close()
            await until(lambda: not cluster.watchers)
            assert not streams._open


async def test_a_slow_reader_costs_no_more_than_its_room_and_is_told_what_it_missed() -> None:
    cluster, app, body, read_on = cluster_of(), FastAPI(), [b""], asyncio.Event()
    add_recording(app, recorder_of(cluster), Streams(), room_bytes=2000)

    async def send(message: Message) -> None:
        await read_on.wait()
        body.append(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    query = {"query_string": b"seconds=1.2", "headers": [], "http_version": "1.1"}
    scope = {"type": "http", "method": "GET", "path": "/recording", **query}
    answering = asyncio.create_task(app(scope, receive, send))
    number = 0
    while not answering.done():
        if not cluster.watchers:
            read_on.set()
            await asyncio.sleep(0.01)
        for _ in range(50):
            number += 1
            step(cluster, number)
        await asyncio.sleep(0.004)
    sent = b"".join(body)
    recording = read(sent.splitlines(keepends=True), "answer")
    assert recording.dropped > 100
    assert len(sent) < 7 * 2500, "four chunks and the last of 2000 bytes each, in the queue"


@pytest.mark.parametrize("seconds", ["0", "-1", "3601", "nan", "inf", "-inf", "1e400", "soon"])
async def test_a_span_that_cannot_be_listened_to_is_refused(seconds: str) -> None:
    async with admin(cluster_of(), Streams()) as http:
        answer = await http.get("/recording", params={"seconds": seconds})
    assert answer.status_code in {400, 422}
    assert "seconds" in answer.text
