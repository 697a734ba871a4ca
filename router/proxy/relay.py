"""Life of a request: queue, dispatch, stream the answer, account for it.

It ends complete, failed, or abandoned by its client. Before the first byte a failing worker costs
only time: the request returns to its place in the pool.
"""

import asyncio
import re
from collections.abc import Awaitable
from http import HTTPStatus

from router.core.errors import (
    AnsweredError,
    DescriptorsError,
    EndingError,
    EvenstepError,
    NotLeadingError,
    RecalledError,
    RequestTimeoutError,
    TargetError,
    UnreachedError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.core.events import Progressed, PromptCounted, Refused
from router.core.queue.retry import may_differ_elsewhere
from router.core.stats import TokenStats
from router.core.targets import Targets, Verdict
from router.core.types import Outcome, Request, WorkerSpec
from router.dispatch.interface import Waiter
from router.engines.http_client import Response
from router.proxy.answers import (
    BODILESS,
    Answer,
    Header,
    error_answer,
    header,
    headers_down,
    headers_up,
    streams,
    tokens_of,
    told_in_stream,
)
from router.proxy.attempts import Attempt, Bound
from router.proxy.client_request import ClientRequest
from router.proxy.context import Client, RelayContext
from router.proxy.event_stream import EventStream, Passing, TokenTimes, check_end, with_comment

ENERGY_HEADER = b"x-evenstep-energy-joules"

# Start of vLLM's error event in each dialect.
FAILED = re.compile(rb'(?:^|[\r\n])(?:data: ?\{"error"|event: ?error[\r\n])')
_CODE = re.compile(rb'"code": ?(\d{3})\b')

_PROGRESS_TOKENS = 32


class Relay:
    """One completion request whose body has been read."""

    def __init__(self, context: RelayContext, request: Request, asked: ClientRequest) -> None:
        self._context = context
        self._request = request
        self._asked = asked
        self._deadlines = context.settings.deadlines.within(asked.timeout_s)
        self._attempts_left = context.settings.max_attempts
        self._at, self._group = "", request.group  # id and group of its worker
        self._client: Client
        self._life = Bound()
        self._watched: Attempt
        self._response: Response
        self._started = self._headed = False
        self._failed = False
        self._error: EvenstepError | None = None
        self._whole_tokens: float | None = None
        self._stream_down: EventStream | None = None
        self._told_tokens = 0
        self._first_s: float  # time of the first byte
        self._times: TokenTimes
        self._passing: Passing | None = None

    async def serve(self, client: Client) -> None:
        """Cancelled, it ends the answer where it is; if the client left, set ``gone`` before."""
        self._client = client
        port = self._context.port
        try:
            with self._life:
                if (limit_s := self._deadlines.request_timeout_s) is not None:
                    left_s = limit_s - (self._context.clock() - self._request.arrival_s)
                    own = limit_s == self._asked.timeout_s
                    late = RequestTimeoutError(f"not answered within {limit_s:g} s", own=own)
                    self._life.within(max(0.0, left_s), late)
                await self._attempts()
        except RequestTimeoutError as error:
            self._cut_short(error, Outcome.EXPIRED)
        except EvenstepError as error:
            port.end(self._request, Outcome.FAILED)
            if isinstance(error, NotLeadingError) and self._asked.elsewhere is not None:
                await self._asked.elsewhere().serve(client)
            else:
                self._refuse(error)
        except asyncio.CancelledError:
            if client.gone:
                self._count()
                port.end(self._request, Outcome.ABORTED)
                raise
            self._cut_short(EndingError("the router is ending; retry"), Outcome.FAILED)
        except BaseException:
            port.end(self._request, Outcome.FAILED)
            raise
        finally:
            self._passing = None  # breaks a reference cycle
            self._conclude()

    def _conclude(self) -> None:
        """Count whether the request met its targets, if that can be told."""
        request, line = self._request, self._asked.line
        if request.targets is None:
            return
        verdict = self._verdict(request.targets, (line and line.pool_s) or 0.0)
        if verdict is not None:
            self._context.port.judged(self._group, verdict)
            if line is not None:
                line.verdict = verdict

    def _verdict(self, targets: Targets, queued_s: float) -> Verdict | None:
        arrival_s = self._request.arrival_s
        if isinstance(self._error, TargetError):
            return "refused"
        if not self._at:
            waited_s = self._context.clock() - arrival_s
            late = targets.ttft_s is not None and waited_s > targets.ttft_s
            return "queue" if late or self._error is not None else None
        if self._error is not None:
            return "failed"
        if self._failed:
            of_client = 400 <= self._response.status < 500
            return None if of_client else "failed"
        if self._whole_tokens is not None:
            return targets.verdict_whole(queued_s, self._first_s - arrival_s, self._whole_tokens)
        if not self._headed:  # its client left, and may not have wanted a stream
            return None
        verdict = targets.verdict(queued_s, self._first_s - arrival_s, self._times.tpot_s)
        return None if verdict == "met" and self._client.gone else verdict

    def _refuse(self, error: EvenstepError) -> None:
        self._started = True
        self._error = error
        self._client.answer(self._asked.dialect.error(error_answer(error)))

    def _cut_short(self, error: EvenstepError, outcome: Outcome) -> None:
        stream = self._stream_down
        self._count()
        done = stream is not None and stream.done
        self._context.port.end(self._request, Outcome.COMPLETED if done else outcome)
        if not self._headed:
            self._refuse(error)
        elif stream is not None:
            self._error = None if done else error
            self._client.finish(b"" if done else self._error_event(error, stream))

    async def _attempts(self) -> None:
        waiter = await self._enter()
        lost: dict[str, UpstreamError] = {}
        while waiter is not None:
            worker = await waiter
            self._context.leading.check()
            # It may have failed because of this request.
            if worker.id in lost:
                raise lost[worker.id]
            self._attempts_left -= 1
            self._at, self._group = worker.id, worker.group
            self._failed, self._stream_down = False, None
            try:
                with self._context.attempts.watch(worker.id, self._deadlines) as self._watched:
                    response = self._response = await self._post(worker, self._body_up())
                    try:
                        good = response.status < HTTPStatus.BAD_REQUEST
                        if good and response.status not in BODILESS and streams(response.headers):
                            await self._stream(worker, response)
                        else:
                            await self._whole(response)
                    finally:
                        response.close()
            except UpstreamError as error:
                self._context.judge_failure(self._request, worker.id, error)
                if self._may_have_failed_by(error):
                    lost[worker.id] = error
                if self._attempts_left <= 0 or not self._may_retry(worker, error):
                    raise
                self._note_again(worker, error)
                waiter = await self._enter_again(*blamed(worker, error))
            else:
                return

    def _note_again(self, worker: WorkerSpec, why: object) -> None:
        if self._asked.line is not None:
            self._asked.line.failed(worker.id, why)

    def _may_have_failed_by(self, error: UpstreamError) -> bool:
        return not isinstance(error, UnreachedError | RecalledError)

    def _may_retry(self, worker: WorkerSpec, error: UpstreamError) -> bool:
        # The router is out of descriptors: another worker would not help.
        if isinstance(error, DescriptorsError):
            return False
        # A lost worker leaves service and fails few more requests; a slow one costs retry budget.
        return not isinstance(error, UpstreamTimeoutError) or self._may_ask_elsewhere(worker.id)

    def _may_ask_elsewhere(self, worker_id: str) -> bool:
        request = self._request
        asked = request.avoid | request.lacks | {worker_id}
        return self._context.port.may_ask_elsewhere(request, asked)

    async def _enter(self) -> Waiter | None:
        return self._context.port.submit(self._request)

    async def _enter_again(self, *failed_by: str) -> Waiter | None:
        self._request, waiter = self._context.port.give_back(self._request, *failed_by)
        return waiter

    def _body_up(self) -> bytes:
        return self._asked.dialect.body_up(self._asked.body, self._request.id)

    def _post(self, worker: WorkerSpec, body: bytes) -> Awaitable[Response]:
        asked, context = self._asked, self._context
        rank = worker.rank if worker.url in context.ranked else None
        headers = headers_up(asked.headers, self._request.id, rank, asked.head.client_id)
        check = context.leading.check
        return context.client.request("POST", worker.url, asked.target, headers, body, check)

    async def _whole(self, response: Response) -> None:
        body = await response.read()
        status = response.status
        if status >= HTTPStatus.BAD_REQUEST:
            self._look_at_status(status, header(response.headers, b"retry-after"))
        self._note_first_byte()
        if (counted := tokens_of(body)) is not None and self._request.slots == 1:
            self._context.port.apply(PromptCounted(self._request.id, *counted))
        elif counted is not None:
            self._progress(counted[1])  # else each answer would count as one token
        if counted is not None:
            self._whole_tokens = counted[1] / self._request.slots
        failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        energy = [(ENERGY_HEADER, self._energy())] if self._request.metered else []
        self._end(Outcome.FAILED if failed else Outcome.COMPLETED)
        headers = (*self._headers_down(response), *energy)
        self._client.answer(Answer(status, body, headers))

    async def _stream(self, worker: WorkerSpec, response: Response) -> None:
        stream = self._stream_down = self._asked.dialect.stream()
        try:
            await response.pour(self._pour)
            check_end(stream, response.framed or self._failed)
        except UpstreamError as error:
            if not self._started:
                raise
            self._count()
            if not stream.done:
                self._context.judge_failure(self._request, worker.id, error)
                self._error = error
                self._end(Outcome.FAILED)
                # Tokens cannot be taken back, so the stream ends with an error event.
                self._client.finish(self._error_event(error, stream))
                return
        if not self._started:
            self._begin(response)
        self._count()
        self._times.end()
        self._end(Outcome.COMPLETED)
        self._client.finish(self._rest(stream))

    def _begin(self, response: Response) -> None:
        self._times = TokenTimes(self._note_first_byte(), self._request.slots)
        self._watched.follow(response)
        self._client.begin(response.status, self._headers_down(response), response)
        self._headed = True

    def _headers_down(self, response: Response) -> list[Header]:
        headers, context = headers_down(response.headers), self._context
        if context.settings.worker_headers:
            headers += context.told(self._at, self._asked.line)
        return headers

    def _pour(self, chunk: bytes) -> None:
        """Sink for the first chunks; a callback of the connection, not a coroutine.

        A metered request stays here, since its energy precedes the last event.
        """
        stream = self._stream_down
        assert stream is not None
        if events := stream.feed(chunk):
            self._pass_on(events, stream)

    def _pass_on(self, events: bytes, stream: EventStream) -> None:
        if not self._started:
            self._look_at_first(events)
            self._begin(self._response)
        clock = self._context.clock
        self._times.passed(stream.tokens, clock())
        if self._request.metered and stream.done:
            comment = ENERGY_HEADER + b": " + self._energy()
            events = with_comment(events, stream.end(events), comment)
        self._client.send(events)
        self._tell(stream.tokens)
        if not self._request.metered:
            self._passing = Passing(stream, self._times, self._client.send, clock, self._tell)
            self._response.divert(self._passing.take)

    def _tell(self, tokens: int) -> None:
        if tokens - self._told_tokens >= _PROGRESS_TOKENS:
            self._progress(tokens)

    def _progress(self, tokens: int) -> None:
        self._told_tokens = tokens
        self._context.port.apply(Progressed(self._request.id, tokens))

    def _count(self) -> None:
        if self._passing is not None:
            self._passing.count()
        if self._headed and self._stream_down is not None:
            # Most answers are shorter than a progress interval, and would count as nothing.
            self._progress(self._stream_down.tokens)

    def _rest(self, stream: EventStream) -> bytes:
        return stream.rest()

    def _error_event(self, error: EvenstepError, stream: EventStream) -> bytes:
        return self._asked.dialect.error_event(*told_in_stream(error), stream.events)

    def _end(self, outcome: Outcome) -> None:
        # The client may read on for as long as it likes.
        self._life.lift()
        self._context.port.end(self._request, outcome)

    def _energy(self) -> bytes:
        energy_j = self._context.port.energy_j(self._request)
        return b"unknown" if energy_j is None else b"%.3f" % energy_j

    def _look_at_first(self, events: bytes) -> None:
        # A stream may begin with an error despite status 200.
        self._failed = FAILED.search(events) is not None
        if not self._failed:
            return
        self._context.port.apply(Refused(self._request.id, self._at))
        if (status := _CODE.search(events)) is not None:
            self._look_at_status(int(status[1]))

    def _look_at_status(self, status: int, retry_after: bytes = b"") -> None:
        """Report an answer's status to the dispatcher; AnsweredError: retry at another worker."""
        self._failed |= status >= HTTPStatus.BAD_REQUEST
        self._context.judge_answer(self._request, self._at, status, retry_after)
        if self._attempts_left > 0 and self._asks_elsewhere(status):
            raise AnsweredError(f"status {status}")

    def _asks_elsewhere(self, status: int) -> bool:
        return may_differ_elsewhere(status) and self._may_ask_elsewhere(self._at)

    def _note_first_byte(self) -> TokenStats:
        """Just before it; returns the group's counters. RecalledError: retry elsewhere."""
        self._watched.note_started()
        self._started = True
        self._first_s, good = self._context.clock(), not self._failed
        return self._context.port.began(self._request, self._at, self._first_s, good=good)


def blamed(worker: WorkerSpec, error: UpstreamError) -> tuple[str, ...]:
    """Workers to avoid: none if the router recalled the attempt itself."""
    return () if isinstance(error, RecalledError) else (worker.id,)
