"""What is kept for waiting requests is what a fresh look finds, if engines evict as they do."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.core.prefix.ids import block_ids, chain, seed
from router.core.prefix.prefixes import Prefixes
from router.core.types import Content, Request
from tests.support.core import snapshot, token

WORKERS = ("a", "b", "c")
SIZES = {"a": 16, "b": 16, "c": 32}
# A prompt is a path in a tree: conversations that share their beginnings.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


class Engine:
    """A cache that holds whole prefixes, and evicts leaves."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.chains: list[list[bytes]] = []

    def ids(self, pieces: bytes) -> list[bytes]:
        ids = block_ids(pieces, self.size)
        return [ids[at : at + 8] for at in range(0, len(ids), 8)]

    @property
    def held(self) -> set[bytes]:
        return {one for ids in self.chains for one in ids}

    def hits(self, request: Request) -> int:
        assert request.content is not None
        held, blocks = self.held, 0
        for one in self.ids(request.content.pieces)[: (request.prompt_tokens - 1) // self.size]:
            if one not in held:
                break
            blocks += 1
        return blocks * self.size


def pieces_of(path: list[int]) -> bytes:
    return chain([choice for choice in path for _ in range(48)], seed())


@settings(deadline=None)
@given(data=st.data())
def test_kept_answers_are_fresh_ones(data: st.DataObject) -> None:
    prefixes = Prefixes(10_000)
    engines = {worker: Engine(size) for worker, size in SIZES.items()}
    waiting: dict[str, Request] = {}
    for sequence, worker in enumerate(WORKERS):
        full = structs.replace(snapshot("full", sequence), cache_block=SIZES[worker])
        prefixes.heard(worker, full, 1.0)
    for number in range(data.draw(st.integers(1, 30))):
        worker = data.draw(st.sampled_from(WORKERS))
        engine = engines[worker]
        before = engine.held
        match data.draw(st.sampled_from(("compute", "evict", "wait", "leave", "restart"))):
            case "compute":
                ids = engine.ids(pieces_of(data.draw(PATHS)))
                engine.chains.append(ids[: data.draw(st.integers(0, len(ids)))])
            case "evict" if engine.chains:
                ids = data.draw(st.sampled_from(engine.chains))
                del ids[data.draw(st.integers(0, len(ids))) :]
            case "wait":
                content = Content(pieces=pieces_of(data.draw(PATHS)))
                tokens = 2 * len(content.pieces) + data.draw(st.integers(0, 15))
                waiting[token(number)] = Request(token(number), "", tokens, content=content)
            case "leave" if waiting:
                left = data.draw(st.sampled_from(sorted(waiting)))
                prefixes.forget(left)
                del waiting[left]
            case "restart":
                engine.chains, before = engine.chains[:1], set()
                full = structs.replace(
                    snapshot("full", number),
                    cache_block=engine.size,
                    blocks_stored=b"".join(engine.held),
                )
                prefixes.heard(worker, full, 1.0)
            case _:
                pass
        delta = structs.replace(
            snapshot("delta", number),
            cache_block=engine.size,
            blocks_stored=b"".join(engine.held - before),
            blocks_removed=b"".join(before - engine.held),
        )
        prefixes.heard(worker, delta, 1.0)
        for request in waiting.values():
            expected = [engine.hits(request) for engine in engines.values()]
            assert list(prefixes.hits(request, WORKERS)) == expected
