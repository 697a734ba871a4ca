"""Measurements of a simulation of whole engines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from loadgen.engine.request import EngineRequest
from loadgen.simulator.serving.turns import Turn
from router.core.forecast.forecast import Floats, Ints
from router.core.targets import Verdict


@dataclass(frozen=True, slots=True, eq=False)
class ServingRecords:
    """The S steps after the warm-up, up to the last arrival: the load does not fall meanwhile.

    Without a barrier each step is that of one rank, G = 1. Groups must be of one size.
    """

    seconds: Floats  # duration of each step, shape (S,)
    needed_s: Floats  # what each rank alone would have needed, shape (S, G)
    loads: Ints  # KV tokens of running requests, shape (S, G)
    running: Ints  # their number, shape (S, G)
    prompts: Ints  # prompt tokens computed, shape (S, G)
    tokens: Ints  # output tokens of the step, shape (S,)


@dataclass(frozen=True, slots=True)
class ServingResult:
    """Figures of the requests after the warm-up, and of the steps since the first one's arrival."""

    completed: int  # requests, with those of the warm-up
    ttft_mean_s: float  # from a request's arrival
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    latency_mean_s: float  # from a request's arrival to its last token
    tpot_mean_s: float | None  # from the first token to the last, for each after the first
    tpot_p99_s: float | None
    throughput_tok_s: float  # output tokens per second
    goodput_per_s: float  # requests that met their targets, or had none, per second
    met_by_class: dict[str, float]  # share of each class's requests that met their targets
    misses: dict[str, int]  # requests by what made them miss: queue, prompt, tokens
    prefix_hit_share: float  # share of the prompts' tokens that the engines had cached
    idle_share: float  # share of the ranks' time in steps spent waiting for the slowest one
    step_mean_s: float
    evictions_per_1k: float  # preemptions per thousand requests
    # Everything that the result depends on, and what the router has learned.
    parameters: dict[str, object]
    records: ServingRecords | None = field(default=None, compare=False)  # of every step, on request

    def report(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}


# KV tokens, requests, and prompt tokens of a rank in a step.
Row = tuple[int, int, int]


@dataclass(slots=True)
class _Sums:
    tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_s: float = 0.0
    rank_s: float = 0.0  # of all ranks
    waited_s: float = 0.0  # part of it for the slowest rank


class ServingRecorder:
    """Records a simulation as it runs; the first ``uncounted`` turns belong to the warm-up."""

    def __init__(self, turns: Sequence[Turn], uncounted: int) -> None:
        self._turns = turns
        self._uncounted = uncounted
        self._since_s: float | None = None
        self._last_s = 0.0
        self._steps: list[tuple[float, float, Sequence[float], Sequence[Row], int]] = []
        self._before = _Sums()
        self._now = _Sums()
        self._first_s: dict[int, float] = {}
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._latency_s: list[float] = []
        self._queued_s: dict[int, float] = {}  # until sent
        self._verdicts: Counter[tuple[str, Verdict]] = Counter()  # by class
        self._prompt_tokens = self._cached_tokens = 0
        self.completed = 0

    def arrived(self, turn: Turn, now_s: float) -> None:
        self._last_s = now_s
        if self._since_s is None and turn.number >= self._uncounted:
            self._since_s = now_s
            self._before = replace(self._now)

    def step(
        self,
        now_s: float,
        seconds: float,
        needed_s: Sequence[float],
        rows: Sequence[Row],
        tokens: int,
        preempted: int,
    ) -> None:
        """The step ends now; values as in ``ServingRecords``, by rank."""
        self._steps.append((now_s, seconds, needed_s, rows, tokens))
        sums = self._now
        sums.tokens += tokens
        sums.preemptions += preempted
        sums.steps += 1
        sums.step_s += seconds
        rank_s = seconds * len(needed_s)
        sums.rank_s += rank_s
        sums.waited_s += rank_s - sum(needed_s)

    def first_token(self, turn: Turn, request: EngineRequest, now_s: float) -> None:
        self._first_s[turn.number] = now_s
        if turn.number >= self._uncounted:
            assert turn.arrival_s is not None
            self._ttft_s.append(now_s - turn.arrival_s)
            self._queued_s[turn.number] = request.arrived_s - turn.arrival_s
            self._prompt_tokens += turn.prompt_tokens
            self._cached_tokens += request.cached_tokens

    def ended(self, turn: Turn, now_s: float) -> None:
        self.completed += 1
        first_s = self._first_s.pop(turn.number)
        if turn.number < self._uncounted:
            return
        tpot_s = None
        if turn.output_tokens > 1:
            tpot_s = (now_s - first_s) / (turn.output_tokens - 1)
            self._tpot_s.append(tpot_s)
        assert turn.arrival_s is not None
        self._latency_s.append(now_s - turn.arrival_s)
        targets = turn.class_.targets
        queued_s = self._queued_s.pop(turn.number)
        ttft_s = first_s - turn.arrival_s
        verdict = targets.verdict(queued_s, ttft_s, tpot_s) if targets else "met"
        self._verdicts[turn.class_.name, verdict] += 1

    def records(self) -> ServingRecords:
        since_s, kept = self._since_s or 0.0, self._steps
        if some := [step for step in kept if since_s < step[0] <= self._last_s]:
            kept = some
        _, seconds, needed_s, rows, tokens = zip(*kept, strict=True)
        loads, running, prompts = np.moveaxis(np.array(rows), 2, 0)
        return ServingRecords(
            np.array(seconds), np.array(needed_s), loads, running, prompts, np.array(tokens)
        )

    def result(
        self, now_s: float, parameters: dict[str, object], *, keep_records: bool
    ) -> ServingResult:
        before, now = self._before, self._now
        span_s = max(now_s - (self._since_s or 0.0), 1e-9)
        steps, step_s = now.steps - before.steps, now.step_s - before.step_s
        counted, verdicts = len(self._turns) - self._uncounted, self._verdicts
        told: Counter[Verdict] = Counter()
        of_class: Counter[str] = Counter()
        for (name, verdict), requests in verdicts.items():
            told[verdict] += requests
            of_class[name] += requests
        return ServingResult(
            completed=self.completed,
            ttft_mean_s=float(np.mean(self._ttft_s)),
            ttft_p50_s=float(np.percentile(self._ttft_s, 50)),
            ttft_p90_s=float(np.percentile(self._ttft_s, 90)),
            ttft_p99_s=float(np.percentile(self._ttft_s, 99)),
            latency_mean_s=float(np.mean(self._latency_s)),
            tpot_mean_s=float(np.mean(self._tpot_s)) if self._tpot_s else None,
            tpot_p99_s=float(np.percentile(self._tpot_s, 99)) if self._tpot_s else None,
            throughput_tok_s=(now.tokens - before.tokens) / span_s,
            goodput_per_s=told["met"] / span_s,
            met_by_class={
                name: verdicts[name, "met"] / requests
                for name, requests in sorted(of_class.items())
                if name
            },
            misses={cause: told[cause] for cause in ("queue", "prompt", "tokens")},
            prefix_hit_share=self._cached_tokens / self._prompt_tokens,
            idle_share=(now.waited_s - before.waited_s) / (now.rank_s - before.rank_s),
            step_mean_s=step_s / steps,
            evictions_per_1k=1000 * (now.preemptions - before.preemptions) / counted,
            parameters=parameters,
            records=self.records() if keep_records else None,
        )
