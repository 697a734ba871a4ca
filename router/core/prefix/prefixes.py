"""What each worker of a group has cached of a waiting request's prompt.

Snapshots say which blocks engines hold. A round asks for all waiting requests, again and again, so
an answer is kept until it can change: until a worker stores the next block after a hit, or removes
the last block of one. Engines evict a prompt's last block first. A hole that one makes elsewhere is
seen after ``LOOK_AGAIN_S`` at the latest.

Of workers without snapshots it is guessed (``sent_prompts``), in parts of prompts for blocks; of
those with KV events, which tell nothing of texts, that of texts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.core.prefix.block_index import MOST_BLOCKS, BlockIndex
from router.core.prefix.correspondence import Correspondence
from router.core.prefix.id_table import Rows
from router.core.prefix.ids import ID_BYTES, PIECE_TOKENS
from router.core.prefix.sent_prompts import SentPrompts, ends, parts
from router.core.types import Content, Request, Snapshot
from router.core.wire import request_token

LOOK_AGAIN_S = 5.0

MOST_ANSWERS = 1 << 16
_MOST_HEIRS = 8
# In place of a size of blocks.
_GUESSED = 0

Tokens = NDArray[np.int64]


class _Teller(NamedTuple):
    """A worker that tells its blocks; ``texts``: and of which prompts they are."""

    number: int
    block_tokens: int
    epoch: str
    texts: bool


class _Guess(NamedTuple):
    """Prompts sent to a worker that does not tell what it has cached of such ones."""

    number: int
    sent: SentPrompts


class _Bound(NamedTuple):
    """The longest hit in blocks of one size, and the id of the block after it.

    An id stands for all that precedes it. So a prompt with the same id there has the same hits.
    """

    block_tokens: int
    blocks: int
    following: bytes

    def holds(self, chain: bytes) -> bool:
        """Whether it is that of a prompt with these blocks, without the last token's."""
        start = ID_BYTES * self.blocks
        return bool(self.following) and chain[start : start + ID_BYTES] == self.following


@dataclass(slots=True, eq=False)
class _Answer:
    """Cached tokens by worker number, for requests that are alike up to the block after them.

    Attributes:
        watched: ids of blocks whose change may change it.
        users: number of requests that it answers.
        heirs: answers that have replaced it for some of its requests.
        listed: tokens of the workers ``listed_for``.
    """

    tokens: Tokens
    bounds: tuple[_Bound, ...]
    watched: set[int]
    looked_s: float
    stale: bool = False
    users: int = 0
    heirs: list[_Answer] = field(default_factory=list)
    listed: array[int] = field(default_factory=lambda: array("q"))
    listed_for: Sequence[str] | None = None


