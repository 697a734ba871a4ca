"""Health of the engines: who may be used, and which models they serve, adapters included."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.engines.watching import Watches
from router.errors import DescriptorsError, UnknownPathError, UpstreamError
from router.models import Card
from router.types import ASLEEP, PAUSED, WorkerDown, WorkerSpec, WorkerUp

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05


# What the models of ``evenstep emulate`` are owned by.
_EMULATOR = "evenstep-emulator"

# Paths that tell that an engine takes no requests for now, and the reason to show then. vLLM knows
# them with VLLM_SERVER_DEV_MODE=1; other engines are asked again at one check in _RARELY.
_RESTS = (("/is_sleeping", ASLEEP), ("/is_paused", PAUSED))
_RARELY = 60

# An engine makes these anew for every answer.
_FLEETING = ("created", "permission")

_LONGEST_REASON = 200


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


_decode_models = msgspec.json.Decoder(_Models).decode


@dataclass(slots=True)
class _Engine:
    """One URL and the workers behind it, which are up or down together.

    Attributes:
        down_reason: why it is down, while it is.
        cards: what it said last of the models that it serves.
        silence: what was wrong with its last answer to that; None: nothing.
        unknown: paths that it does not know, and checks until the next request for them.
        emulated: it says that it is an emulated one.
        failures: failed checks in a row.
        backoff_s: wait before the check that follows the next report of trouble.
        delay_s: wait before the next check.
        hurried: ends a wait, because ``delay_s`` has become shorter.
    """

    url: str
    worker_ids: list[str]
    up: bool = False
    down_reason: str = "not checked yet"
    cards: Mapping[str, Card] | None = None
    silence: str | None = None
    unknown: dict[str, int] = field(default_factory=dict)
    emulated: bool = False
    failures: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    delay_s: float = 0.0
    hurried: asyncio.Event = field(default_factory=asyncio.Event)


class HealthMonitor:
    """Asks every engine's ``/health`` at intervals; several ranks behind one URL are one engine.

    A worker is down until its engine has answered once, and while that is asleep or paused. Each
    check also reads ``/v1/models``, before the workers come up: adapters come and go.

    Args:
        specs: the workers.
        apply: takes ``WorkerUp``, and ``WorkerDown`` whenever its reason is a new one.
        on_models: told of the models that a worker serves, and what its engine says of each,
            whenever that is something new.
        on_silent: told of a worker whose checks have failed often enough to put it out of use,
            after ``WorkerDown``, and again at each failed check that follows.
        interval_s: between two checks of an engine.
        timeout_s: bound on one check.
        failures: failed checks in a row that put an engine's workers out of use; one whose
            connection is refused does so by itself.
        key: the engines' API key; None: they ask for none.

    Attributes:
        checks: checks made.
        failed_checks: checks that were not answered with success.
        errors: checks that ended in an error nobody expected.
    """

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[WorkerUp | WorkerDown], None],
        on_models: Callable[[str, Mapping[str, Card]], None],
        on_silent: Callable[[str], None],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        failures: int = 3,
        key: str | None = None,
    ) -> None:
        self.checks = 0
        self.failed_checks = 0
        self.errors = 0
        self._apply = apply
        self._on_models = on_models
        self._on_silent = on_silent
        self._interval_s = interval_s
        self._failures = failures
        self._watches = Watches(self._watch, "health", timeout_s, key)
        self._engine_of: dict[str, _Engine] = {}
        for spec in specs:
            self.join(spec)

    def configure(self, interval_s: float, failures: int) -> None:
        """Check so often from now on, and so patiently; see the arguments of the class."""
        self._interval_s = interval_s
        self._failures = failures

    def join(self, spec: WorkerSpec) -> None:
        """One more worker; of an engine that is known it is told at once what that is like."""
        engine = self._watches.engines.get(spec.url)
        if engine is None:
            engine = _Engine(spec.url, [])
            self._watches.begin(spec.url, engine)
        engine.worker_ids.append(spec.id)
        self._engine_of[spec.id] = engine
        if engine.cards is not None:
            self._on_models(spec.id, engine.cards)
        if engine.up:
            self._apply(WorkerUp(spec.id))
        elif engine.failures or engine.down_reason in (ASLEEP, PAUSED):
            self._apply(WorkerDown(spec.id, engine.down_reason))

    def leave(self, worker_id: str) -> None:
        """A worker is gone; an engine without any is asked no more."""
        engine = self._engine_of.pop(worker_id)
        engine.worker_ids.remove(worker_id)
        if not engine.worker_ids:
            self._watches.end(engine.url)

    def emulated(self, worker_id: str) -> bool:
        """Whether a worker's engine has said that it is an emulated one."""
        return self._engine_of[worker_id].emulated

    async def run(self) -> None:
        """Check until cancelled."""
        await self._watches.run()

    def probe_now(self, worker_id: str, reason: str) -> None:
        """Somebody could not reach a worker: it is down at once, and checked again soon.

        That one request failed is no evidence of more: attempts under way go on. Soon is later
        each time, up to the interval, unless a regular check succeeds in between.
        """
        engine = self._engine_of.get(worker_id)  # None: it has left
        if engine is None or not engine.up:
            return
        self._take_down(engine, reason)
        engine.delay_s = min(engine.backoff_s, self._interval_s)
        engine.backoff_s = 2 * engine.delay_s
        engine.hurried.set()

    async def _watch(self, engine: _Engine) -> None:
        while True:
            try:
                await self._wait(engine)
                await self._check(engine)
            except Exception:
                self.errors += 1
                log.exception("%s: health check broke", engine.url)

    async def _wait(self, engine: _Engine) -> None:
        """Wait until the next check is due, which ``probe_now`` may bring forward."""
        while True:
            delay_s, engine.delay_s = engine.delay_s, self._interval_s
            engine.hurried.clear()
            try:
                async with asyncio.timeout(delay_s):
                    await engine.hurried.wait()
            except TimeoutError:
                return

    async def _check(self, engine: _Engine) -> None:
        self.checks += 1
        failure: UpstreamError | None = None
        try:
            await self._watches.ask(engine.url, "/health")
        except DescriptorsError:
            return  # that says nothing of the engine
        except UpstreamError as error:
            failure = error
        if engine.hurried.is_set():
            return  # trouble was reported after the question: the answer is out of date
        if failure is not None:
            self._note_failure(engine, failure)
            return
        engine.failures = 0
        await self._learn_models(engine)
        rest = await self._rest(engine)
        if engine.hurried.is_set():
            return
        if rest is not None:
            if engine.up or rest != engine.down_reason:
                self._take_down(engine, rest)
        elif engine.up:
            engine.backoff_s = FIRST_BACKOFF_S
        else:
            self._bring_up(engine)

    def _note_failure(self, engine: _Engine, failure: UpstreamError) -> None:
        self.failed_checks += 1
        engine.failures += 1
        if isinstance(failure.__cause__, ConnectionRefusedError):  # nobody is there
            engine.failures = max(engine.failures, self._failures)
        reason = f"health check failed: {failure}"
        enough = engine.failures >= self._failures
        news = enough if engine.up else reason != engine.down_reason
        if news:
            self._take_down(engine, reason)
        if enough:
            for worker_id in engine.worker_ids:
                self._on_silent(worker_id)

    def _bring_up(self, engine: _Engine) -> None:
        log.info("%s is up", engine.url)
        for worker_id in engine.worker_ids:
            self._apply(WorkerUp(worker_id))
        engine.up = True

    def _take_down(self, engine: _Engine, reason: str) -> None:
        log.warning("%s is down: %s", engine.url, reason)
        for worker_id in engine.worker_ids:
            self._apply(WorkerDown(worker_id, reason))
        engine.up = False
        engine.unknown.clear()  # another one may come back
        engine.down_reason = reason

    async def _rest(self, engine: _Engine) -> str | None:
        """Why it takes no requests now, though it is healthy; None: it takes them."""
        for path, reason in _RESTS:
            if (checks := engine.unknown.pop(path, 0)) > 1:
                engine.unknown[path] = checks - 1
                continue
            try:
                if _says_so(await self._watches.ask(engine.url, path), path[1:]):
                    return reason
            except UnknownPathError:
                engine.unknown[path] = _RARELY
            except UpstreamError:
                if engine.down_reason == reason and not engine.up:
                    return reason  # as far as is known
        return None

    async def _learn_models(self, engine: _Engine) -> None:
        try:
            cards = _model_cards(await self._watches.ask(engine.url, "/v1/models"))
        except UpstreamError as error:
            cards = str(error)
        before, engine.silence = engine.silence, cards if isinstance(cards, str) else None
        if isinstance(cards, str):
            if cards != before:
                log.warning("%s: models not known, asking /v1/models again: %s", engine.url, cards)
            return
        if engine.cards is not None and _lasting(cards) == _lasting(engine.cards):
            return
        engine.cards = cards
        engine.emulated = any(card.get("owned_by") == _EMULATOR for card in cards.values())
        for worker_id in engine.worker_ids:
            self._on_models(worker_id, cards)


def _model_cards(body: bytes) -> dict[str, Card] | str:
    """What an answer of ``/v1/models`` says of each model, or what was wrong with it."""
    try:
        cards = _decode_models(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)[:_LONGEST_REASON]
    if not all(isinstance(card.get("id"), str) for card in cards):
        return "it lists a model without an id"
    return {card["id"]: card for card in cards}


def _lasting(cards: Mapping[str, Card]) -> Mapping[str, Card]:
    """The same without what is new in each answer."""
    return {
        model: {name: value for name, value in card.items() if name not in _FLEETING}
        for model, card in cards.items()
    }


def _says_so(body: bytes, what: str) -> bool:
    """Whether an answer says that something is so."""
    try:
        return bool(msgspec.json.decode(body, type=dict[str, Any]).get(what))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
