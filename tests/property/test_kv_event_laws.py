"""KV events foretell what the engine that sends them has cached."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.core.prefix.ids import block_ids, chain, seed
from router.core.prefix.kv_events import KvEvent, KvEventStream
from router.core.prefix.prefixes import Prefixes
from router.core.types import Content, Request
from tests.support.core import token

SIZE = 16
# Prompts 0 and 1 share two blocks, as do 2 and 3.
PROMPTS = [[k // 2] * 2 * SIZE + [k] * 4 * SIZE for k in range(4)]
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from(["store", "evict", "clear"])),
    max_size=40,
)


def ids(k: int) -> list[bytes]:
    packed = block_ids(chain(PROMPTS[k], seed()), SIZE)
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


class Engine:
    """A cache that evicts a prompt's last block first, and tells it as vLLM does."""

    def __init__(self, *, ints: bool) -> None:
        self.held = Counter[bytes]()
        self.ints = ints

    def name(self, id_: bytes) -> int | bytes:
        return int.from_bytes(id_, "big") if self.ints else id_ * 4

    def leading(self, k: int) -> int:
        own = ids(k)
        return next((n for n, one in enumerate(own) if not self.held[one]), len(own))

    def act(self, k: int, blocks: int, what: str) -> list[KvEvent]:
        if what == "store":
            return self.store(k, blocks)
        if what == "evict":
            return self.evict(k)
        self.held.clear()
        return [KvEvent("AllBlocksCleared")]

    def store(self, k: int, blocks: int) -> list[KvEvent]:
        # Of some blocks there is a second copy.
        first = max(0, min(self.leading(k), blocks) - blocks % 2)
        own = ids(k)
        self.held.update(own[first:blocks])
        event = KvEvent(
            "BlockStored",
            block_hashes=[self.name(one) for one in own[first:blocks]],
            parent_block_hash=self.name(own[first - 1]) if first else None,
            token_ids=PROMPTS[k][first * SIZE : blocks * SIZE],
            block_size=SIZE,
        )
        return [event] if first < blocks else []

    def evict(self, k: int) -> list[KvEvent]:
        last = next((one for one in reversed(ids(k)) if self.held[one]), None)
        if last is None:
            return []
        self.held[last] -= 1
        return [KvEvent("BlockRemoved", block_hashes=[self.name(last)])]


@given(STEPS, st.booleans(), st.sets(st.integers(0, 39)))
def test_hits_are_those_of_the_engine(
    steps: list[tuple[int, int, str]], ints: bool, lost: set[int]
) -> None:
    """After each message that arrives; lost ones are repeated then."""
    engine, stream, prefixes = Engine(ints=ints), KvEventStream(repeats=True), Prefixes(1000)
    sent: list[list[KvEvent]] = []
    for number, step in enumerate(steps):
        sent.append(engine.act(*step))
        if number in lost:
            continue
        told = [*stream.published(number, sent[-1])]
        if stream.missing is not None:
            for again in range(stream.missing, number + 1):
                told += stream.repeated(again, sent[again])
            told += stream.complete()
        for one in told:
            prefixes.heard("a", one, 0.0)
        for k, prompt in enumerate(PROMPTS):
            content = Content(pieces=chain(prompt, seed()))
            request = Request(token(k), "g", len(prompt) + 1, content=content)
            prefixes.forget(request.id)
            found = prefixes.hits(request, ("a",))[0]
            assert found == SIZE * engine.leading(k) or not (prefixes.told or found)
