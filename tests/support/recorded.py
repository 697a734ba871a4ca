"""Recordings of clusters that were simulated, or written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace as replace_fields

from loadgen.simulator.decode.barrier_decode import simulate
from loadgen.simulator.decode.decode_config import DecodeConfig
from loadgen.simulator.decode.decode_results import StepRecords
from loadgen.simulator.decode.length_sources import LawLengths
from loadgen.simulator.decode.request_streams import ClosedStream, Job
from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.serving_simulation import simulate_serving
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, TraceRequest
from router.core.step_time import StepTime
from router.core.types import Dispatch
from router.recording.block_numbers import BlockNumbers
from router.recording.lines import (
    Header,
    RecordedGroup,
    RecordedWorker,
    Recording,
    RequestLine,
    StepLine,
)
from tests.support.paper import PAPER

GROUP = "default"
LENGTHS = LawLengths.parse("geometric:400,40")
WARMUP = 200
STEP_TIME = StepTime(2e-3, 5e-7)


@dataclass(frozen=True)
class Cluster:
    """What is simulated; requests are kept in the system by clients that each wait."""

    policy: str = "round_robin"
    dispatch: Dispatch = Dispatch.INSTANT
    workers: int = 4
    slots: int = 16
    clients: int = 80
    steps: int = 1200
    seed: int = 0

    @property
    def config(self) -> DecodeConfig:
        return DecodeConfig(
            policy=self.policy,
            dispatch=self.dispatch,
            lengths=LENGTHS,
            workers=self.workers,
            slots=self.slots,
            steps=WARMUP + self.steps,
            warmup=WARMUP,
            step_time=STEP_TIME,
            seed=self.seed,
            dispatch_delay=int(self.dispatch is Dispatch.POOL),
            **PAPER,
        )


class _Given(ClosedStream):
    """Remembers whom it gave out after the warm-up."""

    def __init__(self, cluster: Cluster) -> None:
        rng = np.random.default_rng(cluster.seed)
        prompts, outputs = LENGTHS.draw(rng, 60_000)
        super().__init__(
            iter(list(zip(prompts.tolist(), outputs.tolist(), strict=True))), cluster.clients
        )
        self.jobs: list[Job] = []
        self._steps = 0

    def due(self, now_s: float, waiting: int, inside: int = 0) -> list[Job]:
        jobs = super().due(now_s, waiting, inside)
        self.jobs += jobs if self._steps >= WARMUP else []
        self._steps += 1
        return jobs


def run(cluster: Cluster) -> tuple[StepRecords, list[Job]]:
    """The steps of a simulated cluster, and its requests."""
    stream = _Given(cluster)
    records = simulate(cluster.config, stream=stream, keep_records=True).records
    assert records is not None
    return records, stream.jobs


def with_prompts(policy: str, dispatch: Dispatch, cached: float = 0.0) -> ServingConfig:
    """Whole engines that compute the prompts of clients that each wait."""
    rng = np.random.default_rng(0)
    prompts, outputs = rng.lognormal(6.5, 0.9, 1500), rng.geometric(1 / 40, 1500)
    rows = tuple(
        TraceRequest(int(prompt * (1 - cached)) + 1, int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    return ServingConfig(
        policy=policy,
        trace=Trace("made", "made", rows),
        arrivals=Arrivals("closed", 96),
        requests=len(rows),
        workers=4,
        slots=16,
        batch_tokens=512,
        step_time=StepTime(2e-3, 2e-7, 1e-5, 1e-5),
        dispatch=dispatch,
        dispatch_delay=int(dispatch is Dispatch.POOL),
    )


def with_conversations(policy: str, dispatch: Dispatch, *, shared: bool = True) -> ServingConfig:
    """As ``with_prompts``, of conversations whose turns repeat all before; or as long prompts."""
    rng = np.random.default_rng(0)
    ids, rows = count(), list[TraceRequest]()
    while len(rows) < 1500:
        talks = [list(islice(ids, 6)) for _ in range(120)]
        for _ in range(5):
            for talk in talks:
                talk += islice(ids, int(rng.integers(2, 5)))
                blocks = talk if shared else list(islice(ids, len(talk)))
                output_tokens = int(rng.geometric(1 / 40))
                rows.append(
                    TraceRequest(64 * len(talk) + 9, output_tokens, None, tuple(blocks), 64)
                )
    return replace(
        with_prompts(policy, dispatch),
        trace=Trace("made", "made", tuple(rows[:1500])),
        step_time=StepTime(2e-3, 2e-7, 1e-5, 4e-5),
        block_tokens=64,
    )


def recorded_with_prompts(config: ServingConfig, cached: float = 0.0) -> Recording:
    """Of ``with_prompts``; requests tell their prompts with what was cached of them."""
    records = simulate_serving(config, keep_records=True).records
    assert records is not None
    ends_s = np.cumsum(records.seconds).tolist()
    steps = [
        step(
            number,
            records.loads[number].tolist(),
            records.seconds[number],
            time_s=end_s,
            running=records.running[number].tolist(),
            prompts=records.prompts[number].tolist(),
            tokens=int(records.tokens[number]),
            pool=max(0, 96 - int(records.running[number].sum())),
        )
        for number, end_s in enumerate(ends_s)
    ]
    rows = config.trace.requests[config.requests // 5 : config.requests - 96]
    numbers = BlockNumbers()
    requests = [
        replace_fields(
            request(
                n,
                (n + 1) * ends_s[-1] / len(rows),
                round(row.prompt_tokens / (1 - cached)),
                row.output_tokens,
            ),
            blocks=numbers.runs(row.blocks) if row.blocks else UNSET,
        )
        for n, row in enumerate(rows)
    ]
    head = header(
        policy=config.policy,
        dispatch=config.dispatch.value,
        block_tokens=64 if any(row.blocks for row in rows) else None,
    )
    return Recording(head, tuple(steps), tuple(requests))


def header(workers: int = 4, slots: int | None = 16, **changed: object) -> Header:
    """Of one group; of ``changed``, fields of the header and of its workers."""
    kv_tokens = changed.pop("kv_tokens", 1_000_000)
    block_tokens = changed.pop("block_tokens", None)
    group = RecordedGroup(
        False,
        tuple(
            RecordedWorker(f"w{rank}", rank, slots, kv_tokens, block_tokens)  # type: ignore[arg-type]
            for rank in range(workers)
        ),
    )
    given = {
        "source": "serve",
        "policy": "round_robin",
        "dispatch": "instant",
        "groups": {GROUP: group},
    }
    return Header(evenstep="0", started_unix_s=0.0, **given | changed)  # type: ignore[arg-type]


def step(
    number: int, loads: Sequence[int | None], step_s: float = 0.01, **changed: object
) -> StepLine:
    """A step that ends at its number times its length; 4 run where there is a load."""
    fields: dict[str, object] = {
        "time_s": step_s * number,
        "running": [None if load is None else 4 * bool(load) for load in loads],
    }
    return StepLine(number, GROUP, step_s=step_s, loads=list(loads), **fields | changed)  # type: ignore[arg-type]


def request(
    number: int, ended_s: float, prompt: int = 400, output: int = 40, outcome: str = "completed"
) -> RequestLine:
    """One that arrived a second before its end."""
    arrival_s = ended_s - 1
    return RequestLine(
        number, GROUP, arrival_s, arrival_s, arrival_s, ended_s, "w0", prompt, output, outcome
    )


def recording(cluster: Cluster, **changed: object) -> Recording:
    """Of a simulated cluster; which worker runs how many is not true, their sum is."""
    records, jobs = run(cluster)
    ends_s = list(accumulate(records.seconds.tolist()))
    ranks = range(cluster.workers)
    steps = [
        step(
            number,
            loads,
            step_s,
            time_s=end_s,
            running=[min(cluster.slots, max(0, tokens - rank * cluster.slots)) for rank in ranks],
            pool=waiting if cluster.dispatch is Dispatch.POOL else 0,
            queued=0 if cluster.dispatch is Dispatch.POOL else cluster.clients - tokens,
        )
        for number, (loads, step_s, end_s, tokens, waiting) in enumerate(
            zip(
                records.loads.tolist(),
                records.seconds.tolist(),
                ends_s,
                records.tokens.tolist(),
                records.waiting.tolist(),
                strict=True,
            ),
            start=1,
        )
    ]
    span_s = ends_s[-1]
    ended = [
        request(n, span_s * (n + 1) / len(jobs), job.prompt_tokens, job.output_tokens)
        for n, job in enumerate(jobs)
    ]
    in_force = {"policy": cluster.policy, "dispatch": cluster.dispatch.value}
    head = header(cluster.workers, cluster.slots, **in_force | changed)
    return Recording(head, tuple(steps), tuple(ended))


def like(cluster: Cluster, policy: str, dispatch: Dispatch) -> Cluster:
    """The same requests under another policy."""
    return replace(cluster, policy=policy, dispatch=dispatch)