class Prefixes:
    """The prefix caches of a group's workers.

    A worker counts from its first full snapshot that tells blocks until its engine starts anew.
    After a gap in its messages its blocks are used as they are known, and later messages apply,
    until a full snapshot replaces them: most of them are still there, and the engine decides in
    the end. In silence too: a step with many prompts may take an engine longer than its loads hold.

    Of a worker that has told nothing it is guessed. One that sends some and tells no blocks
    counts as without a cache.

    Args:
        most_blocks: bound of distinct blocks.
        most_answers: bound of requests whose answers are kept.

    Attributes:
        guessed_tokens: prompt tokens sent that only a guess took for cached.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS, most_answers: int = MOST_ANSWERS) -> None:
        self._texts: dict[int, Correspondence] = {}  # by size of block
        self._most_answers = most_answers
        self._most_blocks = most_blocks
        self.index: BlockIndex | None = None  # made for the first worker that tells
        self._tellers: dict[str, _Teller] = {}
        self._guesses: dict[str, _Guess] = {}
        self.guessed_tokens = 0
        self._mute: set[str] = set()  # their snapshots tell no blocks
        self._numbers: dict[int, Rows] = {}  # of workers, by size of block
        self._both: Rows = np.zeros((2, 0), np.int64)  # of workers told, and guessed for texts
        self._answers: dict[str, _Answer] = {}
        self._alike: dict[tuple[_Bound, ...], _Answer] = {}
        self._watched: dict[int, set[_Answer]] = {}
        self._now_s = self._aged_s = 0.0

    @property
    def told(self) -> bool:
        """True if a worker tells what it has cached."""
        return bool(self._tellers)

    @property
    def known(self) -> bool:
        """True if something is told or guessed."""
        return bool(self._tellers or self._guesses)

    @property
    def guessed(self) -> int:
        """Number of workers whose caches are guessed."""
        return len(self._guesses)

    @property
    def memory_bytes(self) -> int:
        """Memory of the index, and of what is known of texts."""
        texts = sum(text.memory_bytes for text in self._texts.values())
        return texts + (self.index.memory_bytes if self.index is not None else 0)

    def held(self, worker_id: str) -> int | None:
        """Blocks that a worker has cached; None: it does not tell."""
        teller = self._tellers.get(worker_id)
        if teller is None:
            return None
        assert self.index is not None
        return self.index.held(teller.number)

    def tells(self, worker_id: str) -> bool:
        return worker_id in self._tellers

    def guesses(self, worker_id: str, content: Content | None = None) -> bool:
        """Whether a prompt sent there would count as cached there, though untold."""
        if (teller := self._tellers.get(worker_id)) is not None:
            return not teller.texts and content is not None and not content.pieces
        return worker_id not in self._mute

    def block_tokens(self, worker_id: str) -> int | None:
        """Size of the blocks that a worker tells; None: it tells none."""
        teller = self._tellers.get(worker_id)
        return None if teller is None else teller.block_tokens

    def blocks(self, worker_id: str, request: Request) -> bytes:
        """Ids of a prompt's full blocks at a worker that tells them, as far as they are known."""
        if request.content is None:
            return b""
        return self._texts[self._tellers[worker_id].block_tokens].predict(request.content)

    def heard(
        self, worker_id: str, snapshot: Snapshot, received_s: float, *, texts: bool = True
    ) -> None:
        """Apply a snapshot that is neither late nor a repetition.

        Without ``texts`` it does not tell of which prompts its blocks are.
        """
        self._now_s = max(self._now_s, received_s)
        teller = self._tellers.get(worker_id)
        if teller is not None and teller.epoch != snapshot.epoch:
            self.lost(worker_id)
        if snapshot.kind == "full":
            self._begin(worker_id, snapshot, texts=texts)
        teller = self._tellers.get(worker_id)
        if teller is not None and not snapshot.cache_block:  # it can tell no more
            self.lost(worker_id)
            self._mute.add(worker_id)
            return
        if teller is None:
            return
        assert self.index is not None
        text = self._texts[teller.block_tokens]
        for chain in snapshot.chains:
            if (token := request_token(chain.id)) is not None:
                self._note(text.told(token, chain.first, chain.blocks))
        if snapshot.blocks_cleared or snapshot.kind == "full":
            self.index.clear(teller.number)
            self._all_stale()
        if snapshot.blocks_cleared:
            self._leave_index(self._guesses.pop(worker_id, None))
        self.index.remove(teller.number, snapshot.blocks_removed)
        self.index.store(teller.number, snapshot.blocks_stored)
        if self._watched:
            self._note(snapshot.blocks_removed)
            self._note(snapshot.blocks_stored)

    def sent(self, worker_id: str, request: Request) -> None:
        """A request leaves for a worker; one that tells its blocks will tell those of this one."""
        self.forget(request.id)
        teller = self._tellers.get(worker_id)
        if teller is not None and request.content is not None:
            self._texts[teller.block_tokens].sent(request.id, request.content)

    def guess(
        self, worker_id: str, content: Content, tokens: int, now_s: float | None, most_tokens: int
    ) -> None:
        """A worker that tells nothing computes a prompt, and has room for ``most_tokens``."""
        now_s = self._now_s = max(self._now_s, now_s or 0.0)
        guess = self._guesses.get(worker_id)
        if guess is None:
            guess = self._guesses[worker_id] = _Guess(self._joined(), SentPrompts())
            self._recount()
        assert self.index is not None
        guess.sent.most_tokens = most_tokens
        new = guess.sent.add(parts(content), ends(content, tokens), now_s)
        self.index.store(guess.number, new)
        self._note(new + content.session)  # of a session known before there are more tokens now
        due: Iterable[_Guess] = (guess,)
        if now_s - self._aged_s >= LOOK_AGAIN_S:
            self._aged_s, due = now_s, self._guesses.values()
        for each in due:
            gone = each.sent.forget(now_s)
            self.index.remove(each.number, gone)
            self._note(gone)

    def ended(self, request_id: str) -> None:
        """A request has left its worker."""
        for text in self._texts.values():
            text.ended(request_id)

    def lost(self, worker_id: str) -> None:
        """Nothing is known of its cache any more."""
        self._mute.discard(worker_id)
        for one in self._tellers.pop(worker_id, None), self._guesses.pop(worker_id, None):
            self._leave_index(one)

    def hits(self, request: Request, worker_ids: Sequence[str]) -> array[int]:
        """Prompt tokens that these workers have cached: whole blocks, and never the last token.

        The answer is kept until ``forget``. It is shared: do not change it. numpy makes a matrix of
        such arrays at once, of lists slowly.
        """
        answer = self._answer(request)
        if answer.listed_for is not worker_ids:
            answer.listed = array("q", answer.tokens[self._columns(worker_ids)].tobytes())
            answer.listed_for = worker_ids
        return answer.listed

    def forget(self, request_id: str) -> None:
        """The request waits no longer."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._leave(answer)

    def _leave_index(self, one: _Teller | _Guess | None) -> None:
        if one is not None:
            assert self.index is not None
            self.index.leave(one.number)
            self._recount()

    def _begin(self, worker_id: str, snapshot: Snapshot, *, texts: bool) -> None:
        """Take a worker's word for its blocks, or note that it tells nothing."""
        block_tokens = snapshot.cache_block
        if block_tokens % PIECE_TOKENS:
            block_tokens = 0
        before = self._tellers.get(worker_id)
        if before is not None and before.block_tokens != block_tokens:
            self.lost(worker_id)
        if texts and worker_id in self._guesses:
            self.lost(worker_id)
        if not block_tokens:
            self._mute.add(worker_id)
        elif worker_id not in self._tellers:
            self._mute.discard(worker_id)
            teller = _Teller(self._joined(), block_tokens, snapshot.epoch, texts)
            self._tellers[worker_id] = teller
            self._texts.setdefault(block_tokens, Correspondence(block_tokens))
            self._recount()

    def _joined(self) -> int:
        if self.index is None:
            self.index = BlockIndex(self._most_blocks)
        return self.index.join()

    def _recount(self) -> None:
        numbers: dict[int, list[int]] = {}
        for teller in self._tellers.values():
            numbers.setdefault(teller.block_tokens, []).append(teller.number)
        if self._guesses:
            numbers[_GUESSED] = [guess.number for guess in self._guesses.values()]
        self._numbers = {size: np.array(each) for size, each in numbers.items()}
        both = self._tellers.keys() & self._guesses.keys()
        sides = (self._tellers, self._guesses)
        self._both = np.array([[side[one].number for one in both] for side in sides], np.int64)
        self._all_stale()

    def _columns(self, worker_ids: Iterable[str]) -> list[int]:
        """Places of workers in an answer; the last is of those that tell nothing."""
        return [
            -1
            if (one := self._tellers.get(worker_id) or self._guesses.get(worker_id)) is None
            else one.number
            for worker_id in worker_ids
        ]

    def _answer(self, request: Request) -> _Answer:
        before = self._answers.get(request.id)
        if before is not None:
            if not before.stale and self._now_s - before.looked_s < LOOK_AGAIN_S:
                return before
            self._drop(before)
            self._leave(before)
        elif len(self._answers) >= self._most_answers:
            self.forget(next(iter(self._answers)))
        answer = self._inherited(before, request) if before is not None else None
        if answer is None:
            answer = self._look(request)
            if before is not None and len(before.heirs) < _MOST_HEIRS:
                before.heirs.append(answer)
        answer.users += 1
        self._answers[request.id] = answer
        return answer

    def _inherited(self, before: _Answer, request: Request) -> _Answer | None:
        """An answer that was found for another request since, where it must be this one's too."""
        if not before.heirs:
            return None
        chains = {size: self._chain(request, size)[0] for size in self._numbers}
        for heir in before.heirs:
            if not heir.stale and all(one.holds(chains[one.block_tokens]) for one in heir.bounds):
                return heir
        return None

    def _chain(self, request: Request, block_tokens: int) -> tuple[bytes, bytes]:
        """Ids of the blocks that may be cached, and of the chunk of text after the known ones.

        An engine computes a prompt's last token in any case.
        """
        if request.content is None:
            return b"", b""
        if block_tokens == _GUESSED:
            return parts(request.content), b""
        chain, unknown = self._texts[block_tokens].foretold(request.content)
        return chain[: ID_BYTES * (max(0, request.prompt_tokens - 1) // block_tokens)], unknown

    def _look(self, request: Request) -> _Answer:
        """Look up the blocks of a prompt, and watch those where the answer changes."""
        width = self.index.width if self.index is not None else 0
        tokens = np.zeros(width + 1, np.int64)
        bounds: list[_Bound] = []
        watched: set[int] = set()
        for block_tokens, numbers in self._numbers.items():
            assert self.index is not None
            chain, unknown = self._chain(request, block_tokens)
            watched.update(array("Q", unknown))
            blocks = self.index.leading(chain)[numbers]
            if block_tokens == _GUESSED:
                tokens[numbers] = self._guessed_tokens(request, blocks)
            else:
                tokens[numbers] = blocks * block_tokens
            ids = array("Q", chain)
            for count in np.unique(blocks).tolist():
                watched.update(ids[max(0, count - 1) : count + 1])
            most = int(blocks.max())
            following = chain[ID_BYTES * most :][:ID_BYTES]
            bounds.append(_Bound(block_tokens, most, following))
        if request.content is not None and not request.content.pieces:
            told, guessed = self._both
            tokens[told] = np.maximum(tokens[told], tokens[guessed])
        answer = _Answer(tokens, tuple(bounds), watched, self._now_s)
        if bounds and all(bound.following for bound in bounds):
            alike = self._alike.setdefault(answer.bounds, answer)
            if alike is not answer:
                return alike
        for one in watched:
            self._watched.setdefault(one, set()).add(answer)
        return answer

    def _guessed_tokens(self, request: Request, blocks: Tokens) -> Tokens:
        """By number of leading parts that each worker was sent; an engine computes a last token."""
        if (content := request.content) is None:
            return blocks
        upto = np.append(ends(content, request.prompt_tokens), 0.0)[blocks - 1]
        if content.session:
            (one,) = array("Q", content.session)
            upto = np.array([guess.sent.tokens_of(one) for guess in self._guesses.values()])
        tokens: Tokens = np.minimum(upto, max(0, request.prompt_tokens - 1)).astype(np.int64)
        return tokens

    def _note(self, ids: bytes) -> None:
        """Answers that end at one of these blocks may be wrong now."""
        for one in self._watched.keys() & array("Q", ids):
            for answer in list(self._watched.get(one, ())):
                self._drop(answer)

    def _all_stale(self) -> None:
        self._watched.clear()
        self._alike.clear()
        for answer in self._answers.values():
            answer.stale = True

    def _leave(self, answer: _Answer) -> None:
        answer.users -= 1
        if not answer.users:
            self._drop(answer)

    def _drop(self, answer: _Answer) -> None:
        """Use an answer no more: its requests look again when they are asked for."""
        answer.stale = True
        if self._alike.get(answer.bounds) is answer:
            del self._alike[answer.bounds]
        for one in answer.watched:
            if (watchers := self._watched.get(one)) is not None:
                watchers.discard(answer)
                if not watchers:
                    del self._watched[one]
        answer.watched = set()
