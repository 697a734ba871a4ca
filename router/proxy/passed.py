"""Requests that another replica decides on: it answers, and its answer is passed on as it comes.

A leader that fails before the first byte costs only time: its successor is asked.
"""

import asyncio
from collections.abc import Awaitable, Set
from dataclasses import replace

from starlette.types import Scope

from router.core.errors import NotLeadingError, UpstreamError
from router.core.events import RelayEvent
from router.core.stats import TokenStats
from router.core.targets import Verdict
from router.core.types import Outcome, Request, WorkerSpec
from router.dispatch.interface import Again, Waiter
from router.engines.http_client import Response
from router.proxy.answers import NOT_LEADING, PASSED_ON, header, headers_on
from router.proxy.client_request import ClientRequest
from router.proxy.context import RelayContext
from router.proxy.relay import Relay
from router.proxy.request_log import note_sent
from router.replicas.leading import Leading

# A leader that failed is asked again, unless there is another one before.
_AGAIN_S = 0.5
# A process that stands still takes a connection and says nothing.
_ANSWERS_S = 5.0
_ANY_NUMBER = 1 << 30


def passes_on(context: RelayContext, scope: Scope) -> bool:
    """Whether another replica may be asked: not for one that another has passed on."""
    return not (context.leading.alone or header(scope["headers"], PASSED_ON))


class LeaderWatch:
    """Breaks off what was passed on to a replica that decides no more and stands still."""

    def __init__(self, context: RelayContext) -> None:
        self._context = context

    async def run(self) -> None:
        leading, now = self._context.leading, ""
        while not leading.alone:
            before, now = now, leading.leader
            if url := before.partition("@")[2]:
                await self._look(before, url)
            while leading.leader == now:
                await leading.change(_AGAIN_S)

    async def _look(self, leader: str, url: str) -> None:
        try:
            async with asyncio.timeout(_ANSWERS_S):
                (await self._context.replicas.request("GET", url, "/version")).close()
        except UpstreamError:
            """It ends, and its open answers go on; or it has, and they are known to be lost."""
        except TimeoutError:
            self._context.attempts.break_off(leader, "it decides no more, and does not answer")


class Passed(Relay):
    """One request whose body has been read; the leader is its only worker."""

    def __init__(self, context: RelayContext, scope: Scope, asked: ClientRequest) -> None:
        settings = replace(context.settings, max_attempts=_ANY_NUMBER, worker_headers=False)
        asked = replace(asked, elsewhere=None)
        own = replace(
            context,
            port=_Leader(context, scope, asked),
            client=context.replicas,
            trouble=lambda *_: None,
            settings=settings,
            leading=Leading(),
        )
        request = Request(asked.head.token, "", prompt_tokens=0, arrival_s=context.clock())
        super().__init__(own, request, asked)
        # The leader knows when an engine has the request.
        self._deadlines = replace(self._deadlines, first_byte_timeout_s=None)
        self._headers = headers_on(
            scope.get("evenstep.shown", asked.headers), asked.head.name.encode()
        )

    def _post(self, worker: WorkerSpec, body: bytes) -> Awaitable[Response]:
        target, client = self._asked.target, self._context.client
        return client.request("POST", worker.url, target, self._headers, body)

    def _body_up(self) -> bytes:
        return self._asked.body

    def _may_have_failed_by(self, error: UpstreamError) -> bool:
        return False

    def _asks_elsewhere(self, status: int) -> bool:
        return bool(header(self._response.headers, NOT_LEADING))


class _Leader:
    """The replica that decides, as a relay's dispatcher."""

    def __init__(self, context: RelayContext, scope: Scope, asked: ClientRequest) -> None:
        self._leading, self._clock = context.leading, context.clock
        self._scope, self._asked = scope, asked
        self._failed: str | None = None
        self._end_s = 0.0

    def submit(self, request: Request) -> Waiter:
        return asyncio.ensure_future(self._found())

    def give_back(self, request: Request, *failed_by: str) -> Again:
        return request.again(), asyncio.ensure_future(self._found(*failed_by))

    async def _found(self, failed: str | None = None) -> WorkerSpec:
        leading = self._leading
        if failed is None or self._failed != failed:
            self._failed, self._end_s = failed, self._clock() + leading.patience_s
        if leading.leader == failed:
            await leading.change(_AGAIN_S)
        while self._clock() < self._end_s:
            if url := leading.leader.partition("@")[2]:
                self._asked.line = note_sent(self._scope, "", leading.leader)
                return WorkerSpec(leading.leader, url)
            await leading.change(_AGAIN_S)
        raise NotLeadingError(f"{leading.standing}; retry")

    def may_ask_elsewhere(self, request: Request, asked: Set[str]) -> bool:
        return True

    def began(
        self, request: Request, worker_id: str, now_s: float, *, good: bool = True
    ) -> TokenStats:
        return TokenStats()

    def apply(self, event: RelayEvent) -> None:
        """It counts for itself, as in what follows."""

    def end(self, request: Request, outcome: Outcome) -> None: ...

    def judged(self, group: str, verdict: Verdict) -> None: ...

    def energy_j(self, request: Request) -> float | None:
        return None
