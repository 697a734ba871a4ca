"""HTTP API of one emulated worker, shaped like vLLM's OpenAI server."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loadgen.emulator.answer import Answer
from loadgen.emulator.asgi import json_response, refusal, until_gone
from loadgen.emulator.beside import BESIDE
from loadgen.emulator.conversations import parse_message, parse_response
from loadgen.emulator.emulated_worker import EmulatedWorker
from loadgen.emulator.generation import (
    Generation,
    Limits,
    RejectedError,
    parse_chat,
    parse_completion,
)
from loadgen.emulator.listener import WIRE
from loadgen.emulator.metrics import render_metrics
from loadgen.emulator.operated import ACTIONS
from loadgen.emulator.sent import Sent, SentLog
from loadgen.emulator.stepper import Lateness

VERSION = "0.1.0+evenstep.emulated"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PARSERS: dict[str, Callable[[bytes, Limits], Generation]] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
    "/v1/messages": parse_message,
    "/v1/responses": parse_response,
}
_RESET = "/reset_prefix_cache"
_encode = msgspec.json.encode
_POSTED = {*_PARSERS, *BESIDE, *ACTIONS, _RESET}


class WorkerApp:
    """ASGI application of one worker."""

    def __init__(self, worker: EmulatedWorker, lateness: Lateness, sent: SentLog) -> None:
        self._worker = worker
        self._sent = sent
        self._lateness = lateness
        self._limits = worker.settings.limits
        self._pages: dict[str, Callable[[], Response]] = {
            "/health": lambda: json_response(b""),
            "/version": lambda: json_response(_encode({"version": VERSION})),
            "/v1/models": lambda: json_response(self._models()),
            "/load": lambda: json_response(_encode({"server_load": len(worker.answers)})),
            "/metrics": lambda: Response(render_metrics(worker, lateness), media_type=METRICS_TYPE),
            "/is_sleeping": lambda: json_response(worker.operated.said("is_sleeping")),
            "/is_paused": lambda: json_response(worker.operated.said("is_paused")),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            body = await request.body()
            await self._worker.until_answering()
            if not self._worker.model.live:  # its connections are about to be reset
                await until_gone(receive)
                return
            response = await self._answered(request, body, send)
        except ClientDisconnect:
            return
        except RejectedError as rejected:
            response = refusal(rejected)
        if response is not None:
            await response(scope, receive, send)

    async def _answered(self, request: Request, body: bytes, send: Send) -> Response | None:
        """The answer; None: it has been sent already."""
        path, method = request.scope["path"], request.method
        if path not in self._pages and path not in _POSTED:
            raise RejectedError("Not Found", status=404)
        if method not in (("GET", "HEAD") if path in self._pages else ("POST",)):
            raise RejectedError("Method Not Allowed", status=405)
        if path in self._pages:
            return self._pages[path]()
        if path in _PARSERS:
            await self._complete(request, body, send)
            return None
        if path in BESIDE:
            await self._fail_on_purpose(request.receive)
            return json_response(BESIDE[path](body, self._serving))
        if path == _RESET:
            self._worker.reset_prefix_cache()
            return json_response(b"")
        self._worker.operated.do(path, body)
        return json_response(b"{}")

    async def _complete(self, request: Request, body: bytes, send: Send) -> None:
        """Send the answer of a model."""
        began_s = time.monotonic()
        name = request.headers.get("x-request-id") or uuid.uuid4().hex
        try:
            await self._fail_on_purpose(request.receive)
            rank, own = request.headers.get("x-data-parallel-rank"), self._worker.rank
            if rank not in (None, str(own)):
                raise RejectedError(
                    f"data_parallel_rank {rank} is not that of this engine, {own}",
                    "data_parallel_rank",
                )
            generation = _PARSERS[request.scope["path"]](body, self._serving)
            await self._until_going(request.receive)
            answer = await self._generate(name, generation, request, send)
        except RejectedError as rejected:
            self._note(name, began_s, rejected.status)
            raise
        self._note(name, began_s, 200, answer)

    async def _fail_on_purpose(self, receive: Receive) -> None:
        fault = self._worker.fault
        if fault is None or fault.kind != "error":
            return
        if fault.delay_s:
            gone = asyncio.ensure_future(until_gone(receive))
            await asyncio.wait([gone], timeout=fault.delay_s)
            gone.cancel()
        raise RejectedError(
            "emulated fault", status=fault.status, retry_after_s=fault.retry_after_s
        )

    async def _until_going(self, receive: Receive) -> None:
        """Wait while the engine sleeps or is paused; a disconnect of the client ends the wait."""
        going = self._worker.operated.going
        if going.is_set():
            return
        waits = asyncio.ensure_future(going.wait())
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait([waits, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
        finally:
            waits.cancel()
            gone.cancel()

    async def _generate(
        self, name: str, generation: Generation, request: Request, send: Send
    ) -> Answer:
        wire = request.scope["extensions"][WIRE]["wire"]
        wire.bear(lambda: self._worker.fault)
        answer = self._worker.submit(generation, name, wire)
        gone = asyncio.ensure_future(until_gone(request.receive))
        gone.add_done_callback(lambda _: self._worker.abandon(answer))
        try:
            await (_stream if generation.stream else _whole)(answer, request, send)
        finally:
            gone.cancel()
            wire.bare()
        return answer

    def _note(self, name: str, began_s: float, status: int, answer: Answer | None = None) -> None:
        choices = [] if answer is None else answer.choices
        self._sent.write(
            Sent(
                request=name,
                rank=self._worker.rank,
                began_s=began_s,
                ended_s=time.monotonic(),
                status=status,
                complete=answer is not None and answer.complete,
                tokens=tuple(choice.confirmed_tokens for choice in choices),
                texts=tuple(choice.confirmed_text for choice in choices),
            )
        )

    @property
    def _serving(self) -> Limits:
        return replace(self._limits, adapters=frozenset(self._worker.operated.adapters))

    def _models(self) -> bytes:
        limits = self._limits
        card = {
            "id": limits.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "evenstep-emulator",
            "root": limits.model,
            "parent": None,
            "max_model_len": limits.max_model_len,
            "permission": [],
        }
        adapters = [
            {**card, "id": name, "root": root, "parent": limits.model, "max_model_len": None}
            for name, root in self._worker.operated.adapters.items()
        ]
        return _encode({"object": "list", "data": [card, *adapters]})


async def _stream(answer: Answer, request: Request, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    head = answer.shape.first(len(answer.choices))
    while True:
        changed = await answer.changes()
        if not changed and answer.gone:
            return
        events = [head, *(choice.take() for choice in changed)]
        head = b""
        if answer.failed:
            await _send_events(send, [*events, answer.shape.fail(_failure())], more=False)
            return
        if answer.finished:
            break
        await _send_events(send, events)
        answer.confirm(changed)
    end = answer.shape.close(answer.usage, include_usage=answer.generation.include_usage)
    await _send_events(send, [*events, end], more=False)
    answer.confirm(answer.choices)


async def _send_events(send: Send, events: Iterable[bytes], *, more: bool = True) -> None:
    """Send events as one chunk."""
    await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})


async def _whole(answer: Answer, request: Request, send: Send) -> None:
    while not answer.finished:
        await answer.changes()
        if answer.gone:
            return
        if answer.failed:
            raise _failure()
    ends = [choice.whole() for choice in answer.choices]
    response = json_response(answer.shape.whole(ends, answer.usage, answer.kv_transfer_params))
    await response(request.scope, request.receive, send)
    answer.confirm(answer.choices)


def _failure() -> RejectedError:
    """As vLLM sends when a request fails in its engine."""
    return RejectedError("Internal server error", status=500)
