"""The HTTP face of one emulated worker, shaped as vLLM's OpenAI server; raw ASGI."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import msgspec
from starlette.types import Receive, Scope, Send

from loadgen.emulator import asgi
from loadgen.emulator.answer import Answer
from loadgen.emulator.generation import (
    Generation,
    Limits,
    RejectedError,
    parse_chat,
    parse_completion,
)
from loadgen.emulator.listener import TRANSPORT
from loadgen.emulator.metrics import render_metrics
from loadgen.emulator.shapes import DONE, error_body, error_event
from loadgen.emulator.stepper import Lateness
from loadgen.emulator.worker import EmulatedWorker

VERSION = "0.1.0+evenstep.emulated"
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_PARSERS: dict[str, Callable[[bytes, Limits], Generation]] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
}


class WorkerApp:
    """ASGI application of one worker.

    Args:
        worker: the engine behind it.
        lateness: shown in the metrics.
    """

    def __init__(self, worker: EmulatedWorker, lateness: Lateness) -> None:
        self._worker = worker
        self._lateness = lateness
        self._pages: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "/health": lambda: (b"", asgi.JSON),
            "/version": lambda: (msgspec.json.encode({"version": VERSION}), asgi.JSON),
            "/v1/models": lambda: (self._models(), asgi.JSON),
            "/load": lambda: (self._load(), asgi.JSON),
            "/metrics": lambda: (render_metrics(worker, lateness), METRICS_TYPE),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            body = await asgi.read_body(receive)
        except asgi.ClientGoneError:
            return
        await self._worker.until_answering()
        if not self._worker.model.live:
            return
        try:
            await self._route(scope, body, receive, send)
        except RejectedError as rejected:
            await asgi.respond(send, error_body(rejected), status=rejected.status)

    async def _route(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in self._pages:
            _allow(method, "GET")
            page, content_type = self._pages[path]()
            await asgi.respond(send, page, content_type=content_type)
        elif path in _PARSERS:
            _allow(method, "POST")
            self._check(scope)
            generation = _PARSERS[path](body, self._worker.settings.limits)
            await self._generate(scope, generation, receive, send)
        else:
            raise RejectedError("Not Found", status=404)

    def _check(self, scope: Scope) -> None:
        fault = self._worker.fault
        if fault is not None and fault.kind == "error":
            raise RejectedError("emulated fault", status=fault.status)
        rank = asgi.header(scope, b"x-data-parallel-rank")
        if rank is not None and rank != str(self._worker.rank):
            raise RejectedError(
                f"data_parallel_rank {rank} is not that of this engine, {self._worker.rank}",
                "data_parallel_rank",
            )

    async def _generate(
        self, scope: Scope, generation: Generation, receive: Receive, send: Send
    ) -> None:
        x_request_id = asgi.header(scope, b"x-request-id") or uuid.uuid4().hex
        transport = scope["extensions"][TRANSPORT]["transport"]
        answer = self._worker.submit(generation, x_request_id, transport)
        gone = asyncio.ensure_future(asgi.until_gone(receive))
        gone.add_done_callback(lambda _: self._worker.abandon(answer))
        try:
            await (_stream if generation.stream else _whole)(answer, send)
        finally:
            gone.cancel()

    def _models(self) -> bytes:
        limits = self._worker.settings.limits
        card = {
            "id": limits.model,
            "object": "model",
            "created": 0,
            "owned_by": "evenstep-emulator",
            "root": limits.model,
            "parent": None,
            "max_model_len": limits.max_model_len,
            "permission": [],
        }
        return msgspec.json.encode({"object": "list", "data": [card]})

    def _load(self) -> bytes:
        return msgspec.json.encode({"server_load": len(self._worker.answers)})


def _allow(method: str, allowed: str) -> None:
    if method != allowed and not (method == "HEAD" and allowed == "GET"):
        raise RejectedError("Method Not Allowed", status=405)


async def _stream(answer: Answer, send: Send) -> None:
    await asgi.start_events(send)
    head = answer.shape.first(len(answer.choices))
    while True:
        changed = await answer.changes()
        if not changed and answer.gone:
            return
        events = [head, *(choice.take() for choice in changed)]
        head = b""
        if answer.failed:
            await asgi.send_events(send, [*events, error_event(_failure()), DONE], more=False)
            return
        if answer.finished:
            break
        await asgi.send_events(send, events)
    if answer.generation.include_usage:
        events.append(answer.shape.usage(answer.prompt_tokens, answer.completion_tokens))
    await asgi.send_events(send, [*events, DONE], more=False)


async def _whole(answer: Answer, send: Send) -> None:
    while not answer.finished:
        await answer.changes()
        if answer.gone:
            return
        if answer.failed:
            raise _failure()
    ends = [choice.whole() for choice in answer.choices]
    body = answer.shape.whole(
        ends, answer.prompt_tokens, answer.completion_tokens, answer.kv_transfer_params
    )
    await asgi.respond(send, body)


def _failure() -> RejectedError:
    """What vLLM says when a request fails in its engine."""
    return RejectedError("Internal server error", status=500)
