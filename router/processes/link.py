"""The deciding process's end of a connection: tracks one proxy's requests from start to end.

Key limits are enforced here, where the requests of all proxies meet, so they are exact. A request
enters with its first message. It leaves when it ends or its proxy disconnects. Requests that a
proxy answers itself, because they are invalid, do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from router.access.keys import Key, KeyRing
from router.access.limits import KeyLimits
from router.core.clock import Clock
from router.core.errors import EvenstepError
from router.core.process_counts import ProcessCounts
from router.core.types import Request, WorkerSpec
from router.dispatch.dispatcher import Dispatcher
from router.http.counts import HttpCounts
from router.processes import messages as m
from router.processes.connection import Connection

log = logging.getLogger(__name__)

Waiter = asyncio.Future[WorkerSpec]


@dataclass(frozen=True, slots=True)
class Books:
    """State shared by all proxies' links.

    Attributes:
        ring: returns the client keys now valid.
        trouble: called with the id of a worker that failed a connection, and the reason.
        http: counters of the clients' port, summed over all proxies.
    """

    dispatcher: Dispatcher
    ring: Callable[[], KeyRing]
    limits: KeyLimits
    trouble: Callable[[str, str], None]
    http: HttpCounts
    processes: ProcessCounts
    clock: Clock


@dataclass(slots=True)
class _Seat:
    """Identity of the proxy, its open client connections and its requests' keys."""

    slot: int = -1
    restarts: int = 0
    connections: int = 0
    keys: dict[str, Key] = field(default_factory=dict)


