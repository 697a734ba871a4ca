"""Sends a workload to a router, and measures at the client, at the engines and in their record."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from loadgen.emulator.generation import HIDDEN_LENGTH
from loadgen.emulator.record import StepRecord
from loadgen.replay.replay_results import RequestResult, Run, Window, summarize
from loadgen.replay.replayer import HTTP_OK, receive
from loadgen.replay.stream import CompletionStream
from router.core.errors import UpstreamError
from router.core.step_time import StepTime
from router.engines.http_client import HttpClient
from tests.bench.league.workloads import KEYS, Ask, Session, Workload

_MOST_TOKENS = 4096  # ``max_tokens`` of every request: it tells nothing of the length
_CONTROL_TIMEOUT_S = 10.0
_NUMBERS = re.compile(r"\d+")
_COUNTERS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
)

Figures = dict[str, Any]
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, and what is asked besides.

    Attributes:
        url: of the router.
        engines: URLs of the engines behind it.
        control: the emulator's fault port.
        model: that requests name.
        hidden_lengths: whether engines end an answer at the request's hidden length; else the
            model ends it, or the longest answer that the workload asks for.
        salt: before every prompt, so that caches of engines that have run before know none of them.
    """

    url: str
    engines: Sequence[str]
    control: str
    model: str
    hidden_lengths: bool = True
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Sending:
    """A request that was sent; wall seconds since the start."""

    session: int
    tenant: str
    due_s: float
    sent_s: float


@dataclass(slots=True)
class Sent:
    """What became of the requests, in the order of their sending.

    Attributes:
        sendings: each request.
        results: of each request; None: it has never ended.
        end_s: when the last answer ended, wall seconds since the start.
        faults: how many began or ended.
    """

    sendings: list[Sending] = field(default_factory=list)
    results: list[RequestResult | None] = field(default_factory=list)
    end_s: float = 0.0
    faults: int = 0

    @property
    def last_s(self) -> float:
        """When the last request was sent."""
        return self.sendings[-1].sent_s if self.sendings else 0.0


