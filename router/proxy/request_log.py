"""Log of requests: one line each, at its end.

Lines hold names, counts and times, never a prompt, answer, key or query.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from router.core.clock import Clock
from router.core.request_watcher import Served
from router.core.targets import Targets, Verdict
from router.core.types import Outcome, Request
from router.logs import fields
from router.tracing import RequestSpan, Tracer

if TYPE_CHECKING:
    from router.core.state.group import Group

log = logging.getLogger(__name__)

_LINE = "evenstep.line"
_OPEN = "evenstep.lines"
_LONGEST = 128
_MOST_AGAIN = 512


@dataclass(slots=True)
class RequestLine:
    """A request's line; None means unknown or not applicable."""

    method: str
    path: str
    began_s: float  # when the head was read
    clock: Clock
    status: int | None = None
    request_id: str | None = None
    model: str | None = None
    group: str | None = None
    worker: str | None = None
    outcome: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    attempts: int | None = None  # dispatches to a worker
    pool_s: float | None = None
    engine_s: float | None = None
    again: str | None = None  # workers and reasons of failed attempts
    ttft_s: float | None = None
    targets: Targets | None = None
    verdict: Verdict | None = None  # whether it met its targets
    token: str | None = None  # router's token, if it went to a pool
    span: RequestSpan | None = None
    _since_s: float | None = None
    _at_engine: bool = False

    def waits(self) -> None:
        self._go(at_engine=False)
        self._mark("queued")

    def sent(self, group: str) -> None:
        self.group = group
        self.attempts = (self.attempts or 0) + 1
        self._go(at_engine=True)
        self._mark("dispatched", group=group)

    def failed(self, worker_id: str, why: object) -> None:
        reason = f"{worker_id}: {why}"[:_LONGEST]
        self.again = reason if self.again is None else f"{self.again}; {reason}"[-_MOST_AGAIN:]
        self._go(at_engine=False)
        self._mark("failed", why=reason)

    def first_byte(self, time_s: float) -> None:
        self.ttft_s = time_s - self.began_s
        self._mark("first_token")

    def ended(self) -> None:
        self._go(at_engine=False)
        self._since_s = None

    def _mark(self, name: str, **known: str | None) -> None:
        if self.span is not None:
            self.span.event(name, **known)

    def _go(self, *, at_engine: bool) -> None:
        now_s = self.clock()
        if self._since_s is not None:
            spent_s = now_s - self._since_s
            if self._at_engine:
                self.engine_s = (self.engine_s or 0.0) + spent_s
            else:
                self.pool_s = (self.pool_s or 0.0) + spent_s
        self._since_s, self._at_engine = now_s, at_engine


class RequestLog:
    """Writes the lines; a watcher of the cluster."""

    def __init__(self, clock: Clock, tracer: Tracer | None = None) -> None:
        self._clock, self._tracer = clock, tracer
        self._open: dict[str, RequestLine] = {}

    def begin(self, scope: Scope) -> RequestLine:
        began_s = self._clock()
        line = scope[_LINE] = RequestLine(scope["method"], scope["path"], began_s, self._clock)
        scope[_OPEN] = self._open
        if self._tracer is not None and line.method == "POST":
            line.span = self._tracer.begin(scope)
        return line

    def end(self, scope: Scope) -> None:
        line: RequestLine = scope[_LINE]
        if line.token is not None:
            self._open.pop(line.token, None)
        line.ended()
        _close(line)
        level = logging.DEBUG if line.method in {"GET", "HEAD"} else logging.INFO
        if not log.isEnabledFor(level):
            return
        shown: dict[str, object] = {
            "request_id": line.request_id,
            "key": scope.get("tenant"),
            "method": line.method,
            "path": line.path[:_LONGEST],
            "status": line.status,
            "model": line.model and line.model[:_LONGEST],
            "group": line.group,
            "worker": line.worker,
            "outcome": line.outcome,
            "prompt_tokens": line.prompt_tokens,
            "output_tokens": line.output_tokens,
            "attempts": line.attempts,
            "again": line.again,
        }
        if line.targets is not None:
            shown["target_ttft_s"], shown["target_tpot_s"] = (
                line.targets.ttft_s,
                line.targets.tpot_s,
            )
            shown["targets"] = line.verdict
        for name in ("pool_s", "engine_s", "ttft_s"):
            if (seconds := getattr(line, name)) is not None:
                shown[name] = round(seconds, 6)
        duration_s = round(self._clock() - line.began_s, 6)
        extra = fields(**shown, duration_s=duration_s)
        # Not ``log.log``, which would look for its caller in the stack.
        log.handle(log.makeRecord(log.name, level, "", 0, "request", (), None, extra=extra))

    # Methods of ``Watcher``.

    def dispatched(self, request: Request) -> None:
        if (line := self._open.get(request.first_id)) is not None:
            line.sent(request.group)

    def first_byte(self, request: Request, time_s: float) -> None:
        if (line := self._open.get(request.first_id)) is not None:
            line.first_byte(time_s)

    def ended(self, request: Request, served: Served | None, outcome: Outcome) -> None:
        if (line := self._open.get(request.first_id)) is None:
            return
        line.ended()
        line.outcome = outcome.value
        line.prompt_tokens = request.prompt_tokens
        if served is not None:
            line.worker, line.prompt_tokens, line.output_tokens = served

    def joined(self, group: Group) -> None:
        """Groups have no lines."""


def _close(line: RequestLine) -> None:
    if line.span is not None:
        line.span.end(
            line.status,
            line.model,
            **{
                "gen_ai.usage.input_tokens": line.prompt_tokens,
                "gen_ai.usage.output_tokens": line.output_tokens,
                "gen_ai.response.time_to_first_chunk": line.ttft_s,
                "evenstep.request_id": line.request_id,
                "evenstep.group": line.group,
                "evenstep.worker": line.worker,
                "evenstep.outcome": line.outcome,
                "evenstep.attempts": line.attempts,
                "evenstep.pool_s": line.pool_s,
                "evenstep.engine_s": line.engine_s,
                "evenstep.targets": line.verdict,
            },
        )


def follow(scope: Scope, request: Request, model: str | None, name: str) -> RequestLine | None:
    """Track a request that enters a pool."""
    line: RequestLine | None = scope.get(_LINE)
    if line is not None:
        line.waits()
        line.token, line.model, line.group = request.first_id, model, request.group
        line.targets = request.targets
        # The client may leave before an answer carries it.
        line.request_id = name
        scope[_OPEN][line.token] = line
    return line


def note_sent(scope: Scope, group: str, worker_id: str) -> RequestLine | None:
    """Record the dispatch of a request that skips the pool."""
    line: RequestLine | None = scope.get(_LINE)
    if line is not None:
        line.worker = worker_id
        line.sent(group)
    return line
