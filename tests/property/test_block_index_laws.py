"""The index of blocks beside a set for each worker, and tenants with salts of their own."""

from array import array
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.prefix.block_index import BlockIndex
from router.core.prefix.ids import block_ids, chain, seed

# Some share a bucket for as long as the table grows in a test; some only at first.
NUMBERS = st.integers(1, 400)
IDS = st.one_of(NUMBERS, NUMBERS.map(lambda n: n << 40 | 5), NUMBERS.map(lambda n: n << 7 | 3))
SOME = st.lists(IDS, min_size=1, max_size=40)
CHAINS = 4
LENGTH = 1000


def packed(ids: Sequence[int]) -> bytes:
    return array("Q", ids).tobytes()


def long_chain(number: int) -> list[int]:
    """Far more ids than are looked up one by one."""
    return [(number + 1) * 1_000_003 * (at + 7) for at in range(LENGTH)]


class Index(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(1 << 14)
        self.sets: dict[int, set[int]] = {}

    def worker(self, choice: int) -> int:
        return sorted(self.sets)[choice % len(self.sets)]

    @rule(count=st.sampled_from([1, 2, 70]))
    def join(self, count: int) -> None:
        for _ in range(count if len(self.sets) < 150 else 0):
            number = self.index.join()
            assert number == min(set(range(len(self.sets) + 1)) - self.sets.keys())
            self.sets[number] = set()

    @precondition(lambda self: self.sets)
    @rule(choice=st.integers(0, 200), ids=SOME)
    def store(self, choice: int, ids: list[int]) -> None:
        worker = self.worker(choice)
        self.index.store(worker, packed(ids))
        self.sets[worker].update(ids)

    @precondition(lambda self: self.sets)
    @rule(choice=st.integers(0, 200), ids=SOME)
    def remove(self, choice: int, ids: list[int]) -> None:
        worker = self.worker(choice)
        self.index.remove(worker, packed(ids))
        self.sets[worker].difference_update(ids)

    @precondition(lambda self: self.sets)
    @rule(
        choice=st.integers(0, 200),
        number=st.integers(0, CHAINS - 1),
        start=st.integers(0, LENGTH),
        size=st.sampled_from([1, 16, 130, LENGTH]),
        evict=st.booleans(),
    )
    def turn(self, choice: int, number: int, start: int, size: int, *, evict: bool) -> None:
        """Part of a long chain comes or goes."""
        ids = long_chain(number)[start : start + size]
        (self.remove if evict else self.store)(choice, ids)

    @precondition(lambda self: self.sets)
    @rule(choice=st.integers(0, 200), others=st.lists(IDS, max_size=3))
    def clear(self, choice: int, others: list[int]) -> None:
        worker = self.worker(choice)
        self.index.clear(worker)
        self.index.store(worker, packed(others))
        self.sets[worker] = set(others)

    @precondition(lambda self: self.sets)
    @rule(choice=st.integers(0, 200))
    def leave(self, choice: int) -> None:
        worker = self.worker(choice)
        self.index.leave(worker)
        del self.sets[worker]

    @rule(ids=SOME)
    def look(self, ids: list[int]) -> None:
        self.check(ids)

    @invariant()
    def it_is_exact(self) -> None:
        for number in range(CHAINS):
            self.check(long_chain(number))
        assert len(self.index) == len(set().union(*self.sets.values()))
        assert {w: self.index.held(w) for w in self.sets} == {
            w: len(ids) for w, ids in self.sets.items()
        }
        assert not self.index.dropped

    def check(self, ids: list[int]) -> None:
        expected = [0] * self.index.width
        for worker, held in self.sets.items():
            lacked = (at for at, one in enumerate(ids) if one not in held)
            expected[worker] = next(lacked, len(ids))
        assert self.index.leading(packed(ids)).tolist() == expected


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(tokens=st.lists(st.integers(0, 9), min_size=16, max_size=80), salts=st.sets(st.text()))
def test_the_caches_of_different_salts_share_nothing(tokens: list[int], salts: set[str]) -> None:
    index = BlockIndex(1000)
    tenants = {salt: chain(tokens, seed(salt=salt)) for salt in sorted(salts)}
    numbers = {salt: index.join() for salt in tenants}
    for salt, worker in numbers.items():
        index.store(worker, tenants[salt])
    for salt, pieces in tenants.items():
        counts = index.leading(pieces)
        assert counts[numbers[salt]] == len(tokens) // 16
        assert counts.sum() == len(tokens) // 16


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    names=st.tuples(st.text(), st.text(), st.text(), st.text()),
)
def test_adapter_and_salt_are_told_apart(
    tokens: list[int], names: tuple[str, str, str, str]
) -> None:
    one, other = names[:2], names[2:]
    first, second = chain(tokens, seed(*one)), chain(tokens, seed(*other))
    if one == other or len(tokens) < 16:
        assert first == second
    else:
        assert not set(array("Q", first)) & set(array("Q", second))


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=400),
    common=st.integers(0, 400),
    pieces=st.integers(1, 4),
)
def test_an_id_stands_for_all_that_precedes_it(tokens: list[int], common: int, pieces: int) -> None:
    other = [*tokens[:common], *(token + 4 for token in tokens[common:])]
    size = 16 * pieces
    one, two = (
        array("Q", block_ids(chain(each, seed()), size)).tolist() for each in (tokens, other)
    )
    assert len(one) == len(tokens) // size
    shared = min(common, len(tokens)) // size
    assert one[:shared] == two[:shared]
    assert not set(one[shared:]) & set(two)
