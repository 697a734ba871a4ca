import logging
from dataclasses import replace
from http import HTTPStatus

from router.core.errors import NoWorkerError, RecalledError, UpstreamError
from router.core.events import Fetched, PromptCounted, Succeeded
from router.core.queue.retry import faults, may_differ_elsewhere
from router.core.stats import TokenStats
from router.core.types import Outcome, Request, WorkerSpec
from router.dispatch.interface import Waiter
from router.proxy.answers import Answer, header, headers_down
from router.proxy.client_request import ClientRequest
from router.proxy.context import RelayContext
from router.proxy.event_stream import EventStream
from router.proxy.kv_transfer import Computed, decode_body, prefill_body, read_answer
from router.proxy.relay import FAILED, Relay, blamed

log = logging.getLogger(__name__)


class SplitRelay(Relay):
    """A request that one worker prefills and another decodes.

    Every failure before the first byte is retried. A prompt, also one whose KV is gone, goes to
    another prefill worker. If none can compute it, a worker serves the whole request.
    """

    def __init__(self, context: RelayContext, request: Request, asked: ClientRequest) -> None:
        super().__init__(context, request, asked)
        self._transfer = context.transfer
        self._computed: Computed | None = None
        self._computed_at = ""
        self._prefills_left = max(1, context.settings.max_attempts - 1)
        self._refetched = False
        self._passed = False
        self._held = b""

    async def _enter(self) -> Waiter | None:
        past = self._transfer.port.send_past(self._request)
        if past is not None:
            self._passed = True
            self._request, waiter = past
            return waiter
        try:
            waiter = self._context.port.submit(self._request)
        except NoWorkerError:
            return self._go_whole()
        return await self._prefill(waiter)

    async def _enter_again(self, *failed_by: str) -> Waiter | None:
        self._held = b""
        if not (self._kept or self._passed):
            return await super()._enter_again(*failed_by)
        self._passed = False
        self._transfer.bootstraps.forget(self._computed_at)
        self._computed = None
        self._request, waiter = self._transfer.port.prefill_again(self._request, *failed_by)
        return await self._prefill(waiter)

    @property
    def _kept(self) -> bool:
        # KV handed over by address serves one decode attempt.
        return self._computed is not None and self._computed.kv_transfer_params is not None

    def _may_have_failed_by(self, error: UpstreamError) -> bool:
        # The KV transfer may be at fault, so the worker may try again.
        return not self._kept and super()._may_have_failed_by(error)

    def _body_up(self) -> bytes:
        if self._kept and not self._transfer.port.keeps(self._request):
            # After the last prefill attempt the decode worker computes the prompt.
            if self._prefills_left > 0:
                raise RecalledError("the prompt's KV is gone")
            self._computed = None
        params = None if self._computed is None else self._computed.kv_transfer_params
        return decode_body(self._asked.body, params)

    def _asks_elsewhere(self, status: int) -> bool:
        # A worker that could not fetch the KV may fail (``kv_load_failure_policy``).
        if self._kept and not self._refetched and faults(status):
            self._refetched = True
            return True
        return super()._asks_elsewhere(status)

    def _pass_on(self, events: bytes, stream: EventStream) -> None:
        if self._kept and not self._started:
            self._held += events
            failed = FAILED.search(self._held) is not None
            # A chat's first event, which has no text, is held until the second: an error could
            # still follow.
            alone = stream.events < 2 and not stream.done and b'"role"' in self._held
            if alone and not failed:
                return
            events, self._held = self._held, b""
        super()._pass_on(events, stream)

    def _rest(self, stream: EventStream) -> bytes:
        return self._held + super()._rest(stream)

    def _note_first_byte(self) -> TokenStats:
        stats = super()._note_first_byte()
        # With an error the KV was not fetched, and is kept.
        if self._response.status < HTTPStatus.BAD_REQUEST and not self._failed:
            self._transfer.port.apply(Fetched(self._request.id))
        return stats

    async def _prefill(self, waiter: Waiter) -> Waiter | None:
        """Compute the prompt, then queue for a worker; None if the client has its answer."""
        while True:
            try:
                worker = await waiter
            except NoWorkerError:
                return self._go_whole()
            self._context.leading.check()
            self._prefills_left -= 1
            try:
                answer = await self._compute(worker)
            except UpstreamError as error:
                self._context.judge_failure(self._request, worker.id, error)
                self._transfer.bootstraps.forget(worker.id)
                if self._prefills_left <= 0 or not self._may_retry(worker, error):
                    return self._go_whole()
                self._note_again(worker, error)
                again = self._context.port.give_back(self._request, *blamed(worker, error))
                self._request, waiter = again
            else:
                elsewhere = self._turned_away(answer, worker)
                if elsewhere is None:
                    return self._go_on(answer)
                waiter = elsewhere

    def _turned_away(self, answer: Computed | Answer, worker: WorkerSpec) -> Waiter | None:
        """Queue for another prefill worker if this one refused; None: use the answer."""
        context, request = self._context, self._request
        if isinstance(answer, Computed):
            context.port.apply(Succeeded(request.id, worker.id, context.clock()))
            return None
        retry_after = header(answer.headers, b"retry-after")
        context.judge_answer(request, worker.id, answer.status, retry_after)
        again = None
        if self._prefills_left > 0 and may_differ_elsewhere(answer.status):
            if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                again = self._transfer.port.turned_away(request, worker.id)
            elif self._may_ask_elsewhere(worker.id):
                again = context.port.give_back(request, worker.id)
        if again is None:
            return None
        self._note_again(worker, f"status {answer.status}")
        self._request, waiter = again
        return waiter

    async def _compute(self, worker: WorkerSpec) -> Computed | Answer:
        """Send the prefill request; returns the answer if nothing was computed.

        Raises:
            UpstreamError: it failed.
        """
        context, request = self._context, self._request
        hands_params = self._transfer.kept_s is not None
        body = prefill_body(self._asked.body, request.id, hands_params=hands_params)
        with context.attempts.watch(worker.id, self._deadlines):
            place = None
            if hands_params and worker.kv_bootstrap is not None:
                place = await self._transfer.bootstraps.params(worker, request.id)
            response = await self._post(worker, body)
            try:
                answer = await response.read()
            finally:
                response.close()
        if response.status >= HTTPStatus.BAD_REQUEST:
            return Answer(response.status, answer, tuple(headers_down(response.headers)))
        computed = read_answer(answer)
        context.port.apply(PromptCounted(request.id, computed.prompt_tokens))
        self._computed_at = worker.id
        if place is not None or not hands_params:
            return replace(computed, kv_transfer_params=place)
        if computed.kv_transfer_params is None:
            self._warn(worker)
        return computed

    def _go_on(self, answer: Computed | Answer) -> Waiter | None:
        if isinstance(answer, Computed):
            self._computed = answer
            kept_s = self._transfer.kept_s if self._kept else None
            lost = self._transfer.kept_s is not None and not self._kept
            self._request, waiter = self._transfer.port.hand_off(
                self._request, answer.prompt_tokens, kept_s, lost=lost
            )
            if self._asked.line is not None:
                self._asked.line.waits()
            return waiter
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return self._go_whole()
        self._end(Outcome.COMPLETED)
        self._started = True
        self._client.answer(answer)
        return None

    def _go_whole(self) -> Waiter:
        self._request, waiter = self._transfer.port.serve_whole(self._request)
        return waiter

    def _warn(self, worker: WorkerSpec) -> None:
        warned = self._transfer.warned
        if worker.id not in warned:
            warned.add(worker.id)
            log.warning(
                "%s: does not say where a prompt's KV lies (kv_transfer_params), so that prompts "
                "are computed twice: give its engine a --kv-transfer-config, or evenstep "
                "--kv-transfer content if others find KV by its content",
                worker.id,
            )
