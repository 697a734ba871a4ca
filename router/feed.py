"""One engine as its snapshots show it: running requests, their KV tokens, and what was missed.

Growth is implicit (a delta lists only what did not grow by one), so each part keeps the tick at
which it was last told and a delta costs what it lists, not what runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

import msgspec

from router.forecast import NO_CAP
from router.running import RunningTable, WorkerRows
from router.signals import Departure
from router.types import RunningRequest, Snapshot
from router.wire import request_token

_TOMBSTONES = 4096
# No message is so many others late: what seemed to be ahead of it was a mistake.
_MOST_LATE = 1 << 16


# By a request's token and its prompt's: the cap on its output, and its id if it has been given one.
Claim = Callable[[str, int], tuple[int, int | None]]


def _unclaimed(token: str, prompt_tokens: int) -> tuple[int, int | None]:
    return NO_CAP, None


class _Part(msgspec.Struct, gc=False):
    """One running engine request.

    ``generated_tokens`` are less the feed's ticks by then, ``from_tokens`` see ``Departure``.
    """

    number: int
    token: str | None
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    prefill_left: int
    from_tokens: int


class Feed:
    """State of one engine, kept up to date from its snapshots.

    Args:
        rows: where the look-ahead finds the running requests.
        claim: what is known here of a request that the engine shows.
        asked: tokens of requests of which it is to say what they hold in each step.

    Attributes:
        load_tokens: KV tokens of the running requests, prompts still in prefill counted whole.
        step_load_tokens: tokens resident in the step just reported, by requests that it ended too.
        step_running: requests that took part in that step.
        step_entered: requests that began to run in it.
        step_asked: KV tokens in it of those requests that are asked about.
        waiting_routed: of ``waiting``, those that may be this router's.
        kv_usage: fraction of the KV memory in use, of the fullest group of blocks.
        kv_tokens: tokens that fit into it, 0 where that is not told.
        admissible_tokens: KV tokens that it would let in if nobody waited there.
        admission: who decides on that; see ``Snapshot``.
        preemptions: requests that lost their KV since its first snapshot.
        known: it has had a full snapshot: deltas before that show a part of what runs.
        full_wanted: something was missed, a full snapshot puts it right.
        gaps: snapshots known to be lost.
        departures: requests that stopped running, with their tokens; whoever reads them clears it.
        changed: tokens whose running requests became more or fewer; likewise.
    """

    # With thirty attributes or more, instances without slots are slower to use.
    __slots__ = (
        "_asked",
        "_claim",
        "_forgotten",
        "_parts",
        "_preemptions_told",
        "_prefill_left",
        "_rows",
        "_running",
        "_tick",
        "admissible_tokens",
        "admission",
        "changed",
        "departures",
        "epoch",
        "full_wanted",
        "gaps",
        "known",
        "kv_tokens",
        "kv_usage",
        "load_tokens",
        "power_w",
        "preemptions",
        "received_s",
        "sequence",
        "slots",
        "step",
        "step_asked",
        "step_entered",
        "step_load_tokens",
        "step_running",
        "waiting",
        "waiting_routed",
    )

    def __init__(
        self,
        rows: WorkerRows | None = None,
        claim: Claim = _unclaimed,
        asked: Collection[str] = (),
    ) -> None:
        self.epoch = ""
        self.sequence = 0
        self.step = 0
        self.received_s = 0.0
        self.slots = 0
        self.waiting = self.waiting_routed = 0
        self.power_w: float | None = None
        self.load_tokens = 0
        self.step_load_tokens = 0
        self.step_running = 0
        self.step_entered = 0
        self.step_asked: Mapping[str, int] = {}
        self.kv_usage = 0.0
        self.kv_tokens = 0
        self.admissible_tokens: int | None = None
        self.admission: str | None = None
        self.preemptions = 0
        self._preemptions_told: int | None = None
        self.known = False
        self.full_wanted = True
        self.gaps = 0
        self.departures: list[tuple[str | None, Departure]] = []
        self.changed: set[str] = set()
        self._rows = rows or RunningTable().worker()
        self._claim = claim
        self._asked = asked
        self._tick = 0
        self._parts: dict[str, _Part] = {}
        self._running: dict[str, int] = {}
        self._prefill_left = 0
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    @property
    def resident_tokens(self) -> int:
        """KV tokens of the running requests as far as their prompts are computed."""
        return self.load_tokens - self._prefill_left

    @property
    def prefill_left(self) -> int:
        """Prompt tokens of the running requests that are still to be computed."""
        return self._prefill_left

    @property
    def running(self) -> int:
        """Engine requests that run, anybody's."""
        return len(self._parts)

    @property
    def running_by_token(self) -> Mapping[str, int]:
        """Engine requests that run, per request of this router."""
        return self._running

    def apply(self, snapshot: Snapshot, received_s: float) -> list[str] | None:
        """Take in a snapshot.

        Returns:
            Tokens of this router's engine requests that ended, one for each; None for a late or
            repeated snapshot, which changes nothing.
        """
        if snapshot.epoch != self.epoch or snapshot.sequence < self.sequence - _MOST_LATE:
            self._restart(snapshot.epoch)
        elif not self._is_news(snapshot):
            return None
        stepped = snapshot.kind == "delta" or snapshot.sequence > self.sequence
        self._note(snapshot, received_s)
        # Should a fault end it halfway, only a full snapshot would tell what is so.
        full_wanted, self.full_wanted = self.full_wanted, True
        self.step_entered = 0
        if stepped:
            self._grow()
        if snapshot.kind == "full":
            self._drop_all_but({*snapshot.finished, *(told.id for told in snapshot.running)})
        self._tell(snapshot)
        self.step_load_tokens = self.resident_tokens
        self.step_running = len(self._parts)
        if self._asked or self.step_asked:
            self.step_asked = self._held_by_asked()
        finished = dict.fromkeys(snapshot.finished)
        for engine_id in finished:
            self._leave(engine_id, completed=True)
        for engine_id in snapshot.preempted:
            self._leave(engine_id, completed=False)
        self.full_wanted = full_wanted
        return [token for i in finished if (token := request_token(i)) is not None]

    def forget(self, token: str) -> None:
        """A request's answer is complete: a late snapshot that still shows it is mistaken."""
        self._forgotten[token] = None
        if len(self._forgotten) > _TOMBSTONES:
            self._forgotten.popitem(last=False)
        if token in self._running:
            for engine_id in [i for i, part in self._parts.items() if part.token == token]:
                self._leave(engine_id, completed=True)

    def clear(self) -> None:
        """Nothing of it counts any more."""
        self._drop_all_but(set())

    def generated_by_token(self, token: str) -> int:
        """Output tokens that the running parts of a request have so far."""
        return sum(
            self._tick + part.generated_tokens
            for part in self._parts.values()
            if part.token == token
        )

    def _held_by_asked(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for part in self._parts.values():
            if (token := part.token) is not None and token in self._asked:
                tokens = part.prompt_tokens - part.prefill_left + self._tick + part.generated_tokens
                held[token] = held.get(token, 0) + tokens
        return held

    def _is_news(self, snapshot: Snapshot) -> bool:
        if snapshot.kind == "full":
            return snapshot.sequence >= self.sequence
        return snapshot.sequence > self.sequence

    def _restart(self, epoch: str) -> None:
        self._preemptions_told = 0 if self.epoch else None
        self.epoch = epoch
        self.sequence = 0
        self.known, self.full_wanted = False, True
        self._drop_all_but(set())

    def _note(self, snapshot: Snapshot, received_s: float) -> None:
        if snapshot.kind == "full":
            self.known, self.full_wanted = True, False
            sizes = (group.block_size * group.blocks_total for group in snapshot.kv_groups)
            self.kv_tokens = min(sizes, default=0)
        elif snapshot.sequence > self.sequence + 1 and not self.full_wanted:
            self.gaps += snapshot.sequence - self.sequence - 1
            self.full_wanted = True
        self.sequence = snapshot.sequence
        self.step = snapshot.step
        self.received_s = received_s
        self.slots = snapshot.slots
        self.waiting = snapshot.waiting
        routed = snapshot.waiting_routed  # of an older plug-in it may be all
        self.waiting_routed = self.waiting if routed is None else min(routed, self.waiting)
        self.power_w = snapshot.power_w
        self.admissible_tokens = snapshot.admissible_kv_tokens
        self.admission = snapshot.admission
        if snapshot.preemptions_total != self._preemptions_told:
            if self._preemptions_told is not None:
                self.preemptions += max(0, snapshot.preemptions_total - self._preemptions_told)
            self._preemptions_told = snapshot.preemptions_total
        self.kv_usage = 0.0
        for group in snapshot.kv_groups:
            if group.blocks_total:  # a model without attention has none
                self.kv_usage = max(self.kv_usage, min(1.0, group.blocks_used / group.blocks_total))

    def _grow(self) -> None:
        self._tick += 1
        self._rows.tick()
        self.load_tokens += len(self._parts)

    def _drop_all_but(self, engine_ids: set[str]) -> None:
        """What a full snapshot does not know any more has gone unseen."""
        for engine_id in self._parts.keys() - engine_ids:
            self._leave(engine_id, completed=False)

    def _tell(self, snapshot: Snapshot) -> None:
        stepped = snapshot.kind == "delta"
        for told in snapshot.running:
            before = self._drop(told.id) if told.id in self._parts else None
            token = request_token(told.id)
            if token is None or token not in self._forgotten:
                # Of one that is new in a step, the latest token is the step's.
                latest = int(stepped and not told.prefill_left)
                seen = told.generated_tokens - latest if before is None else before.from_tokens
                self._add(told, token, before, min(max(0, seen), told.generated_tokens))

    def _add(
        self, told: RunningRequest, token: str | None, before: _Part | None, from_tokens: int
    ) -> None:
        prompt, generated, prefill_left = (
            told.prompt_tokens,
            told.generated_tokens,
            told.prefill_left,
        )
        max_tokens, number = NO_CAP, None
        if before is not None:
            max_tokens, number = before.max_tokens, before.number
        elif token is not None:
            max_tokens, number = self._claim(token, prompt)
        number = self._rows.add(
            prompt, generated, prefill_left, max_tokens, told.end_probability, number, from_tokens
        )
        self._parts[told.id] = _Part(
            number, token, prompt, generated - self._tick, max_tokens, prefill_left, from_tokens
        )
        self.step_entered += before is None
        self.load_tokens += prompt + generated
        self._prefill_left += prefill_left
        if token is not None:
            self._running[token] = self._running.get(token, 0) + 1
            self.changed.add(token)

    def _leave(self, engine_id: str, *, completed: bool) -> None:
        part = self._drop(engine_id)
        if part is not None:
            generated = self._tick + part.generated_tokens
            known = part.number, part.prompt_tokens, generated, completed, part.max_tokens
            self.departures.append((part.token, Departure(*known, engine_id, part.from_tokens)))

    def _drop(self, engine_id: str) -> _Part | None:
        part = self._parts.pop(engine_id, None)
        if part is None:
            return None
        self._rows.remove(part.number)
        self.load_tokens -= part.prompt_tokens + self._tick + part.generated_tokens
        self._prefill_left -= part.prefill_left
        if part.token is not None:
            self._running[part.token] -= 1
            self.changed.add(part.token)
            if not self._running[part.token]:
                del self._running[part.token]
        return part
