"""MC-SF where running requests share the blocks of their prompts' beginnings."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patches.admission import make_admission, read_admission
from engine_patches.admission.ledger import Ledger, Memory, Ticket
from engine_patches.admission.protocol import ledger_of
from engine_patches.admission.theory.completions import Completions
from router.core.kv_blocks import KvBlocks
from router.core.types import KvGroup
from tests.support.admission import end_step

BLOCK = 16


def chain(*contents: object) -> Sequence[object]:
    """Hashes of blocks with these contents, each of all before it too."""
    return list(accumulate(contents, lambda before, one: hash((before, one)), initial=0))[1:]


def memory(tokens: int, used: int = 0, slots: int = 64, step_tokens: int = 0) -> Memory:
    kv = KvBlocks.plain(BLOCK)
    return Memory(tokens // BLOCK, used, slots, kv, step_tokens, step_tokens, BLOCK)


class Agents:
    """An engine that computes prompts in steps and finds their blocks where they are computed.

    Attributes:
        most_running: requests that ran at once.
        evicted: steps in which memory did not suffice.
    """

    def __init__(self, capacity_tokens: int, step_tokens: int) -> None:
        self.policy = make_admission(read_admission({"policy": "memory_checked", "ageing": 0}))
        self.ledger = ledger_of(self.policy)
        self.capacity, self.step_tokens = capacity_tokens, step_tokens
        self.outputs: dict[str, int] = {}
        self.most_running = self.evicted = 0

    def add(self, prefix: Sequence[object], prompt: int, output: int) -> None:
        id_ = str(len(self.outputs))
        self.outputs[id_] = output
        self.ledger.arrived(Ticket(id_, prompt, 10_000, output, prefix=prefix))

    def blocks(self) -> set[object]:
        """All that is held; blocks that are alike once, if they were found and not computed."""
        held: set[object] = set()
        for id_, one in self.ledger.running.items():
            found = one.cached_tokens // BLOCK
            size = -(-self.ledger.size_tokens(one) // BLOCK)
            held.update(one.prefix[:found])
            held.update((id_, at) for at in range(found, size))
        # The first of each family did not find its own.
        for id_, one in self.ledger.running.items():
            alike = [at for at in range(len(one.prefix)) if one.prefix[at] in held]
            held.difference_update((id_, at) for at in alike)
        return held

    def step(self) -> None:
        ledger, left = self.ledger, self.step_tokens
        room = memory(self.capacity, len(self.blocks()), 64 - len(ledger.running))
        computing = [one for one in ledger.running.values() if one.uncomputed_tokens]
        for one in computing:
            done = min(left, one.uncomputed_tokens)
            one.uncomputed_tokens -= done
            left -= done
        budget = Memory(
            room.capacity_blocks, room.used_blocks, room.slots_free, room.kv,
            self.step_tokens, left, BLOCK,
        )  # fmt: skip
        for ticket in self.policy.admit(ledger, budget, 0.0).admit or ():
            if not left:
                break
            computed: set[object] = set()
            for one in ledger.running.values():
                computed.update(one.prefix[: (one.prompt_tokens - one.uncomputed_tokens) // BLOCK])
            found = next(
                (at for at, id_ in enumerate(ticket.prefix) if id_ not in computed),
                len(ticket.prefix),
            )
            ledger.entered(ticket.id, cached_tokens=found * BLOCK)
            missing = ticket.prompt_tokens - found * BLOCK
            ticket.uncomputed_tokens = max(0, missing - left)
            left = max(0, left - missing)
        still = [id_ for id_, one in ledger.running.items() if one.uncomputed_tokens]
        self.most_running = max(self.most_running, len(ledger.running))
        self.evicted += len(self.blocks()) * BLOCK > self.capacity
        ledger.stepped(still)
        for id_, one in list(ledger.running.items()):
            if ledger.generated_tokens(one) >= self.outputs[id_]:
                ledger.left(id_)


def test_forty_agents_on_one_prompt_run_side_by_side() -> None:
    agents = Agents(120_000, 8192)
    prompt = chain(*range(20_000 // BLOCK))
    for _ in range(40):
        agents.add(prompt, 20_000 + 40, 200)
    while agents.ledger.waiting or agents.ledger.running:
        agents.step()
    assert agents.most_running >= 35
    assert agents.evicted == 0


def test_five_agents_with_prompts_of_their_own_fill_the_same_memory() -> None:
    agents = Agents(120_000, 8192)
    for number in range(40):
        agents.add(chain(number, *range(1, 20_000 // BLOCK)), 20_000 + 40, 200)
    while agents.ledger.waiting or agents.ledger.running:
        agents.step()
    assert agents.most_running == 5
    assert agents.evicted == 0


def running(completions: Completions, *tickets: Ticket) -> Ledger:
    ledger = Ledger(follower=completions)
    for ticket in tickets:
        ledger.arrived(ticket)
        ledger.entered(ticket.id, cached_tokens=ticket.cached_tokens)
    return ledger


def followed() -> Completions:
    completions = Completions()
    completions.fit(memory(10_000))
    return completions


def test_shared_blocks_count_until_the_last_to_end() -> None:
    completions, prefix = followed(), chain("a", "b")
    short = Ticket("short", 40, 9, prefix=prefix, cached_tokens=32)
    long = Ticket("long", 40, 57, prefix=prefix, cached_tokens=32)
    ledger = running(completions, short, long)
    assert completions.held_blocks(0) == 2 + 1 + 1
    # 48 tokens each as the short one ends; 96 as the long one does.
    assert completions.highest_blocks() == 6
    ledger.left("long")
    assert completions.held_blocks(0) == 3
    ledger.left("short")
    assert completions.held_blocks(0) == 0


def test_prompts_that_part_share_the_blocks_before() -> None:
    completions = followed()
    running(
        completions,
        Ticket("one", 70, 9, prefix=chain("a", "b", "c", "d"), cached_tokens=48),
        Ticket("other", 70, 9, prefix=chain("a", "b", "e", "f"), cached_tokens=48),
    )
    assert completions.held_blocks(0) == 5 + 3


def test_what_was_computed_twice_is_held_twice() -> None:
    completions, prefix = followed(), chain("a", "b")
    running(
        completions,
        Ticket("one", 40, 9, prefix=prefix),
        Ticket("at once", 40, 9, prefix=prefix),
    )
    assert completions.held_blocks(0) == 3 + 3


def test_of_a_prompt_that_was_being_computed_a_part_is_shared() -> None:
    completions, prefix = followed(), chain("a", "b")
    running(
        completions,
        Ticket("one", 40, 9, prefix=prefix),
        Ticket("half", 40, 9, prefix=prefix, cached_tokens=16),
    )
    assert completions.held_blocks(0) == 3 + 2


@pytest.mark.parametrize(("left", "blocks"), [(0, 3 + 1), (20, 3 + 2), (40, 3 + 3)])
def test_a_candidate_shares_what_is_computed(left: int, blocks: int) -> None:
    completions, prefix = followed(), chain("a", "b")
    runs = Ticket("runs", 40, 9, prefix=prefix)
    ledger = running(completions, runs)
    runs.uncomputed_tokens = left
    ledger.arrived(waits := Ticket("waits", 40, 9, prefix=prefix))
    assert not completions.refuses(waits, 40, 0)
    assert not completions.book(waits, 40, blocks - 1)
    assert completions.book(waits, 40, blocks)
    completions.settle()
    assert completions.highest_blocks() == 3


@pytest.mark.parametrize(("late", "blocks"), [(0, 3 + 1), (1, 3 + 3)])
def test_of_two_candidates_one_may_compute_for_the_other(late: int, blocks: int) -> None:
    completions, prefix = followed(), chain("a", "b")
    ledger = Ledger(follower=completions)
    one, other = (Ticket(id_, 40, 9 - late, prefix=prefix) for id_ in ("one", "other"))
    one.late_steps = late
    for ticket in (one, other):
        ledger.arrived(ticket)
        assert completions.book(ticket, 40, 100)
    assert completions.held_blocks(0) == blocks
    # One enters, and then it is known that nothing was found.
    ledger.entered("one")
    ledger.entered("other")
    completions.settle()
    assert completions.held_blocks(0) == 6


def test_the_last_token_is_always_computed() -> None:
    completions, prefix = followed(), chain("a", "b")
    ledger = running(completions, Ticket("first", 32, 9, prefix=prefix))
    ledger.arrived(waits := Ticket("same", 32, 9, prefix=prefix))
    assert not completions.book(waits, 32, 3 + 1)
    assert completions.book(waits, 32, 3 + 2)
    ledger.entered("same", cached_tokens=16)
    assert completions.held_blocks(0) == 2 + 1
    # It finds the first one's blocks, so the second block of the other is nobody else's.
    ledger.arrived(Ticket("longer", 40, 20, prefix=prefix))
    ledger.entered("longer", cached_tokens=32)
    assert completions.held_blocks(0) == 2 + 1 + 1


def test_another_memory_is_counted_anew() -> None:
    completions, prefix = followed(), chain("a", "b")
    running(completions, *(Ticket(n, 40, 9, prefix=prefix, cached_tokens=32) for n in "ab"))
    completions.fit(Memory(100, 0, 9, KvBlocks.plain(8), hashed_tokens=BLOCK))
    assert completions.held_blocks(0) == 5 + 1
    completions.fit(Memory(100, 0, 9, KvBlocks.plain(8)))
    assert completions.held_blocks(0) == 5 + 5


def test_prompts_that_have_gone_are_forgotten() -> None:
    completions = Completions()
    ledger = Ledger(follower=completions)
    completions.fit(memory(1600))
    for number in range(20):
        for id_ in (f"{number}", f"{number} again"):
            ledger.arrived(Ticket(id_, 40, 9, prefix=chain(number, "b")))
            ledger.entered(id_)
        completions.settle()
        ledger.left(f"{number}")
        completions.settle()
        assert len(completions._families) == len(completions._sources) == 1
        ledger.left(f"{number} again")
        completions.settle()
    assert not completions._families


def test_windows_need_room_for_the_prompt_as_it_enters() -> None:
    window = KvGroup(BLOCK, 0, 0, "sliding", 32, most_entering=20, most_held=3)
    kv = KvBlocks.of([KvGroup(BLOCK, 0, 0), window])
    policy = make_admission(read_admission({"policy": "memory_checked"}))
    ledger = ledger_of(policy)
    ledger.arrived(Ticket("runs", 16, 100, 90, priority=-1))
    ledger.entered("runs")
    ledger.arrived(Ticket("long", 320, 100, 10))
    for capacity, admitted in ((41, 0), (42, 1)):
        verdict = policy.admit(ledger, Memory(capacity, 2, 8, kv), 0.0)
        assert len(verdict.admit or ()) == admitted
    found = Memory(41, 2, 8, kv, found=lambda _: 1)
    assert len(policy.admit(ledger, found, 0.0).admit or ()) == 1


moves = st.lists(
    st.tuples(
        st.sampled_from(["run", "book", "enter", "step", "end", "resize", "settle"]),
        st.integers(0, 100),
        st.lists(st.sampled_from("ab"), max_size=4),
        st.integers(0, 20),
        st.integers(1, 30),
    ),
    max_size=40,
)


@given(moves)
def test_each_block_counts_once_at_every_end(
    moves: list[tuple[str, int, list[str], int, int]],
) -> None:
    completions = followed()
    ledger = Ledger(follower=completions)
    for move, which, contents, more, output in moves:
        ids = list(ledger.running)
        if move in ("run", "book"):
            prompt = len(contents) * BLOCK + more + 1
            ticket = Ticket(str(sum(ledger.arrivals.values())), prompt, output)
            ticket.prefix = chain(*contents)
            ledger.arrived(ticket)
            runs = move == "run"
            if runs or (completions.book(ticket, prompt - ledger.steps, 40) and which % 2):
                ledger.entered(ticket.id, cached_tokens=len(contents) * BLOCK)
        elif move == "step":
            ledger.stepped(still=ids[: which % 3])
        elif move == "end" and ids:
            ledger.left(ids[which % len(ids)])
        elif move == "resize" and ids:
            one = ledger.running[ids[which % len(ids)]]
            ledger.resized(one, ledger.size_tokens(one) + more)
        elif move == "settle":
            completions.settle()
    completions.settle()

    def held(step: int) -> int:
        alive = [one for one in ledger.running.values() if end_step(one) >= step]
        blocks = sum(-(-(one.offset_tokens + step) // BLOCK) for one in alive)
        prefixes = [one.prefix for one in alive]
        return blocks - sum(map(len, prefixes)) + len(set().union(*prefixes))

    ends = [end_step(one) for one in ledger.running.values()]
    assert completions.highest_blocks() == max(map(held, ends), default=0)
    last = [-(-ledger.size_tokens(one) // BLOCK) for one in ledger.running.values()]
    prefixes = [one.prefix for one in ledger.running.values()]
    shared = sum(map(len, prefixes)) - len(set().union(*prefixes))
    assert completions.held_blocks(ledger.steps) == sum(last) - shared
