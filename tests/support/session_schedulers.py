"""Sessions in vLLM's own schedulers, which get one input after another; see ``real_schedulers``.

vLLM keeps a session's first request. Of a further one it takes over the input, at once or when the
answer to the one before has ended.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from engine_patches.plugin import compat
from engine_patches.plugin.end_table import EndWriter
from tests.support.real_schedulers import (
    BLOCK_TOKENS,
    Driver,
    Reader,
    Schedulers,
    compare,
    compare_cache,
    own_ids,
)

SLOTS = 8


class Sessions:
    """Random sessions and requests; what is read must be what the scheduler has."""

    def __init__(self, make: Schedulers, flavour: str, ahead: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        ends = Path(tempfile.mkdtemp()) / "ends"
        setattr(compat, "table_path", lambda *_: ends)  # noqa: B010
        self._writer = EndWriter(ends, SLOTS)
        sizes: dict[str, Any] = {"slots": SLOTS, "blocks": 100, "step_tokens": 64, "ahead": ahead}
        self.scheduler = make.make(flavour, **sizes, caching=True, end_signal=True)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.driver = Driver(self.scheduler, ahead, hasher)
        self.reader = Reader(self.scheduler.evenstep.endpoint)
        self.rng = random.Random(1)
        self.numbers: dict[str, set[int]] = {}
        self.seen = {"steps": 0, "prefills_cut": 0, "cached": 0, "most_blocks": 0}
        self.seen |= {"queued": 0, "continued": 0, "ended": 0, "blocks": 0}

    def run(self, steps: int) -> dict[str, int]:
        open_ones: list[str] = []
        for _ in range(steps):
            if self.rng.random() < 0.2:
                session = self.rng.random() < 0.5 and len(open_ones) < 5
                id_ = self.driver.submit(self._prompt(), self.rng.randrange(1, 40), session=session)
                open_ones += [id_] * session
            if open_ones and self.rng.random() < 0.15:
                self._go_on(open_ones)
            self._step()
        for id_ in open_ones:
            self.driver.extend(id_, [5], 1, session=False)
        while self.scheduler.requests:
            self._step()
        self._step()
        for _ in self.driver.drain():
            self._compare()
        self._end()
        return self.seen

    def _prompt(self) -> list[int]:
        return [self.rng.randrange(10, 200) for _ in range(self.rng.randrange(5, 90))]

    def _go_on(self, open_ones: list[str]) -> None:
        """One of the sessions gets an input, or is told that there will be none."""
        id_ = self.rng.choice(open_ones)
        last = self.rng.random() < 0.2
        waits = self.scheduler.requests[id_].status.name == "WAITING_FOR_STREAMING_REQ"
        self.seen["ended" if last else "continued" if waits else "queued"] += 1
        if last:
            open_ones.remove(id_)
        self.driver.extend(id_, self._prompt(), self.rng.randrange(1, 40), session=not last)

    def _step(self) -> None:
        done = self.driver.step()
        for new in self.driver.scheduled.scheduled_new_reqs:
            number = new.sampling_params.extra_args[compat.END_KEY]
            self.numbers.setdefault(new.req_id, set()).add(number)
        if done is not None:
            self._compare()

    def _compare(self) -> None:
        scheduler, reader = self.scheduler, self.reader
        compare(scheduler, reader, self.seen)
        compare_cache(self.driver, reader, self.seen)
        running = {one.request_id for one in scheduler.running}
        waits = [one for id_, one in scheduler.requests.items() if id_ not in running]
        told = reader.last.waiting_tokens
        assert told == sum(one.num_tokens for one in waits if not one.is_finished())

    def _end(self) -> None:
        """Chains of all inputs, and one number for each session."""
        for one in {one.request_id: one for one in reversed(self.driver.submitted)}.values():
            told = self.reader.prefixes.chains[one.request_id]
            own = own_ids(one)
            for part in told:
                assert own[part.first * 8 :].startswith(part.blocks)
            self.seen["blocks"] += sum(len(part.blocks) for part in told) // 8
        numbers = [number for some in self.numbers.values() for number in some]
        assert len(numbers) == len({*numbers}) == len(self.numbers)
        ends = self.scheduler.evenstep._ends
        assert not ends._ids
        assert not ends._numbers_of
        assert not self.scheduler.evenstep.failed
        self.scheduler.shutdown()
        self.reader.close()
