"""Which blocks a text prompt becomes, learned from prompts that engines have told.

The router knows a prompt's chunks (``text_chunks``), an engine tells the blocks that it became.
Prompts that begin with the same chunks begin with the same blocks; how far is measured where two
prompts part, and elsewhere a chunk has its share of the blocks by its bytes. Chat templates are
not modelled: what they add lies in the blocks.

A conversation's next turn repeats the answer as a message. The router does not read answers: the
first message after a prompt that was answered counts as its answer if it is about as long. Whether
such messages became the answer's blocks is measured too (reasoning, for one, is left out by
templates).

Nothing is kept over a restart: each conversation is unknown until its next prompt is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.core.prefix.ids import ID_BYTES, block_ids
from router.core.prefix.text_chunks import PART_END
from router.core.types import Content

Ids = NDArray[np.uint64]

MOST_BYTES = 64 * 1024 * 1024
"""Memory for prompts and answers by default: some 300,000 chunks, 150 MB of text."""

# Requests at engines, and ended ones whose answers may still be told.
_MOST_SENT, _MOST_ENDED = 65_536, 1_024
# Answers to one prompt.
_MOST_ANSWERS = 8
# A chunk in the table, and a prompt or answer beside its ids.
_CHUNK_BYTES, _OBJECT_BYTES = 120, 512
# An unfinished block counts half.
_HALF = 0.5
# Bytes of a token before any answer was repeated.
_TOKEN_BYTES = 4.0
# A message this many times longer or shorter than an answer is another one.
_TIMES = 3.0
# Bytes of a message besides its text.
_JSON_BYTES = 40
# What a new observation weighs against those before.
_NEW = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt that was told: its chunks, the blocks up to the end of each, and all its blocks."""

    chunks: Ids
    ends: NDArray[np.float32]
    blocks: Ids


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Blocks that an answer filled, after the ``first`` blocks, its prompt's."""

    first: int
    blocks: Ids


@dataclass(slots=True, eq=False)
class _Sent:
    """A request; ``empty``: its prompt was told and has no full block."""

    content: Content
    empty: bool = False