class Client:
    """Sends the sessions of a workload once."""

    def __init__(self, workload: Workload, place: Place) -> None:
        self._workload = workload
        self._place = place
        self._http = HttpClient(connect_timeout_s=10.0)
        self._sent = Sent()
        self._start_s = 0.0
        self._most_tokens = _MOST_TOKENS

    async def run(self, sessions: Sequence[Session], timeout_s: float) -> Sent:
        """Wait for all answers, so many wall seconds at most."""
        if not self._place.hidden_lengths:
            self._most_tokens = max(ask.output_tokens for session in sessions for ask in session)
        bodies = [[self._body(ask) for ask in session] for session in sessions]
        numbered = iter([*enumerate(zip(sessions, bodies, strict=True))])
        self._start_s = time.monotonic()
        faults = asyncio.create_task(self._faults())
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for _ in range(self._workload.clients):
                    group.create_task(self._in_turn(numbered))
                if not self._workload.clients:
                    for number, (session, each) in numbered:
                        group.create_task(self._session(number, session, each))
        except TimeoutError:
            pass  # what is open stays without a result
        finally:
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
            self._sent.end_s = self._now()
            await self._http.aclose()
        if not faults.cancelled() and (error := faults.exception()) is not None:
            raise RuntimeError(f"a fault did not take effect: {error!r}") from error
        return self._sent

    def _now(self) -> float:
        return time.monotonic() - self._start_s

    def _body(self, ask: Ask) -> bytes:
        body: dict[str, object] = {
            "model": self._place.model,
            "prompt": self._place.salt + ask.prompt,
            "max_tokens": self._most_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        if self._place.hidden_lengths:
            body["vllm_xargs"] = {HIDDEN_LENGTH: ask.output_tokens}
        return msgspec.json.encode(body)

    async def _in_turn(self, sessions: Iterator[tuple[int, Any]]) -> None:
        for number, (session, bodies) in sessions:
            await self._session(number, session, bodies)

    async def _session(self, number: int, session: Session, bodies: Sequence[bytes]) -> None:
        ended_s = self._now() if self._workload.clients else 0.0
        for ask, body in zip(session, bodies, strict=True):
            due_s = ended_s + ask.wait_s * self._workload.time_scale
            if (wait_s := due_s - self._now()) > 0:
                await asyncio.sleep(wait_s)
            sending = Sending(number, ask.tenant, due_s, self._now())
            ended_s = await self._exchange(sending, ask, body, alone=len(session) == 1)

    async def _exchange(self, sending: Sending, ask: Ask, body: bytes, *, alone: bool) -> float:
        place, stream = len(self._sent.results), CompletionStream()
        self._sent.results.append(None)
        self._sent.sendings.append(sending)
        headers = headers_of(place, ask, None if alone else sending.session)
        status, error = None, None
        try:
            status, error = await receive(
                self._http, self._place.url, headers, body, stream, self._now
            )
        except UpstreamError as problem:
            error = str(problem)
        ended_s = self._now()
        self._sent.results[place] = RequestResult(
            prompt_tokens=len(ask.prompt) // 4,
            output_tokens=stream.output_tokens or 0,
            cached_tokens=stream.cached_tokens,
            scheduled_s=sending.due_s,
            sent_s=sending.sent_s,
            first_s=stream.first_s,
            end_s=ended_s,
            status=status,
            error=error or self._complaint(ask, stream),
        )
        return ended_s

    def _complaint(self, ask: Ask, stream: CompletionStream) -> str | None:
        if stream.error is not None:
            return stream.error
        if not stream.done:
            return "the stream ended without [DONE]"
        if stream.output_tokens is None:
            return "nothing tells how many tokens there were"
        if self._place.hidden_lengths and stream.output_tokens != ask.output_tokens:
            return "another number of tokens than the request's hidden length"
        return None

    async def _faults(self) -> None:
        events = [
            *((fault.begin_s, fault, "fault") for fault in self._workload.faults),
            *((fault.end_s, fault, "restore") for fault in self._workload.faults),
        ]
        for at_s, fault, action in sorted(events, key=lambda event: event[0]):
            await asyncio.sleep(max(0.0, at_s * self._workload.time_scale - self._now()))
            body = msgspec.json.encode({"kind": fault.kind}) if action == "fault" else b""
            path = f"/workers/{fault.rank}/{action}"
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                answer = await self._http.request("POST", self._place.control, path, (), body)
                text = await answer.read()
            if answer.status != HTTP_OK:
                raise RuntimeError(f"{path}: {answer.status} {text!r:.200}")
            self._sent.faults += 1


def headers_of(place: int, ask: Ask, session: int | None) -> Headers:
    """Headers of a request.

    Args:
        place: among all requests.
        ask: the request.
        session: its number; None: the request is alone, and needs no state that a router keeps of
            a session.
    """
    headers = [
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer " + KEYS[ask.tenant].encode()),
        (b"x-request-id", b"request-%d" % place),
        (b"x-llm-d-inference-fairness-id", ask.tenant.encode()),
    ]
    if session is not None:
        name = b"session-%d" % session
        headers += [(b"x-session-id", name), (b"x-smg-routing-key", name)]
    return headers


async def counters(engines: Sequence[str]) -> Sequence[float]:
    """Prompt tokens that all engines found in caches, looked for there, and were asked."""
    http = HttpClient(connect_timeout_s=10.0)

    async def one(url: str) -> Sequence[float]:
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                text = (await (await http.request("GET", url, "/metrics")).read()).decode()
        except (TimeoutError, UpstreamError):
            return [0.0] * len(_COUNTERS)  # a rank that is dead
        values = dict.fromkeys(_COUNTERS, 0.0)
        for family in text_string_to_metric_families(text):
            for each in family.samples:  # one for each engine behind the URL
                if each.name in values:
                    values[each.name] += each.value
        return [*values.values()]

    try:
        return [sum(each) for each in zip(*await asyncio.gather(*map(one, engines)), strict=True)]
    finally:
        await http.aclose()


# --- figures --------------------------------------------------------------------------------------


def figures(
    workload: Workload, sent: Sent, record: Sequence[StepRecord], counted: Sequence[float]
) -> Figures:
    """Of one run; times in engine seconds, those of requests without the warm-up.

    Where there are several tenants, the figures of all are those of the tenant ``one``.
    """
    chosen, window = _chosen(workload, sent)
    late_ms = [1e3 * (each.sent_s - each.scheduled_s) for each in sent.results if each]
    hits, queries, asked = counted
    tenants = sorted({sending.tenant for sending in sent.sendings})
    each = {of: [result for sending, result in chosen if sending.tenant == of] for of in tenants}
    # Of sessions that began in the warm-up a slow router has more tokens to send later.
    every = workload.open or workload.clients
    served = sent.results if every else [result for _, result in chosen]
    return {
        **of_requests(workload, each["one"], window),
        **{of: of_requests(workload, each[of], window) for of in tenants if of != "one"},
        "tokens_per_s": _tokens_per_s(workload, served, window),
        "requests": len(sent.results),
        "faults": sent.faults,
        "longest_wait_ms": _longest_wait_s(sent) / workload.time_scale * 1e3,
        "hit_share": hits / queries if queries else None,
        **of_steps(workload, record, asked - hits),
        "client_late_p99_wall_ms": float(np.percentile(late_ms, 99)) if late_ms else 0.0,
        "wall_s": sent.end_s,
    }


_Pairs = Sequence[tuple[Sending, RequestResult | None]]


def _chosen(workload: Workload, sent: Sent) -> tuple[_Pairs, Window]:
    """Requests that figures are of, and from when until when these were sent.

    They are the same for every router: those of all sessions but the first ones. Of clients that
    wait, requests are counted by their end: those that a router let lie since the warm-up hold
    clients, and would make all others look fast.
    """
    pairs = [*zip(sent.sendings, sent.results, strict=True)]
    if not workload.clients:
        warm = workload.warm(len({sending.session for sending in sent.sendings}))
        later = [pair for pair in pairs if pair[0].session >= warm]
        begin_s = min((sending.due_s for sending, _ in later), default=0.0)
        return later, Window(begin_s, max((each.sent_s for each, _ in later), default=begin_s))
    begin_s = next(
        (each.sent_s for _, each in pairs[workload.warm(len(pairs)) :] if each is not None), 0.0
    )
    inside = [
        (sending, each)
        for sending, each in pairs
        if each is None or begin_s <= each.end_s <= sent.last_s
    ]
    return inside, Window(begin_s, sent.last_s)


def _longest_wait_s(sent: Sent) -> float:
    """Of the requests that had no token yet when the last one was sent: figures lack them."""
    waiting = [
        sent.last_s - each.scheduled_s
        for each in sent.results
        if each is not None and (each.first_s or each.end_s) > sent.last_s
    ]
    return max(waiting, default=0.0)


def _tokens_per_s(
    workload: Workload, results: Sequence[RequestResult | None], window: Window
) -> float | None:
    """All tenants' tokens while the counted requests were sent."""
    done = [each for each in results if each is not None and each.error is None]
    if not done or window.length_s <= 0:
        return None
    run = Run(done, len(done), len(done), window, window)
    steady = cast(Any, summarize(run, {}, workload.time_scale, {}))["steady"]
    return cast(float, steady["output_throughput"])


def of_requests(
    workload: Workload, results: Sequence[RequestResult | None], sending: Window
) -> Figures:
    """Of some of the requests, which were sent in that time."""
    ended = [each for each in results if each is not None]
    first_s = min((each.scheduled_s for each in ended), default=0.0)
    span = Window(first_s, max((each.end_s for each in ended), default=first_s))
    run = Run(ended, len(results), len(results), span, None)
    report = cast(Any, summarize(run, {}, workload.time_scale, workload.targets_ms))
    good = (report["request_goodput"] or 0.0) * span.length_s / workload.time_scale
    # Per second in which requests were sent: how long the last answer takes makes none good.
    sending_s = max(sending.length_s, 1e-9) / workload.time_scale
    errors = Counter[str]()
    for message, count in report["errors"].items():
        errors[_NUMBERS.sub("N", message)[:100]] += count
    names = [f"{of}_{name}_ms" for name in ("ttft", "tpot", "e2el") for of in ("mean", "p99")]
    return {
        **{name: report[name] for name in names},
        "goodput_per_s": good / sending_s,
        "good_share": good / max(len(results), 1),
        "cached_share": report["cached_prompt_share"],
        "completed": report["completed"],
        "failed": len(results) - report["completed"],
        "lost": len(results) - len(ended),
        "errors": dict(errors),
    }


def of_steps(workload: Workload, record: Sequence[StepRecord], computed_tokens: float) -> Figures:
    """Of the fleet's record: idle share, and how late its steps were."""
    if not record:
        return {}
    late = [row.lateness for row in record]
    return {
        "idle_share": _idle_share(workload, record, computed_tokens),
        "steps": len(record),
        # Of the time in steps: a short step that ends late says little.
        "steps_late_mean": float(np.average(late, weights=[row.step_s for row in record])),
        "steps_late_p99": float(np.percentile(late, 99)),
    }


def _idle_share(
    workload: Workload, record: Sequence[StepRecord], computed_tokens: float
) -> float | None:
    """Share of the ranks' time in steps that they wait for the slowest; None without a barrier.

    A step takes C + max(work), work being t_l L + t_p P: what all ranks had to do in all steps is
    known, though not how many prompt tokens each had in each.
    """
    flags = dict(pairwise(workload.fleet))
    if "--no-barrier" in workload.fleet or workload.faults:
        return None
    cost = StepTime.parse(flags["--step-time"])
    beyond_s = sum(workload.ranks * (row.step_s - cost.base_s) for row in record)
    work_s = cost.per_token_s * sum(sum(row.load_tokens) for row in record)
    work_s += cost.per_prompt_token_s * computed_tokens
    return max(0.0, beyond_s - work_s) / sum(workload.ranks * row.step_s for row in record)
