"""State of one engine by its snapshots: running requests, KV tokens, and gaps.

A delta lists only what did not grow as the others did. What a request has generated is in its row
of the table, so a delta costs what it lists, not what runs.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from router.core.forecast.end_signals import Departure
from router.core.forecast.forecast import NO_CAP
from router.core.kv_blocks import KvBlocks
from router.core.state.running_table import RunningTable, WorkerRows
from router.core.step_time import Work
from router.core.types import RunningRequest, Snapshot
from router.core.wire import request_token

_TOMBSTONES = 4096
# No message is this many late: the sequence before it must have been wrong.
_MOST_LATE = 1 << 16


# From token and what is shown of a request to output cap, and look-ahead id if it has one.
Claim = Callable[[str, RunningRequest], tuple[int, int | None]]


# Before the first one.
_NOTHING = Snapshot("delta", "", "", 0, "", 0, 0, 0.0, 0.0)


class _Part(msgspec.Struct, gc=False):
    """One running engine request; ``from_tokens``: output at its first sight; see ``Departure``."""

    number: int
    place: int
    token: str | None
    prompt_tokens: int
    max_tokens: int
    prefill_left: int
    from_tokens: int


# With thirty attributes or more, instances without slots are slower.
@dataclass(slots=True, eq=False)
class Feed:
    """State of one engine, updated by its snapshots."""

    rows: WorkerRows = field(default_factory=lambda: RunningTable().worker())
    claim: Claim = lambda _token, _told: (NO_CAP, None)  # lookup of a shown request's cap and id
    asked: Collection[str] = ()  # tokens of requests whose share of each step is needed
    epoch: str = ""
    sequence: int = 0
    last: Snapshot = _NOTHING  # the last one that was not late
    received_s: float = 0.0
    full_s: float = 0.0  # when the last full snapshot was received
    slots: int = 0
    waiting: int = 0
    waiting_routed: int = 0  # part of ``waiting`` that may be this router's
    load_tokens: int = 0  # KV tokens of the running requests, with prompts in prefill counted whole
    step_load_tokens: int = 0  # tokens resident in the last step, including requests that it ended
    step_running: int = 0
    step_entered: int = 0  # requests that began in it
    step_asked: Mapping[str, Work] = field(default_factory=dict)  # work in it by metered request
    # Prompt tokens computed in it, each times the tokens before it.
    step_prompt_context: float = 0.0
    step_grown: int = 0  # output tokens that it gave to requests in decode
    step_decoding: int = 0  # number of these requests; 0 if unknown
    step_firsts: int = 0  # requests that it gave their first token; 0 if unknown
    kv_usage: float = 0.0  # fraction in use, of the fullest group of blocks
    kv_tokens: int = 0  # longest request that the whole KV memory holds; 0 if unknown
    kv: KvBlocks | None = None  # blocks that requests take there; None until ``known``
    preemptions: int = 0
    prefill_left: int = 0
    computing: int = 0  # running requests whose prompts are not computed yet
    chunk_tokens: int = 0  # most prompt tokens of a step that left some; 0: none has
    windows: tuple[int, ...] = ()  # of its KV groups, without Mamba's; 0: all tokens
    known: bool = False  # true after a full snapshot; deltas alone show only a part
    full_wanted: bool = True  # true if only a full snapshot can repair a gap
    gaps: int = 0
    # Requests that stopped running; the reader clears it.
    departures: list[tuple[str | None, Departure]] = field(default_factory=list)
    # Tokens whose number of running requests changed; the reader clears it.
    changed: set[str] = field(default_factory=set)
    running_by_token: dict[str, int] = field(default_factory=dict)
    _preemptions_told: int | None = None
    _misplaced: bool = False
    _parts: dict[str, _Part] = field(default_factory=dict)
    # Places of forgotten requests that still run.
    _uncounted: dict[str, int] = field(default_factory=dict)
    # In the last step: request, its prompt tokens computed, and the position where they end.
    _computed: list[tuple[str | None, float, int]] = field(default_factory=list)
    _forgotten: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def resident_tokens(self) -> int:
        """KV tokens of the running requests, without prompt tokens still to be computed."""
        return self.load_tokens - self.prefill_left

    @property
    def running(self) -> int:
        return len(self._parts)

    def steps_at(self, now_s: float | None) -> float:
        """Steps that have ended, and how much of the next one is over if it is as long."""
        begun_s = 0.0 if now_s is None else now_s - self.received_s
        step, step_s = self.last.step, self.last.step_s
        return step + (min(1.0, begun_s / step_s) if step_s else 0.0)

    def apply(self, snapshot: Snapshot, received_s: float) -> list[str] | None:
        """Tokens of routers' ended requests; None: the snapshot is late, and has no effect."""
        if snapshot.kind == "full":  # also one that later deltas have overtaken
            self.full_s = received_s
        if snapshot.epoch != self.epoch or snapshot.sequence < self.sequence - _MOST_LATE:
            self._restart(snapshot.epoch)
        elif snapshot.sequence < self.sequence + (snapshot.kind != "full"):
            return None
        stepped = snapshot.kind != "full" or snapshot.sequence > self.sequence
        self._note(snapshot, received_s)
        # If an exception interrupts this, only a full snapshot restores the state.
        full_wanted, self.full_wanted = self.full_wanted, True
        self.step_entered = self.step_grown = self.step_decoding = self.step_firsts = 0
        self._misplaced = False
        self._computed.clear()
        if stepped:
            self._grow(snapshot)
        if snapshot.kind == "full":
            self._drop_all_but({*snapshot.finished, *(told.id for told in snapshot.running)})
        self._tell(snapshot)
        if full_wanted or snapshot.kind == "full":
            # Requests were not known just before; their whole past would count as of this step.
            self.step_grown = self.step_decoding = self.step_firsts = 0
            self._computed.clear()
        self.step_load_tokens = self.resident_tokens
        self.step_running = len(self._parts)
        if self._computed or self.step_prompt_context:
            # Prompts that came computed are not among the scheduled tokens.
            told = sum(tokens for _, tokens, _ in self._computed)
            part = min(1.0, snapshot.scheduled_prefill_tokens / told) if told else 0.0
            self._computed = [(token, part * n, end) for token, n, end in self._computed]
            self.step_prompt_context = sum(n * (end - n / 2) for _, n, end in self._computed)
        if self.asked or self.step_asked:
            self.step_asked = self._work_of_asked()
        ended = self._end(snapshot)
        self.full_wanted = full_wanted or self._misplaced
        return ended

    def forget(self, token: str) -> None:
        """Forget a request whose answer is complete; later snapshots that show it are late."""
        self._forgotten[token] = None
        if len(self._forgotten) > _TOMBSTONES:
            self._forgotten.popitem(last=False)
        if token in self.running_by_token:
            for engine_id in [i for i, part in self._parts.items() if part.token == token]:
                place = self._parts[engine_id].place
                self._leave(engine_id, completed=True)
                self._uncount(engine_id, place)

    def clear(self) -> None:
        self._drop_all_but(set())

    def generated_by_token(self, token: str) -> int:
        parts = self._parts.values()
        return sum(self.rows.generated_tokens(p.place) for p in parts if p.token == token)

    def _work_of_asked(self) -> dict[str, Work]:
        work: dict[str, Work] = {}
        held_tokens = self.rows.resident_tokens()
        for part in self._parts.values():
            if (token := part.token) is not None and token in self.asked:
                held, requests, _ = work.get(token, Work())
                work[token] = Work(held + held_tokens[part.place], requests + 1)
        for token, prompt_tokens, _ in self._computed:
            if token in work:
                held, requests, computed = work[token]
                work[token] = Work(held, requests, computed + prompt_tokens)
        return work

    def _restart(self, epoch: str) -> None:
        self._preemptions_told = 0 if self.epoch else None
        self.epoch = epoch
        self.sequence = 0
        self.known, self.full_wanted = False, True
        self.chunk_tokens = 0
        self._drop_all_but(set())

    def _note(self, snapshot: Snapshot, received_s: float) -> None:
        if snapshot.kind == "full":
            self.known, self.full_wanted = True, False
            groups = [group for group in snapshot.kv_groups if group.kind != "mamba"]
            self.windows = tuple(group.window for group in groups)
            # Constant while the engine runs; all groups share one pool.
            self.kv = KvBlocks.of(snapshot.kv_groups)
            total = min((group.blocks_total for group in snapshot.kv_groups), default=0)
            self.kv_tokens = self.kv.tokens(total)
        elif snapshot.sequence > self.sequence + 1 and not self.full_wanted:
            self.gaps += snapshot.sequence - self.sequence - 1
            self.full_wanted = True
        self.sequence = snapshot.sequence
        self.last, self.received_s = snapshot, received_s
        self.slots = 0 if "slots" in snapshot.unreported else snapshot.slots  # 0: unknown
        self.waiting = snapshot.waiting
        routed = snapshot.waiting_routed  # an older plug-in does not tell; it may be all
        self.waiting_routed = self.waiting if routed is None else min(routed, self.waiting)
        if snapshot.preemptions_total != self._preemptions_told:
            if self._preemptions_told is not None:
                self.preemptions += max(0, snapshot.preemptions_total - self._preemptions_told)
            self._preemptions_told = snapshot.preemptions_total
        self.kv_usage = 0.0
        for group in snapshot.kv_groups:
            if group.blocks_total:  # a model without attention has none
                self.kv_usage = max(self.kv_usage, min(1.0, group.blocks_used / group.blocks_total))

    def _drop_all_but(self, engine_ids: set[str]) -> None:
        """Drop requests that a full snapshot lacks: their end was missed."""
        for engine_id in [*(i for i in self._parts if i not in engine_ids), *self._uncounted]:
            self._leave(engine_id, completed=False)

    def _grow(self, snapshot: Snapshot) -> None:
        """Let each request grow; those that are listed are corrected later."""
        if snapshot.kind == "growth":
            self.step_grown, self.step_decoding, alike = self.rows.grow(snapshot.growths)
            self._misplaced = not alike
        else:
            self.rows.tick()
            self.step_grown = self.step_decoding = len(self._parts)
        self.load_tokens += self.step_grown

    def _tell(self, snapshot: Snapshot) -> None:
        listed = {told.id: told for told in snapshot.running}
        # A full snapshot may list other places: all are free before the first is taken.
        known = {i: self._taken_off(told) for i, told in listed.items()}
        stepped = snapshot.kind != "full"
        for engine_id, told in listed.items():
            before = known[engine_id]
            token = request_token(engine_id)
            place = self._free_place(told)
            if token is not None and token in self._forgotten:
                self._uncount(engine_id, place)
            else:
                # For a request new in a step, the latest token is the step's own.
                latest = int(stepped and not told.prefill_left)
                seen = told.generated_tokens - latest if before is None else before.from_tokens
                from_tokens = min(max(0, seen), told.generated_tokens)
                self._add(told, token, before, place, from_tokens)
        if self.prefill_left:
            self.chunk_tokens = max(self.chunk_tokens, snapshot.scheduled_prefill_tokens)

    def _taken_off(self, told: RunningRequest) -> _Part | None:
        """The request's part before the message, removed to be listed anew."""
        if told.id not in self._parts:
            self._leave(told.id, completed=False)  # if it is not counted
            return None
        part, generated = self._drop(told.id)
        if part.prefill_left or told.prefill_left:
            self.step_decoding -= 1
            self.step_grown -= 1
        else:
            self.step_grown += told.generated_tokens - generated
        return part

    def _free_place(self, told: RunningRequest) -> int:
        """The request's place; another one still there must have left it unnoticed."""
        place = self.rows.free_place(told.place)
        if self.rows.taken(place):
            self._misplaced = True
            holders = {part.place: i for i, part in self._parts.items()}
            holders |= {at: i for i, at in self._uncounted.items()}
            self._leave(holders[place], completed=False)
        return place

    def _uncount(self, engine_id: str, place: int) -> None:
        self.rows.uncount(place)
        self._uncounted[engine_id] = place

    def _add(
        self,
        told: RunningRequest,
        token: str | None,
        before: _Part | None,
        place: int,
        from_tokens: int,
    ) -> None:
        prompt, generated = told.prompt_tokens, told.generated_tokens
        prefill_left = told.prefill_left
        max_tokens, number = NO_CAP, None
        if before is not None:
            max_tokens, number = before.max_tokens, before.number
        elif token is not None:
            max_tokens, number = self.claim(token, told)
        known = prompt, generated, prefill_left, max_tokens
        number = self.rows.add(*known, told.end_probability, number, from_tokens, place)
        self._parts[told.id] = _Part(
            number, place, token, prompt, max_tokens, prefill_left, from_tokens
        )
        left = prompt - told.cached_tokens if before is None else before.prefill_left
        if left > prefill_left:
            self._computed.append((token, left - prefill_left, prompt - prefill_left))
        self.step_entered += before is None
        if generated and not prefill_left:
            self.step_firsts += before is None or before.prefill_left > 0
        self.load_tokens += prompt + generated
        self.prefill_left += prefill_left
        self.computing += prefill_left > 0
        if token is not None:
            self.running_by_token[token] = self.running_by_token.get(token, 0) + 1
            self.changed.add(token)

    def _end(self, snapshot: Snapshot) -> list[str]:
        ended = []
        for engine_id in dict.fromkeys(snapshot.finished):
            part = self._parts.get(engine_id)
            token = request_token(engine_id) if part is None else part.token
            if token is not None:
                ended.append(token)
            self._leave(engine_id, completed=True)
        for engine_id in snapshot.preempted:
            self._leave(engine_id, completed=False)
        return ended

    def _leave(self, engine_id: str, *, completed: bool) -> None:
        if engine_id in self._uncounted:
            self.rows.remove(self._uncounted.pop(engine_id))
        elif engine_id in self._parts:
            part, generated = self._drop(engine_id)
            known = part.number, part.prompt_tokens, generated, completed, part.max_tokens
            self.departures.append((part.token, Departure(*known, engine_id, part.from_tokens)))

    def _drop(self, engine_id: str) -> tuple[_Part, int]:
        part = self._parts.pop(engine_id)
        generated = self.rows.generated_tokens(part.place)
        self.rows.remove(part.place)
        self.load_tokens -= part.prompt_tokens + generated
        self.prefill_left -= part.prefill_left
        self.computing -= part.prefill_left > 0
        if part.token is not None:
            self.running_by_token[part.token] -= 1
            self.changed.add(part.token)
            if not self.running_by_token[part.token]:
                del self.running_by_token[part.token]
        return part, generated