class Correspondence:
    """Learns from what engines tell, predicts the blocks of further prompts.

    It belongs to one group of workers with blocks of one size: the caller ignores what workers
    with other blocks tell, and makes a new one when the size changes.

    Args:
        block_tokens: size of a block, a multiple of ``ids.PIECE_TOKENS``.
        most_bytes: of memory; prompts that were not told for the longest time go first.
    """

    def __init__(self, block_tokens: int, most_bytes: int = MOST_BYTES) -> None:
        self.block_tokens = block_tokens
        self._most_bytes = most_bytes
        self._sent: dict[str, _Sent] = {}
        self._ended: dict[str, _Sent] = {}
        # A chunk leads to the latest prompt that has it, so all its earlier chunks lead to this
        # prompt or to later ones.
        self._latest: dict[int, _Prompt] = {}
        # By identity, the latest last.
        self._prompts: dict[int, _Prompt] = {}
        # By the last chunk of the prompt, in ``_latest`` as well.
        self._answers: dict[int, list[_Answer]] = {}
        self._object_bytes = 0
        self._token_bytes = _TOKEN_BYTES
        self._repeated = 1.0

    @property
    def memory_bytes(self) -> int:
        """Memory in use, about; without requests at engines."""
        return self._object_bytes + _CHUNK_BYTES * len(self._latest)

    def sent(self, token: str, content: Content) -> None:
        """A request leaves for an engine."""
        if content.chunks:
            self._sent[token] = _Sent(content)
            if len(self._sent) > _MOST_SENT:
                del self._sent[next(iter(self._sent))]

    def ended(self, token: str) -> None:
        """It has left the engine, which may tell of its answer later."""
        sent = self._sent.pop(token, None)
        if sent is not None:
            self._ended[token] = sent
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def told(self, token: str, first: int, blocks: bytes) -> bytes:
        """Learn from a ``PromptChain`` of the request; those of unknown requests teach nothing.

        Returns:
            Ids of the chunks of which more may be known now.
        """
        sent = self._sent.get(token) or self._ended.get(token)
        if sent is None:
            return b""
        chunks, ids = _ids(sent.content.chunks), _ids(blocks)
        # An answer begins at 0 too if its prompt has no full block.
        if not first and not (sent.empty and blocks):
            sent.empty = not blocks
            self._learn(chunks, np.frombuffer(sent.content.sizes, np.uint32), ids)
        elif blocks and (key := int(chunks[-1])) in self._latest:
            self._keep(key, _Answer(first, ids))
        self._forget()
        return sent.content.chunks

    def predict(self, content: Content) -> bytes:
        """Ids of a prompt's leading blocks, as far as they are known; exact for token ids.

        An engine computes the last token of a prompt at least, whatever it has cached.
        """
        return self.foretold(content)[0]

    def foretold(self, content: Content) -> tuple[bytes, bytes]:
        """The same, and the id of a text's first unknown chunk; empty if it has none."""
        if content.pieces:
            return block_ids(content.pieces, self.block_tokens), b""
        runs = self._runs(chunks := _ids(content.chunks))
        known = runs[-1][1] if runs else 0
        blocks = self._blocks(content, chunks, runs[-1][2], known) if runs else b""
        return blocks, content.chunks[ID_BYTES * known :][:ID_BYTES]

    def _blocks(self, content: Content, chunks: Ids, prompt: _Prompt, known: int) -> bytes:
        end = int(prompt.ends[known - 1])
        answers = self._answers.get(int(chunks[known - 1]))
        if answers and known < len(chunks) and self._repeated >= _HALF:
            sizes = np.frombuffer(content.sizes, np.uint32)
            answer = self._likeliest(answers, _message_bytes(sizes[known:]))
            if answer is not None and answer.first <= end:
                return prompt.blocks[: answer.first].tobytes() + answer.blocks.tobytes()
        return prompt.blocks[:end].tobytes()

    def _runs(self, chunks: Ids) -> list[tuple[int, int, _Prompt]]:
        """The leading chunks that are known: from where to where they lead to which prompt."""
        runs, at = [], 0
        while at < len(chunks) and (prompt := self._latest.get(int(chunks[at]))) is not None:
            stop = _common(prompt.chunks, chunks)
            if stop <= at:  # two texts of one id
                break
            runs.append((at, stop, prompt))
            at = stop
        return runs

    def _learn(self, chunks: Ids, sizes: NDArray[np.uint32], blocks: Ids) -> None:
        """A prompt has become these blocks."""
        ends = np.empty(len(chunks), np.float32)
        known = 0
        for start, known, prompt in self._runs(chunks):
            same = _common(prompt.blocks, blocks) + _HALF
            ends[start:known] = np.minimum(prompt.ends[start:known], same)
            if known == len(prompt.chunks):
                # All its chunks lead to the new one from now on.
                del self._prompts[id(prompt)]
                self._object_bytes -= _size(prompt.chunks, prompt.ends, prompt.blocks)
            elif known < len(chunks):
                ends[known - 1] = same  # here the two part
        # Bytes and blocks at points of the rest: where it begins, the answer in it, its end.
        points = [(0, float(ends[known - 1]) if known else 0.0)]
        if (repeated := self._repeat(chunks, known, sizes, blocks)) is not None:
            points.append(repeated)
        at = np.cumsum(sizes[known:] & ~np.uint32(PART_END), dtype=np.int64)
        points.append((int(at[-1]) if len(at) else 0, len(blocks) + _HALF))
        ends[known:] = np.interp(at, *np.transpose(points))
        ends[-1] = len(blocks) + _HALF
        told = _Prompt(chunks, ends, blocks)
        self._prompts[id(told)] = told
        self._object_bytes += _size(chunks, ends, blocks)
        self._latest.update(dict.fromkeys(chunks.tolist(), told))

    def _repeat(
        self, chunks: Ids, known: int, sizes: NDArray[np.uint32], blocks: Ids
    ) -> tuple[int, float] | None:
        """Whether the next message was an answer; if so its bytes, and the blocks at its end."""
        answers = self._answers.get(int(chunks[known - 1])) if 0 < known < len(chunks) else None
        if not answers:
            return None
        size = _message_bytes(sizes[known:])
        answer = self._likeliest(answers, size)
        if answer is None:
            return None
        same = _common(answer.blocks, blocks[answer.first :])
        share = same / len(answer.blocks)
        self._repeated += _NEW * (share - self._repeated)
        if share < _HALF:
            return None
        tokens = len(answer.blocks) * self.block_tokens
        self._token_bytes += _NEW * ((size - _JSON_BYTES) / tokens - self._token_bytes)
        answers[:] = [other for other in answers if other is not answer]
        self._object_bytes -= _size(answer.blocks)
        return size, answer.first + same + _HALF

    def _likeliest(self, answers: Sequence[_Answer], size: int) -> _Answer | None:
        """The latest one whose length is nearest to a message's; None: it is none of them."""
        best, least = None, 0.0
        for answer in reversed(answers):
            # What it filled of its first and last block is unknown.
            block = self.block_tokens * self._token_bytes
            whole = len(answer.blocks) * block
            if not whole / _TIMES - block <= size - _JSON_BYTES <= (whole + block) * _TIMES:
                continue
            if best is None or abs(size - _JSON_BYTES - whole) < least:
                best, least = answer, abs(size - _JSON_BYTES - whole)
        return best

    def _keep(self, key: int, answer: _Answer) -> None:
        answers = self._answers.setdefault(key, [])
        answers.append(answer)
        self._object_bytes += _size(answer.blocks)
        if len(answers) > _MOST_ANSWERS:
            self._object_bytes -= _size(answers.pop(0).blocks)

    def _forget(self) -> None:
        """Stay within the memory."""
        while self.memory_bytes > self._most_bytes and self._prompts:
            key, prompt = next(iter(self._prompts.items()))
            del self._prompts[key]
            self._object_bytes -= _size(prompt.chunks, prompt.ends, prompt.blocks)
            for chunk in prompt.chunks.tolist():
                if self._latest.get(chunk) is prompt:
                    del self._latest[chunk]
                    for answer in self._answers.pop(chunk, ()):
                        self._object_bytes -= _size(answer.blocks)


def _ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, np.uint64)


def _common(these: Ids, those: Ids) -> int:
    """How many leading ids are alike."""
    most = min(len(these), len(those))
    differ = these[:most] != those[:most]
    return int(differ.argmax()) if differ.any() else most


def _message_bytes(sizes: NDArray[np.uint32]) -> int:
    """Of the first part."""
    chunks = int((sizes >= PART_END).argmax()) + 1
    return int((sizes[:chunks] & ~np.uint32(PART_END)).sum())


def _size(*arrays: NDArray[Any]) -> int:
    return _OBJECT_BYTES + sum(array.nbytes for array in arrays)
