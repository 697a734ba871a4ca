"""HTTP API of one emulated worker, shaped like vLLM's OpenAI server; raw ASGI."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import msgspec
from starlette.types import Receive, Scope, Send

from loadgen.emulator import asgi
from loadgen.emulator.answer import Answer
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
from loadgen.emulator.shapes import error_body
from loadgen.emulator.stepper import Lateness

VERSION = "0.1.0+evenstep.emulated"
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_PARSERS: dict[str, Callable[[bytes, Limits], Generation]] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
    "/v1/messages": parse_message,
    "/v1/responses": parse_response,
}


class WorkerApp:
    """ASGI application of one worker."""

    def __init__(self, worker: EmulatedWorker, lateness: Lateness, sent: SentLog) -> None:
        self._worker = worker
        self._sent = sent
        self._lateness = lateness
        self._limits = worker.settings.limits
        self._pages: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "/health": lambda: (b"", asgi.JSON),
            "/version": lambda: (msgspec.json.encode({"version": VERSION}), asgi.JSON),
            "/v1/models": lambda: (self._models(), asgi.JSON),
            "/load": lambda: (msgspec.json.encode({"server_load": len(worker.answers)}), asgi.JSON),
            "/metrics": lambda: (render_metrics(worker, lateness), METRICS_TYPE),
            "/is_sleeping": lambda: (worker.operated.said("is_sleeping"), asgi.JSON),
            "/is_paused": lambda: (worker.operated.said("is_paused"), asgi.JSON),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await asgi.read_body(receive)
        except asgi.ClientGoneError:
            return
        await self._worker.until_answering()
        if not self._worker.model.live:  # its connections are about to be reset
            await asgi.until_gone(receive)
            return
        try:
            await self._route(scope, body, receive, send)
        except asgi.ClientGoneError:
            return
        except RejectedError as rejected:
            await asgi.respond(
                send,
                error_body(rejected),
                status=rejected.status,
                retry_after_s=rejected.retry_after_s,
            )

    async def _route(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in self._pages:
            _allow(method, "GET")
            page, content_type = self._pages[path]()
            await asgi.respond(send, page, content_type=content_type)
        elif path in _PARSERS:
            _allow(method, "POST")
            began_s = time.monotonic()
            request = asgi.header(scope, b"x-request-id") or uuid.uuid4().hex
            try:
                await self._fail_on_purpose(receive)
                rank, own = asgi.header(scope, b"x-data-parallel-rank"), self._worker.rank
                if rank not in (None, str(own)):
                    raise RejectedError(
                        f"data_parallel_rank {rank} is not that of this engine, {own}",
                        "data_parallel_rank",
                    )
                generation = _PARSERS[path](body, self._serving)
                await self._until_going(receive)
                answer = await self._generate(request, generation, scope, (receive, send))
            except RejectedError as rejected:
                self._note(request, began_s, rejected.status)
                raise
            self._note(request, began_s, 200, answer)
        elif path in BESIDE:
            _allow(method, "POST")
            await self._fail_on_purpose(receive)
            await asgi.respond(send, BESIDE[path](body, self._serving))
        elif path == "/reset_prefix_cache":
            _allow(method, "POST")
            self._worker.reset_prefix_cache()
            await asgi.respond(send, b"")
        elif path in ACTIONS:
            _allow(method, "POST")
            self._worker.operated.do(path, body)
            await asgi.respond(send, b"{}")
        else:
            raise RejectedError("Not Found", status=404)

    async def _fail_on_purpose(self, receive: Receive) -> None:
        fault = self._worker.fault
        if fault is None or fault.kind != "error":
            return
        if fault.delay_s:
            gone = asyncio.ensure_future(asgi.until_gone(receive))
            await asyncio.wait([gone], timeout=fault.delay_s)
            gone.cancel()
        raise RejectedError(
            "emulated fault", status=fault.status, retry_after_s=fault.retry_after_s
        )

    async def _until_going(self, receive: Receive) -> None:
        """Wait while the engine sleeps or is paused.

        Raises:
            ClientGoneError: the client disconnected during the wait.
        """
        going = self._worker.operated.going
        if going.is_set():
            return
        waits = asyncio.ensure_future(going.wait())
        gone = asyncio.ensure_future(asgi.until_gone(receive))
        try:
            await asyncio.wait([waits, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise asgi.ClientGoneError
        finally:
            waits.cancel()
            gone.cancel()

    async def _generate(
        self, request: str, generation: Generation, scope: Scope, client: tuple[Receive, Send]
    ) -> Answer:
        receive, send = client
        wire = scope["extensions"][WIRE]["wire"]
        wire.bear(lambda: self._worker.fault)
        answer = self._worker.submit(generation, request, wire)
        gone = asyncio.ensure_future(asgi.until_gone(receive))
        gone.add_done_callback(lambda _: self._worker.abandon(answer))
        try:
            await (_stream if generation.stream else _whole)(answer, send)
        finally:
            gone.cancel()
            wire.bare()
        return answer

    def _note(
        self, request: str, began_s: float, status: int, answer: Answer | None = None
    ) -> None:
        choices = [] if answer is None else answer.choices
        self._sent.write(
            Sent(
                request=request,
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
        return msgspec.json.encode({"object": "list", "data": [card, *adapters]})


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
            await asgi.send_events(send, [*events, answer.shape.fail(_failure())], more=False)
            return
        if answer.finished:
            break
        await asgi.send_events(send, events)
        answer.confirm(changed)
    end = answer.shape.close(answer.usage, include_usage=answer.generation.include_usage)
    await asgi.send_events(send, [*events, end], more=False)
    answer.confirm(answer.choices)


async def _whole(answer: Answer, send: Send) -> None:
    while not answer.finished:
        await answer.changes()
        if answer.gone:
            return
        if answer.failed:
            raise _failure()
    ends = [choice.whole() for choice in answer.choices]
    body = answer.shape.whole(ends, answer.usage, answer.kv_transfer_params)
    await asgi.respond(send, body)
    answer.confirm(answer.choices)


def _failure() -> RejectedError:
    """As vLLM sends when a request fails in its engine."""
    return RejectedError("Internal server error", status=500)