class Link:
    """Apply one proxy's messages; withdraw its requests when it disconnects.

    Args:
        made: called when the proxy connects.
        lost: called when it has disconnected and its counts are removed.

    Attributes:
        tried: its last reply about a certificate.
        follows: number of the directory that it has applied.
    """

    def __init__(
        self, books: Books, made: Callable[[Link], None], lost: Callable[[Link], None]
    ) -> None:
        self._books = books
        self._dispatcher = books.dispatcher
        self._made = made
        self._lost = lost
        self._requests: dict[str, Request] = {}
        self._seat = _Seat()
        self.connection: Connection[m.FromProxy] = Connection(
            m.from_proxy, self._take, self._come, self._gone, self._broken
        )
        self.tried = m.Tried(0, "")
        self.follows = 0

    @property
    def slot(self) -> int:
        """Index of the proxy; negative until it has sent ``Hello``."""
        return self._seat.slot

    @property
    def restarts(self) -> int:
        return self._seat.restarts

    def _take(self, message: m.FromProxy) -> None:
        self._DO[type(message)](self, message)

    def _come(self) -> None:
        self._made(self)

    def _gone(self) -> None:
        """Remove the proxy from all counts; an error in one removal does not stop the others.

        Its engine connections ended with the process.
        """
        requests, seat = self._requests, self._seat
        self._requests, self._seat = {}, _Seat()
        self._books.http.connections -= seat.connections
        with contextlib.ExitStack() as done:
            done.callback(self._lost, self)
            for key in seat.keys.values():
                done.callback(self._books.limits.leave, key)
            for request in requests.values():
                done.callback(self._dispatcher.withdraw, request)

    def _broken(self) -> None:
        self._books.processes.broken += 1

    # requests

    def _hello(self, hello: m.Hello) -> None:
        self._seat.slot, self._seat.restarts = hello.slot, hello.restarts
        for held in hello.held:
            request = held.request
            if self._dispatcher.lanes.adopt(request, held.worker_id):
                self._let_in(request, self._books.limits.resume)
                self._requests[request.id] = request
                self._dispatcher.progress(request, held.tokens)
        if hello.held:
            log.info("proxy %d has %d requests at workers", hello.slot, len(hello.held))

    def _submit(self, message: m.Submit) -> None:
        request = message.request
        try:
            self._let_in(request, partial(self._books.limits.enter, now_s=self._books.clock()))
            waiter = self._dispatcher.submit(request)
        except EvenstepError as error:
            self._deny(request, error)
        else:
            self._await(request, waiter)

    def _let_in(self, request: Request, enter: Callable[[Key], None]) -> None:
        """Count a request for its key until it ends; a key deleted meanwhile has no limits."""
        key = self._books.ring().by_name.get(request.tenant)
        if key is not None and request.first_id not in self._seat.keys:
            enter(key)
            self._seat.keys[request.first_id] = key

    def _give_back(self, message: m.GiveBack) -> None:
        before = self._requests.pop(message.id, None)
        if before is None:  # the request was at a worker unknown to this process
            self._submit(m.Submit(message.again))
        else:
            self._await(*self._dispatcher.give_back(before, *message.failed_by))

    def _await(self, request: Request, waiter: Waiter) -> None:
        self._requests[request.id] = request
        waiter.add_done_callback(partial(self._answer, request.id))

    def _answer(self, request_id: str, waiter: Waiter) -> None:
        error = None if waiter.cancelled() else waiter.exception()
        if waiter.cancelled() or request_id not in self._requests:
            return
        if error is None:
            self.connection.say(m.Given(request_id, waiter.result()))
        else:
            assert isinstance(error, EvenstepError)
            self._deny(self._requests.pop(request_id), error)

    def _deny(self, request: Request, error: EvenstepError) -> None:
        self._let_out(request)
        self.connection.say(m.denied(request.id, error))

    def _withdraw(self, message: m.Withdraw) -> None:
        if (request := self._requests.pop(message.id, None)) is not None:
            self._dispatcher.withdraw(request, message.outcome)
            self._let_out(request)

    def _end(self, message: m.End) -> None:
        if (request := self._requests.pop(message.id, None)) is not None:
            self._dispatcher.end(request, message.outcome)
            self._let_out(request)

    def _let_out(self, request: Request) -> None:
        if (key := self._seat.keys.pop(request.first_id, None)) is not None:
            self._books.limits.leave(key)

    # progress of requests

    def _first_byte(self, message: m.FirstByte) -> None:
        if (request := self._requests.get(message.id)) is not None:
            self._dispatcher.first_byte(request, message.time_s)

    def _progress(self, message: m.Progress) -> None:
        if (request := self._requests.get(message.id)) is not None:
            self._dispatcher.progress(request, message.generated_tokens)

    def _counted(self, message: m.Counted) -> None:
        if (request := self._requests.get(message.id)) is not None:
            counts = message.prompt_tokens, message.output_tokens
            self._dispatcher.prompt_counted(request, *counts)

    def _answered(self, message: m.Answered) -> None:
        if message.attempt in self._requests:
            self._dispatcher.answered(message.worker_id, message.attempt)

    def _failed(self, message: m.Failed) -> None:
        if message.attempt in self._requests:
            worker, attempt = message.worker_id, message.attempt
            self._dispatcher.failed(worker, attempt, suspect=message.suspect)

    def _refused(self, message: m.Refused) -> None:
        if message.attempt in self._requests:
            self._dispatcher.refused(message.worker_id, message.attempt)

    # workers and counts

    def _rest(self, message: m.Rest) -> None:
        if self._dispatcher.cluster.knows(message.worker_id):
            self._dispatcher.rest(message.worker_id, message.seconds)

    def _trouble(self, message: m.Trouble) -> None:
        if self._dispatcher.cluster.knows(message.worker_id):
            self._books.trouble(message.worker_id, message.reason)

    def _tally(self, tally: m.Tally) -> None:
        http, seat = self._books.http, self._seat
        http.connections += tally.connections - seat.connections
        seat.connections = tally.connections
        for status, requests in tally.refused.items():
            http.refused[status] += requests
        self._books.limits.unauthorized += tally.unauthorized
        self._books.processes.broken += tally.broken
        for name, group in tally.groups.items():
            if (lane := self._dispatcher.lanes.get(name)) is not None:
                lane.stats.tokens.itl_s.add(group.itl, group.itl_s)
                lane.stats.tokens.tpot_s.add(group.tpot, group.tpot_s)
                lane.stats.unreturned += group.unreturned

    # the process

    def _tried(self, message: m.Tried) -> None:
        self.tried = message

    def _followed(self, message: m.Followed) -> None:
        self.follows = message.number

    def _beat(self, message: m.Beat) -> None:
        """Do nothing: the connection notes every message as a sign of life."""

    # A table, because a chain of cases would be walked for every message of every request.
    _DO: ClassVar[Mapping[type[m.Message], Callable[[Link, Any], None]]] = {
        m.Hello: _hello,
        m.Submit: _submit,
        m.GiveBack: _give_back,
        m.Withdraw: _withdraw,
        m.End: _end,
        m.FirstByte: _first_byte,
        m.Progress: _progress,
        m.Counted: _counted,
        m.Answered: _answered,
        m.Failed: _failed,
        m.Refused: _refused,
        m.Rest: _rest,
        m.Trouble: _trouble,
        m.Tally: _tally,
        m.Tried: _tried,
        m.Followed: _followed,
        m.Beat: _beat,
    }
