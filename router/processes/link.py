"""The deciding process's end of a connection to a proxy.

Key limits are exact: they are enforced here, where the requests of all proxies meet. Invalid
requests do not count; a proxy answers them itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router.access.door import Keys
from router.access.key_limits import KeyLimits
from router.access.key_ring import Key
from router.core import events as ev
from router.core.clock import Clock
from router.core.errors import EvenstepError
from router.core.process_counts import ProcessCounts
from router.core.types import Outcome, Request
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.interface import Waiter
from router.http.refusal import HttpCounts
from router.processes import messages as m
from router.processes.peer import Peer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeciderParts:
    """What all links need of the deciding process."""

    dispatcher: Dispatcher
    keys: Keys | None  # client keys now valid; None: no key is needed
    limits: KeyLimits
    trouble: Callable[[str, str], None]  # called with an unreachable worker's id, and the reason
    http: HttpCounts  # counters of the clients' port, over all proxies
    processes: ProcessCounts
    clock: Clock


class Link:
    """Applies one proxy's messages; ends its requests when it disconnects.

    ``changed`` is called when the proxy has connected, replied, or left all counts. ``slot`` is
    negative until it has sent ``Hello``. ``tried``: its last reply about a certificate.
    ``follows``: number of the directory that it has applied.
    """

    def __init__(self, parts: DeciderParts, changed: Callable[[Link], None]) -> None:
        self._parts = parts
        self._dispatcher = parts.dispatcher
        self._changed = changed
        self._requests: dict[str, Request] = {}
        self._keys: dict[str, Key] = {}
        self._connections = 0
        self.peer: Peer[m.FromProxy] = Peer(
            m.from_proxy, self._receive, self._come, self._gone, parts.processes
        )
        self.here = False
        self.slot, self.restarts = -1, 0
        self.tried = m.Tried(0, "")
        self.follows = 0

    def _receive(self, message: m.FromProxy) -> None:
        match message:  # the most frequent ones first
            case ev.Progressed() | ev.PromptCounted() | ev.Succeeded() | ev.Failed() | ev.Refused():
                if message.request_id in self._requests:
                    self._dispatcher.apply(message)
            case ev.Arrived():
                self._enter(message.request)
            case ev.Began(id_, worker_id, time_s, good):
                if (request := self._requests.get(id_)) is not None:
                    self._dispatcher.began(request, worker_id, time_s, good=good)
            case ev.Ended():
                if (request := self._requests.pop(message.request_id, None)) is not None:
                    self._dispatcher.end(request, message.outcome)
                    self._let_out(request)
            case ev.Returned(_, again):
                before = self._requests.pop(message.request_id, None)
                if before is None:  # the request was at a worker unknown to this process
                    self._enter(again)
                else:
                    failed_by = again.avoid - before.avoid
                    self._await(*self._dispatcher.give_back(before, *failed_by))
            case _:
                self._receive_report(message)

    def _receive_report(self, message: m.FromProxy) -> None:
        match message:
            case ev.RestRequested():
                self._dispatcher.apply(message)
            case m.Trouble():
                if self._dispatcher.cluster.knows(message.worker_id):
                    self._parts.trouble(message.worker_id, message.reason)
            case m.Tally():
                self._add(message)
            case m.Hello():
                self._adopt(message)
            case m.Tried():
                self.tried = message
                self._changed(self)
            case m.Followed():
                self.follows = message.number
                self._changed(self)
            case _:  # the peer notes each message as a sign of life
                pass

    def _come(self) -> None:
        self.here = True
        self._changed(self)

    def _gone(self) -> None:
        """An error in one removal does not stop the others."""
        self.here, self.slot = False, -1
        requests, keys = self._requests, self._keys
        self._requests, self._keys = {}, {}
        self._parts.http.connections -= self._connections
        self._connections = 0
        with contextlib.ExitStack() as done:
            done.callback(self._changed, self)
            for key in keys.values():
                done.callback(self._parts.limits.leave, key)
            for request in requests.values():
                done.callback(self._dispatcher.end, request, Outcome.ABORTED)

    # requests

    def _adopt(self, hello: m.Hello) -> None:
        self.slot, self.restarts = hello.slot, hello.restarts
        for held in hello.held:
            request = held.request
            if self._dispatcher.adopt(request, held.worker_id):
                self._let_in(request, self._parts.limits.resume)
                self._requests[request.id] = request
                self._dispatcher.apply(ev.Progressed(request.id, held.tokens))
        if hello.held:
            log.info("proxy %d has %d requests at workers", hello.slot, len(hello.held))
        self._changed(self)

    def _enter(self, request: Request) -> None:
        try:
            self._let_in(request, partial(self._parts.limits.enter, now_s=self._parts.clock()))
            waiter = self._dispatcher.submit(request)
        except EvenstepError as error:
            self._deny(request, error)
        else:
            self._await(request, waiter)

    def _let_in(self, request: Request, enter: Callable[[Key], None]) -> None:
        """A key deleted meanwhile has no limits."""
        keys = self._parts.keys
        key = None if keys is None else keys.ring.by_name.get(request.tenant)
        if key is not None and request.first_id not in self._keys:
            enter(key)
            self._keys[request.first_id] = key

    def _await(self, request: Request, waiter: Waiter) -> None:
        self._requests[request.id] = request
        waiter.add_done_callback(partial(self._answer, request.id))

    def _answer(self, request_id: str, waiter: Waiter) -> None:
        error = None if waiter.cancelled() else waiter.exception()
        if waiter.cancelled() or request_id not in self._requests:
            return
        if error is None:
            self.peer.send(m.Given(request_id, waiter.result()))
        else:
            assert isinstance(error, EvenstepError)
            self._deny(self._requests.pop(request_id), error)

    def _deny(self, request: Request, error: EvenstepError) -> None:
        self._let_out(request)
        self.peer.send(m.denied(request.id, error))

    def _let_out(self, request: Request) -> None:
        if (key := self._keys.pop(request.first_id, None)) is not None:
            self._parts.limits.leave(key)

    def _add(self, tally: m.Tally) -> None:
        http = self._parts.http
        http.connections += tally.connections - self._connections
        self._connections = tally.connections
        for status, requests in tally.refused.items():
            http.refused[status] += requests
        self._parts.limits.unauthorized += tally.unauthorized
        self._parts.processes.broken += tally.broken
        for name, group in tally.groups.items():
            if (queue := self._dispatcher.queues.get(name)) is not None:
                queue.stats.tokens.itl_s.add(group.itl, group.itl_s)
                queue.stats.tokens.tpot_s.add(group.tpot, group.tpot_s)
                queue.stats.unreturned += group.unreturned
                queue.stats.verdicts.update(group.verdicts)
