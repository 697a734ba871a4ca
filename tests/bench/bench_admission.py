"""What admission costs an engine per step, in steady state.

    python tests/bench/bench_admission.py [--running 64] [--waiting 256] [--steps 2000] [--json F]

Every policy gets the ledger's events, evictions too, and decides each step. Prompts have 40 and
outputs 85 tokens on average (lognormal). CPU time of one thread, of each step the shortest of
several runs.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from engine_patches.admission import ADMISSIONS, make_admission, read_admission
from engine_patches.admission.ledger import Ledger, Memory, Ticket
from engine_patches.admission.protocol import Admission, ledger_of
from loadgen.report.origin import Engines, origin
from router.core.forecast.forecast import Floats
from router.core.kv_blocks import KvBlocks
from tests.support.figure_files import write_figures

CODE = ("engine_patches/admission", "router/core/forecast", "tests/bench/bench_admission.py")

LIMIT_US = 50.0
RUNS = 5
BLOCK = 16
CAP = 1000
STEP_S = 0.02
Variant = Mapping[str, object]
OTHERS: Mapping[str, Variant] = {
    "wait, hold": {"policy": "wait", "hold_s": 0.5, "thresholds": [4]},
    "memory_checked, lengths seen": {"policy": "memory_checked", "predict": "quantile:.5"},
}


class Bench:
    """An engine whose memory just holds so many requests, and whose queue is refilled."""

    def __init__(self, policy: Admission, running: int, waiting: int, seed: int) -> None:
        self.ledger: Ledger = ledger_of(policy)
        self._policy = policy
        self._waiting = waiting
        self._slots = running
        self._random = np.random.default_rng(seed)
        self._outputs: dict[str, int] = {}
        self._born = 0
        self._capacity = 1 << 20

    def limit_memory(self) -> None:
        """Let memory limit the running requests instead of slots."""
        self._slots = 1 << 10
        self._capacity = self._used() * 13 // 10

    def step(self) -> float:
        """One step; seconds of CPU that admission took."""
        ledger, now_s = self.ledger, self.ledger.steps * STEP_S
        new = [self._ticket(now_s) for _ in range(self._waiting - len(ledger.waiting))]
        evicted, used = self._overflow()
        free = self._slots - len(ledger.running) + len(evicted)
        memory = Memory(self._capacity // BLOCK, used // BLOCK, free, KvBlocks.plain(BLOCK))
        began = time.thread_time()
        for ticket in new:
            ledger.arrived(ticket)
        for id_ in evicted:
            ledger.preempted(id_)
        admit = self._policy.admit(ledger, memory, now_s).admit
        if not evicted:
            self._enter(ledger.waiting[:free] if admit is None else admit, memory)
        ledger.stepped()
        took = time.thread_time() - began
        ended = [id_ for id_, end in self._outputs.items() if self._over(id_, end)]
        began = time.thread_time()
        for id_ in ended:
            ledger.left(id_)
        took += time.thread_time() - began
        for id_ in ended:
            del self._outputs[id_]
        return took

    def _enter(self, tickets: object, memory: Memory) -> None:
        room = memory.room()
        for ticket in list(tickets):  # type: ignore[call-overload]
            room -= memory.need(ticket)
            if room < 0:
                break
            self.ledger.entered(ticket.id)

    def _over(self, id_: str, output: int) -> bool:
        ticket = self.ledger.running.get(id_)
        return ticket is not None and self.ledger.generated_tokens(ticket) >= output

    def _overflow(self) -> tuple[list[str], int]:
        """Requests to evict, the last to enter first, and the tokens of the others."""
        evicted, used = [], self._used()
        for id_, ticket in reversed(self.ledger.running.items()):
            if used <= self._capacity:
                break
            evicted.append(id_)
            used -= self._held(ticket)
        return evicted, used

    def _used(self) -> int:
        return sum(map(self._held, self.ledger.running.values()))

    def _held(self, ticket: Ticket) -> int:
        return -(-self.ledger.size_tokens(ticket) // BLOCK) * BLOCK

    def _ticket(self, now_s: float) -> Ticket:
        prompt, output = np.ceil(self._random.lognormal((3.0, 3.8), (1.0, 1.1))).astype(int)
        self._born += 1
        id_ = str(self._born)
        self._outputs[id_] = end = min(int(output), CAP)
        return Ticket(id_, int(prompt), CAP, hint_tokens=end, arrived_s=now_s)


def costs(
    make: Callable[[], Admission], running: int, waiting: int, steps: int
) -> tuple[Floats, float, float]:
    """Microseconds of each step (shortest run), mean number running, mean number entering."""
    runs = []
    for _ in range(RUNS):
        bench = Bench(make(), running, waiting, seed=1)
        for _ in range(400):
            bench.step()
        bench.limit_memory()
        for _ in range(600):
            bench.step()
        entered, held, took = bench.ledger.entered_total, 0, []
        for _ in range(steps):
            took.append(bench.step())
            held += len(bench.ledger.running)
        runs.append(took)
    entries = (bench.ledger.entered_total - entered) / steps
    return np.min(runs, axis=0) * 1e6, held / steps, entries


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    variants = {name: {"policy": name} for name in ADMISSIONS} | dict(OTHERS)
    table = {}
    print(f"{'policy':32}{'mean us':>9}{'p50':>8}{'p99':>8}{'running':>9}{'entries':>9}")
    for name, variant in variants.items():
        make = partial(make_admission, read_admission(variant))
        took, held, entries = costs(make, options.running, options.waiting, options.steps)
        row = {
            "mean_us": float(took.mean()),
            "p50_us": float(np.median(took)),
            "p99_us": float(np.quantile(took, 0.99)),
            "running": held,
            "entries_per_step": entries,
        }
        table[name] = {key: round(value, 2) for key, value in row.items()}
        times = "".join(f"{row[key]:8.1f}" for key in ("mean_us", "p50_us", "p99_us"))
        print(f"{name:33}{times}{held:9.1f}{entries:9.2f}", flush=True)
    print(f"limit of the mean: {LIMIT_US:g} us")
    if options.json:
        write_figures(options.json, table, origin(Engines.SIMULATED, CODE))


if __name__ == "__main__":
    main()
