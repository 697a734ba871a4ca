"""Running requests as columns, and a small fleet whose requests run and end."""

from collections.abc import Sequence

import numpy as np

from router.core.forecast.end_signals import Departure, Signal
from router.core.forecast.forecast import NO_CAP, Ends, Floats, Ints, Running


def column(values: Sequence[int] | Ints) -> Ints:
    return np.array(values, dtype=np.int64)


def running(
    prompts: Sequence[int],
    *,
    worker: Sequence[int] = (),
    generated: Sequence[int] = (),
    caps: Sequence[int] = (),
    p: Sequence[float] = (),
    left: Sequence[int] = (),
) -> Running:
    """Requests 0, 1, … with these prompts, on worker 0 and at their beginning unless said."""
    n = len(prompts)
    return Running(
        id=np.arange(n),
        worker=column(worker or [0] * n),
        prompt_tokens=column(prompts),
        generated_tokens=column(generated or [0] * n),
        max_tokens=column(caps or [NO_CAP] * n),
        end_probability=np.array(p or [np.nan] * n, dtype=np.float64),
        prefill_left=column(left or [0] * n),
        from_tokens=column([0] * n),
    )


def departure(
    length: int, *, number: int = 0, prompt: int = 100, completed: bool = True, cap: int = NO_CAP
) -> Departure:
    return Departure(number, prompt, length, completed, cap)


class Fleet(Signal):
    """Always full; a request that ends makes room for the next, whose output is drawn alike.

    Args:
        outputs: lengths to draw from.
    """

    def __init__(self, workers: int, slots: int, outputs: Floats | Ints, seed: int = 0) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self.outputs = outputs
        n = workers * slots
        self.worker = np.repeat(np.arange(workers), slots)
        self.id = np.arange(n)
        self.generated = np.zeros(n, dtype=np.int64)
        self.length = self._draw(n)

    def running(self) -> Running:
        n = len(self.id)
        return Running(
            self.id.copy(),
            self.worker,
            np.full(n, 100),
            self.generated.copy(),
            np.full(n, NO_CAP),
            np.full(n, np.nan),
            np.zeros(n, dtype=np.int64),
            np.zeros(n, dtype=np.int64),
        )

    def step(self) -> list[Departure]:
        """Everyone yields a token; who ends leaves."""
        self.generated += 1
        over = np.flatnonzero(self.generated == self.length)
        gone = [departure(int(self.length[i]), number=int(self.id[i])) for i in over]
        self.id[over] = self.id.max() + 1 + np.arange(len(over))
        self.generated[over] = 0
        self.length[over] = self._draw(len(over))
        return gone

    def predict(self, running: Running, horizon: int) -> Ends:
        """An oracle's."""
        rows = np.searchsorted(np.sort(self.id), running.id)
        order = np.argsort(self.id)[rows]
        return Ends((self.length - self.generated)[order])

    def _draw(self, count: int) -> Ints:
        return self._rng.choice(self.outputs, count).astype(np.int64)
