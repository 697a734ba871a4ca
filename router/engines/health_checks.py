"""Health checks: which engines are up, and which models they serve, adapters included."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.core.errors import DescriptorsError, UnknownPathError, UpstreamError
from router.core.events import WorkerDown, WorkerUp
from router.core.types import ASLEEP, PAUSED, Card, WorkerSpec
from router.engines.polling import PolledEngine, Poller

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05


# Owner of models from ``evenstep emulate``.
_EMULATOR = "evenstep-emulator"

# Paths that report a resting engine, and the reason to show. vLLM serves them if
# VLLM_SERVER_DEV_MODE=1; without it they are queried once in _RARELY checks.
_RESTS = (("/is_sleeping", ASLEEP), ("/is_paused", PAUSED))
_RARELY = 60

# New in every answer.
_FLEETING = ("created", "permission")

_LONGEST_REASON = 200


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


_decode_models = msgspec.json.Decoder(_Models).decode


@dataclass(slots=True)
class _Engine(PolledEngine):
    """One URL and its workers, which are up or down together."""

    up: bool = False
    down_reason: str = "not checked yet"
    cards: Mapping[str, Card] | None = None
    silence: str | None = None  # error in the last list of models
    # Unsupported paths, with the number of checks until the next query.
    unknown: dict[str, int] = field(default_factory=dict)
    emulated: bool = False
    failures: int = 0  # failed checks in a row
    backoff_s: float = FIRST_BACKOFF_S  # wait before the check after the next reported failure
    delay_s: float = 0.0  # wait before the next check
    # Ends a wait: ``delay_s`` is shorter now.
    hurried: asyncio.Event = field(default_factory=asyncio.Event)
    known: asyncio.Event = field(default_factory=asyncio.Event)  # set from the first check on


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """As ``router.config`` declares them."""

    health_interval_s: float
    health_timeout_s: float
    health_failures: int


class HealthMonitor(Poller[_Engine]):
    """Polls every engine's ``/health``; ranks behind one URL are one engine.

    A worker is down until its engine's first answer, and while that is asleep or paused. Each check
    also reads ``/v1/models`` before the workers come up: adapters change.

    Args:
        apply: gets ``WorkerUp``, and ``WorkerDown`` with a new reason.
        on_models: gets a worker and its models, when they change.
        on_silent: called for each failed check from ``health_failures`` on, after ``WorkerDown``.
        settings: the check's timeout is fixed at the start.
    """

    make = _Engine

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[WorkerUp | WorkerDown], None],
        on_models: Callable[[str, Mapping[str, Card]], None],
        on_silent: Callable[[str], None],
        settings: HealthSettings,
        *,
        key: str | None = None,
    ) -> None:
        self.checks = 0
        self.failed_checks = 0
        self.errors = 0
        self._apply = apply
        self._on_models = on_models
        self._on_silent = on_silent
        self.settings = settings
        super().__init__(specs, settings.health_timeout_s, key)

    def join(self, spec: WorkerSpec) -> None:
        """The state of a known engine is reported at once."""
        super().join(spec)
        engine = self._of[spec.id]
        if engine.cards is not None:
            self._on_models(spec.id, engine.cards)
        if engine.up:
            self._apply(WorkerUp(spec.id))
        elif engine.failures or engine.down_reason in (ASLEEP, PAUSED):
            self._apply(WorkerDown(spec.id, engine.down_reason))

    def emulated(self, worker_id: str) -> bool:
        return self._of[worker_id].emulated

    async def first_checks(self) -> None:
        for engine in list(self._engines.values()):
            await engine.known.wait()

    def probe_now(self, worker_id: str, reason: str) -> None:
        """Take an unreachable worker down at once and check it again soon.

        Attempts under way go on: one failure proves no more. The delay doubles, up to the interval,
        until a regular check succeeds.
        """
        engine = self._of.get(worker_id)  # None: it has left
        if engine is None or not engine.up:
            return
        self._take_down(engine, reason)
        engine.delay_s = min(engine.backoff_s, self.settings.health_interval_s)
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
        while True:
            delay_s, engine.delay_s = engine.delay_s, self.settings.health_interval_s
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
            await self._ask(engine.url, "/health")
        except DescriptorsError:
            return  # not the engine's fault
        except UpstreamError as error:
            failure = error
        if engine.hurried.is_set():
            return  # a failure was reported meanwhile: this answer is out of date
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
            log.info("%s is up", engine.url)
            for worker in engine.workers:
                self._apply(WorkerUp(worker.id))
            engine.up = True
            engine.known.set()

    def _note_failure(self, engine: _Engine, failure: UpstreamError) -> None:
        self.failed_checks += 1
        engine.failures += 1
        if isinstance(failure.__cause__, ConnectionRefusedError):  # no server is listening
            engine.failures = max(engine.failures, self.settings.health_failures)
        reason = f"health check failed: {failure}"
        enough = engine.failures >= self.settings.health_failures
        news = enough if engine.up else reason != engine.down_reason
        if news:
            self._take_down(engine, reason)
        if enough:
            for worker in engine.workers:
                self._on_silent(worker.id)

    def _take_down(self, engine: _Engine, reason: str) -> None:
        log.warning("%s is down: %s", engine.url, reason)
        for worker in engine.workers:
            self._apply(WorkerDown(worker.id, reason))
        engine.up = False
        engine.unknown.clear()  # a different engine may return
        engine.down_reason = reason
        engine.known.set()

    async def _rest(self, engine: _Engine) -> str | None:
        """Why a healthy engine takes no requests, None if it does."""
        for path, reason in _RESTS:
            if (checks := engine.unknown.pop(path, 0)) > 1:
                engine.unknown[path] = checks - 1
                continue
            try:
                if _says_so(await self._ask(engine.url, path), path[1:]):
                    return reason
            except UnknownPathError:
                engine.unknown[path] = _RARELY
            except UpstreamError:
                if engine.down_reason == reason and not engine.up:
                    return reason  # assume no change
        return None

    async def _learn_models(self, engine: _Engine) -> None:
        try:
            cards = _model_cards(await self._ask(engine.url, "/v1/models"))
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
        for worker in engine.workers:
            self._on_models(worker.id, cards)


def _model_cards(body: bytes) -> dict[str, Card] | str:
    try:
        cards = _decode_models(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)[:_LONGEST_REASON]
    if not all(isinstance(card.get("id"), str) for card in cards):
        return "it lists a model without an id"
    return {card["id"]: card for card in cards}


def _lasting(cards: Mapping[str, Card]) -> Mapping[str, Card]:
    return {
        model: {name: value for name, value in card.items() if name not in _FLEETING}
        for model, card in cards.items()
    }


def _says_so(body: bytes, what: str) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=dict[str, Any]).get(what))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
