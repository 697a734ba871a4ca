"""What holds for every admission policy, and for MC-SF's check of the memory."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches.admission import ADMISSIONS, make_admission, read_admission
from engine_patches.admission.ledger import Ledger, Memory, Ticket
from engine_patches.admission.protocol import Admission, ledger_of
from engine_patches.admission.theory.completions import Completions
from tests.support.admission import STEP_S, VARIANTS, Job, Small, end_step, memory_of

CAPACITY = 60

jobs = st.builds(
    Job,
    prompt_tokens=st.integers(1, 30),
    output_tokens=st.integers(1, 20),
    step=st.integers(0, 30),
    hint_tokens=st.none() | st.integers(1, 20),
    cap_tokens=st.integers(20, 30),
    kind=st.integers(0, 2),
    priority=st.integers(0, 1),
)
traces = st.lists(jobs, max_size=18)
blocks = st.sampled_from([1, 4, 10])


def make(variant: str) -> Admission:
    return make_admission(read_admission(VARIANTS[variant]))


def knowing(trace: Sequence[Job]) -> list[Job]:
    """The same, each with its true length for a hint."""
    return [replace(job, hint_tokens=job.output_tokens) for job in trace]


def test_every_policy_is_under_the_laws() -> None:
    assert {str(one["policy"]) for one in VARIANTS.values()} == set(ADMISSIONS)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=40)
@given(trace=traces, block=blocks, slots=st.integers(1, 8), entries=st.integers(1, 3))
def test_every_request_ends_and_no_engine_idles(
    variant: str, trace: list[Job], block: int, slots: int, entries: int
) -> None:
    engine = Small(make(variant), CAPACITY, slots, block, entries)

    engine.run(trace)

    assert set(engine.ended) == {str(number) for number in range(len(trace))}
    assert engine.fullest <= CAPACITY
    assert len(engine.entries) == len(trace) + len(engine.preempted)


class Asked(Small):
    """Is asked what would be let in, before and after each decision."""

    def _begin(self) -> bool:
        self.policy.admissible_blocks(self.ledger, self.memory())
        runs = super()._begin()
        room = self.policy.admissible_blocks(self.ledger, self.memory())
        assert 0 <= room * self.block <= max(0, self.capacity - self.used_tokens())
        return runs


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20)
@given(trace=traces, block=st.sampled_from([1, 4]), entries=st.integers(1, 3))
def test_whether_anybody_asks_changes_nothing(
    variant: str, trace: list[Job], block: int, entries: int
) -> None:
    told, asked = (kind(make(variant), CAPACITY, 8, block, entries) for kind in (Small, Asked))
    for engine in (told, asked):
        engine.run(trace)

    assert asked.entries == told.entries
    assert asked.ended == told.ended


@given(trace=traces, block=blocks, margin=st.sampled_from([0.0, 0.2]), ageing=st.floats(0, 5))
def test_nobody_is_evicted_where_lengths_are_known(
    trace: list[Job], block: int, margin: float, ageing: float
) -> None:
    chosen = {"policy": "memory_checked", "margin": margin, "ageing": ageing}
    engine = Small(make_admission(read_admission(chosen)), CAPACITY, 8, block, 2)

    engine.run(knowing(trace))

    assert engine.preempted == []


class Fair(Small):
    """Notes whom a request overtakes."""

    ageing = 1.0

    def check_entry(self, ticket: Ticket) -> None:
        for other in self.ledger.waiting:
            if other.priority <= ticket.priority:
                waited_more_s = ticket.arrived_s - other.arrived_s
                assert waited_more_s * self.ageing <= other.predicted_tokens


@given(trace=traces, ageing=st.floats(0.5, 50))
def test_ageing_bounds_by_how_much_later_ones_overtake(trace: list[Job], ageing: float) -> None:
    chosen = {"policy": "memory_checked", "ageing": ageing}
    engine = Fair(make_admission(read_admission(chosen)), CAPACITY)
    engine.ageing = ageing

    engine.run(knowing(trace))

    assert len(engine.ended) == len(trace)


def decided(
    variant: str, running: list[Ticket], waiting: list[Ticket], order: random.Random
) -> set[str] | None:
    """Who is let in, where all have been told of in some order."""
    policy = make(variant)
    ledger = ledger_of(policy)
    for group in (running, waiting):
        order.shuffle(group)
        for ticket in group:
            ledger.arrived(replace(ticket))
    order.shuffle(running)
    for ticket in running:
        ledger.entered(ticket.id)
    used = sum(ticket.prompt_tokens for ticket in running)
    admit = policy.admit(ledger, Memory(200, used, 8), 3.0).admit
    return None if admit is None else {ticket.id for ticket in admit}


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=20)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=2, max_size=16),
    runs=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_the_order_in_which_it_is_told_does_not_matter(
    variant: str, sizes: list[tuple[int, int]], runs: int, seed: int
) -> None:
    tickets = [
        Ticket(str(number), prompt, 100, output, kind=number % 2, priority=number)
        for number, (prompt, output) in enumerate(sizes)
    ]
    running, waiting = tickets[:runs], tickets[runs:]

    told = decided(variant, running.copy(), waiting.copy(), random.Random(0))

    assert decided(variant, running.copy(), waiting.copy(), random.Random(seed)) == told


def as_printed(ledger: Ledger, memory: Memory) -> list[str]:
    """Algorithm 2 of arXiv 2502.07115, checked at every step to come, not only at ends."""

    def held(ticket: Ticket, entered: bool, ahead: int) -> int:
        now = ledger.size_tokens(ticket) if entered else ticket.entry_tokens
        last = min(ticket.prompt_tokens + ticket.predicted_tokens - 1, memory.capacity_tokens)
        return memory.kv.held(now + ahead) if now + ahead <= last else 0

    admitted: list[Ticket] = []
    for ticket in ledger.waiting[: memory.slots_free]:
        chosen = [(one, True) for one in ledger.running.values()]
        chosen += [(one, False) for one in (*admitted, ticket)]
        for ahead in range(70):
            if sum(held(one, entered, ahead) for one, entered in chosen) > memory.capacity_blocks:
                return [one.id for one in admitted]
        admitted.append(ticket)
    return [one.id for one in admitted]


class Printed(Small):
    """Compares each decision with the algorithm as the paper prints it."""

    def _begin(self) -> bool:
        if self.used_tokens() <= self.capacity:
            expected = as_printed(self.ledger, self.memory())
            admit = self.policy.admit(self.ledger, self.memory(), self.now_s).admit
            assert admit is not None
            if expected or self.ledger.running:
                assert [ticket.id for ticket in admit] == expected
        return super()._begin()


@given(trace=traces, block=st.sampled_from([1, 4, 5]), slots=st.integers(1, 8))
def test_memory_checked_decides_as_the_algorithm_printed(
    trace: list[Job], block: int, slots: int
) -> None:
    engine = Printed(make("memory_checked"), CAPACITY, slots, block, 3)

    engine.run(knowing(trace))

    assert len(engine.ended) == len(trace)


class Follow:
    """A ledger, what follows it, and what may happen to it."""

    def __init__(self, block: int) -> None:
        self.completions = Completions()
        self.completions.fit(memory_of(1000, 0, 8, block))
        self.ledger = Ledger(follower=self.completions)
        self.born = 0

    def arrive(self, prompt: int, output: int) -> Ticket:
        self.born += 1
        ticket = Ticket(str(self.born), prompt, output)
        self.ledger.arrived(ticket)
        return ticket

    def run(self, which: int, prompt: int, output: int) -> None:
        self.ledger.entered(self.arrive(prompt, output).id)

    def book(self, which: int, prompt: int, output: int) -> None:
        ticket = self.arrive(prompt, output)
        offset = prompt - self.ledger.steps
        refused = self.completions.refuses(ticket, offset, 60)
        booked = self.completions.book(ticket, offset, 60)
        assert not (refused and booked)
        if booked and which % 2:
            self.ledger.entered(ticket.id)

    def settle(self, which: int, prompt: int, output: int) -> None:
        self.completions.settle()

    def step(self, which: int, prompt: int, output: int) -> None:
        ids = list(self.ledger.running)
        self.ledger.stepped(still=ids[: which % 3])

    def end(self, which: int, prompt: int, output: int) -> None:
        ids = list(self.ledger.running)
        if ids:
            self.ledger.left(ids[which % len(ids)])


moves = st.lists(
    st.tuples(
        st.sampled_from([Follow.run, Follow.book, Follow.settle, Follow.step, Follow.end]),
        st.integers(0, 100),
        st.integers(1, 30),
        st.integers(1, 30),
    ),
    max_size=60,
)


@given(moves, st.sampled_from([1, 4, 7]))
def test_blocks_at_the_ends_are_those_of_a_fresh_count(
    moves: list[tuple[Callable[[Follow, int, int, int], None], int, int, int]], block: int
) -> None:
    follow = Follow(block)
    for move, *numbers in moves:
        move(follow, *numbers)
    follow.completions.settle()

    running = follow.ledger.running.values()
    held = [
        sum(-(-(one.offset_tokens + end) // block) for one in running if end_step(one) >= end)
        for end in (end_step(ticket) for ticket in running)
    ]
    assert follow.completions.highest_blocks() == max(held, default=0)
    now = [-(-follow.ledger.size_tokens(one) // block) for one in running]
    assert follow.completions.held_blocks(follow.ledger.steps) == sum(now)


@given(trace=traces)
def test_a_held_request_enters_in_time(trace: list[Job]) -> None:
    chosen = {"policy": "wait", "thresholds": [1000], "hold_s": 0.5}
    engine = Small(make_admission(read_admission(chosen)), 10_000, slots=100)

    engine.run(trace)

    for id_, ended_s in engine.ended.items():
        job = engine.jobs[id_]
        served_s = ended_s - (job.step + job.output_tokens) * STEP_S
        assert served_s <= 0.5 + 1.001 * STEP_S
