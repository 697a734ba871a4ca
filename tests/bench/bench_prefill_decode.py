"""Prefill and decode apart, prefixes cached at both: our default beside kv_cost and prefix_score.

    python tests/bench/bench_prefill_decode.py [--cases mooncake,mooncake-busy,azure,azure-busy]
        [--arms bfio,through,kv_cost,prefix_score] [--seeds 3] [--live] [--time-scale 4]
        [--requests N] [--json FILE]

Simulated: the live dispatcher decides, on an event loop whose time passes only while nothing is to
be done, before the engines of the emulated fleet. 6 prefill workers, each stepping alone, and 8
decode workers behind a barrier fetch what they have not cached. `through`: bfio, and all prompts
go through the prefill workers. kv_cost and prefix_score choose the worker at both stages, by what
it has cached there, and dispatch on arrival at the second. Seeds are of the arrivals, and of
Azure's requests; the first fifth of the requests counts in the shares alone. --json takes a part
for each case.

--live: `evenstep serve` before the emulated fleet, real HTTP, beside the simulation of the same
requests at the same times, all of which count. For arms other than bfio the bench starts the
router, and changes in it what the simulation does.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import httpx
import numpy as np

from loadgen.demo.run import Fleet as Processes
from loadgen.demo.run import RunPlan, replay_arguments, serving
from loadgen.engine.engine import Engine
from loadgen.engine.kv_handoff import Fetch, TransferTime
from loadgen.engine.prefill_settings import PrefillTime
from loadgen.engine.prefix_cache import PrefixCache
from loadgen.engine.request import EngineRequest
from loadgen.replay.workload import plan
from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from loadgen.run.child_processes import Child
from loadgen.simulator.serving.rank import Rank
from loadgen.simulator.serving.serving_config import ServingConfig
from loadgen.simulator.serving.turns import Turn, turns_of
from loadgen.traces.arrivals import Arrivals
from loadgen.traces.trace import Trace, load_trace
from router import cli
from router.config.serve_settings import ServeSettings
from router.core.events import Fetched, SnapshotReceived, WorkerUp
from router.core.policies.policy_protocol import NOTHING, Known, Policy
from router.core.policies.policy_table import POLICIES
from router.core.state.cluster import Cluster
from router.core.state.group import Group
from router.core.step_time import StepTime
from router.core.types import Assignment, Dispatch, Outcome, Request, WorkerSpec, WorkerView
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.group_queue import DispatchSettings, GroupQueue
from router.serve import router as served
from router.serve.balancing import deciding
from tests.support.figure_files import write_part

CODE = (
    *("router/core", "router/dispatch", "loadgen/engine", "loadgen/simulator/serving"),
    *("loadgen/traces", "tests/bench/bench_prefill_decode.py"),
)
LIVE_CODE = (*SERVING, *EMULATION, "loadgen/replay", *CODE[3:])
GROUP, STAGE = "default", "default/prefill"
PREFILLS, DECODES, SLOTS, KV_TOKENS, CHUNK, BLOCK = 6, 8, 128, 1_000_000, 2048, 64
DECODE = StepTime(5e-3, 9.5e-8, per_prompt_token_s=5e-5)
PREFILL = PrefillTime().step_time
ARMS = ("bfio", "through", "kv_cost", "prefix_score")
WARMUP = 0.2
FOREVER_S = 1e9
KEPT_S, TIMEOUT_S = 30.0, 900.0
ROUTER = "--router"  # the bench is the router: what follows is for ``evenstep``


@dataclass(frozen=True)
class Case:
    """A load.

    Attributes:
        rate: requests per second.
        token_s: to fetch a token's KV.
    """

    trace: str
    requests: int
    rate: float
    token_s: float = TransferTime().per_token_s


CASES = {
    "mooncake": Case("mooncake-synthetic", 800, 6.0),
    "mooncake-busy": Case("mooncake-synthetic", 800, 9.0),
    "azure": Case("azure-conv", 2000, 70.0),
    "azure-busy": Case("azure-conv", 2000, 95.0),
}


@dataclass(frozen=True)
class Row:
    """One run, in engine seconds."""

    arm: str
    seed: int
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    passed_share: float
    decode_hit_share: float | None = None


def served_as(arm: str) -> tuple[str, Dispatch]:
    """The router's policy and dispatch."""
    if arm in POLICIES and arm != "bfio":
        return arm, Dispatch.INSTANT
    return "bfio", Dispatch.POOL


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while nothing is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if timers and not self._ready:  # type: ignore[attr-defined]
            if timers[0].cancelled():  # else the first of the heap is due first
                timers[:] = sorted(timer for timer in timers if not timer.cancelled())
                self._timer_cancelled_count = 0
            self._now_s = max(self._now_s, timers[0].when()) if timers else self._now_s
        super()._run_once()  # type: ignore[misc]


class SeesCaches(Policy):
    """A rule that counts what a worker need not fetch."""

    def __init__(self, rule: Policy, group: Group) -> None:
        self._rule = rule
        self._group = group

    def assign(
        self, waiting: Sequence[Request], workers: Sequence[WorkerView], known: Known = NOTHING
    ) -> Sequence[Assignment]:
        told = partial(self._group.prefixes.hits, worker_ids=[worker.id for worker in workers])
        known = replace(known, hits=self._group.prefix_hits or told)
        return self._rule.assign(waiting, workers, known)


class AllThrough(Dispatcher):
    """All prompts go through the prefill workers; a rule chooses at both stages."""

    def send_past(self, request: Request) -> None:
        """Never."""

    def _make_queue(self, group: Group) -> GroupQueue:
        queue, rule = super()._make_queue(group), self._deciding.policy()
        if not rule.solves:
            queue.decider.policy = SeesCaches(rule, group)
        return queue


class Barrier:
    """Engines that step together, and tell the dispatcher."""

    def __init__(self, fleet: "Fleet", ranks: Sequence[Rank], cost: StepTime) -> None:
        self._fleet = fleet
        self._ranks = ranks
        self._cost = cost
        self._steps = 0
        self._stepping = False

    def wake(self) -> None:
        if self._stepping or not any(rank.engine.unfinished for rank in self._ranks):
            return
        self._stepping = True
        now_s = self._fleet.loop.time()
        seconds = 0.0
        for rank in self._ranks:
            prompts = rank.begin(now_s, prefill=True).prefill_tokens
            engine = rank.engine
            own_s = self._cost.seconds(engine.batch_tokens, len(engine.batch), prompts)
            seconds = max(seconds, own_s)
        self._fleet.loop.call_later(seconds, self._end, seconds)

    def _end(self, seconds: float) -> None:
        self._stepping, self._steps, now_s = False, self._steps + 1, self._fleet.loop.time()
        told = [(rank, rank.finish(now_s, self._steps, seconds)) for rank in self._ranks]
        for rank, snapshot in told:
            self._fleet.dispatcher.apply(SnapshotReceived(rank.worker_id, snapshot, now_s))
        for rank in self._ranks:
            for request in rank.entered:
                self._fleet.first.pop(request.id).set_result(now_s)
            for request in rank.ended:
                self._fleet.ended.pop(request.id).set_result(now_s)
        # After what the requests do now.
        self._fleet.loop.call_soon(self._fleet.loop.call_soon, self.wake)


class Fleet:
    """The router's dispatcher before modelled engines, for one run."""

    def __init__(self, arm: str, turns: Sequence[Turn], seed: int, token_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.first: dict[str, asyncio.Future[float]] = {}
        self.ended: dict[str, asyncio.Future[float]] = {}
        self._turns = {f"es-{turn.number:020x}": turn for turn in turns}
        self._transfer = TransferTime(per_token_s=token_s)
        self._hit_tokens = 0
        rule, dispatch = served_as(arm)
        chosen = deciding(ServeSettings(policy=rule, seed=seed))
        settings = ServeSettings(dispatch=dispatch, policy=rule).of(DispatchSettings)
        specs = [WorkerSpec(f"d{rank}", "", slots=SLOTS) for rank in range(DECODES)]
        specs += [WorkerSpec(f"p{rank}", "", role="prefill") for rank in range(PREFILLS)]
        self.dispatcher = (Dispatcher if arm == "bfio" else AllThrough)(
            Cluster(specs, lockstep={GROUP}),
            chosen,
            replace(settings, snapshot_stale_s=FOREVER_S, queue_timeout_s=FOREVER_S),
            self.loop.time,
        )
        self._ranks = {spec.id: self._rank(spec, place) for place, spec in enumerate(specs)}
        decode = [self._ranks[spec.id] for spec in specs if spec.role != "prefill"]
        barrier = Barrier(self, decode, DECODE)
        self._barriers = {rank.worker_id: barrier for rank in decode}
        for name, group in self.dispatcher.cluster.groups.items():
            ranks = [self._ranks[worker_id] for worker_id in group.workers]
            group.prefix_hits = partial(self._hits, ranks)
            if name == STAGE:
                for rank in ranks:
                    self._barriers[rank.worker_id] = Barrier(self, [rank], PREFILL)

    def _rank(self, spec: WorkerSpec, place: int) -> Rank:
        slots = SLOTS if spec.role != "prefill" else CHUNK - 1
        engine = Engine(
            *(slots, KV_TOKENS),
            block_tokens=BLOCK,
            chunk=CHUNK,
            lease_s=FOREVER_S,
            prefix_cache=PrefixCache(),
        )
        rank = Rank(spec.id, spec.stage, place, engine)
        self.dispatcher.apply(WorkerUp(spec.id))
        told = rank.snapshot(0.0, 0, 0.0, None)
        self.dispatcher.apply(SnapshotReceived(spec.id, told, 0.0))
        return rank

    def _hits(self, ranks: Sequence[Rank], request: Request) -> list[int]:
        turn = self._turns[request.first_id]
        return [rank.engine.hit_tokens(turn.chain, turn.prompt_tokens) for rank in ranks]

    async def serve(self, turn: Turn) -> tuple[float, float]:
        """One request; its TTFT and TPOT, nan with one output token."""
        assert turn.arrival_s is not None
        await asyncio.sleep(turn.arrival_s - self.loop.time())
        port, prompt, fetch = self.dispatcher, turn.prompt_tokens, None
        arrival_s = self.loop.time()
        request = Request(f"es-{turn.number:020x}", STAGE, prompt, arrival_s=arrival_s, exact=True)
        past = port.send_past(request)
        if past is None:
            worker = await port.submit(request)
            computing = EngineRequest(
                *(request.id, prompt, 1), keeps_kv=True, chain=turn.chain[: prompt // BLOCK]
            )
            await self._run(worker.id, computing)[1]
            kept = self._ranks[worker.id].engine.kept
            fetch = partial(Fetch, kept, request.id, self._transfer)
            past = port.hand_off(request, prompt, FOREVER_S)
        request, waiter = past
        worker = await waiter
        engine, now_s = self._ranks[worker.id].engine, self.loop.time()
        self._hit_tokens += engine.hit_tokens(turn.chain, prompt)
        answering = EngineRequest(
            *(request.id, prompt, turn.output_tokens),
            fetch=fetch(now_s) if fetch else None,
            chain=turn.chain,
        )
        first, ended = self._run(worker.id, answering)
        first_s = await first
        port.began(request, worker.id, first_s)
        port.apply(Fetched(request.id))
        ended_s = await ended
        port.end(request, Outcome.COMPLETED)
        further = turn.output_tokens - 1
        return first_s - arrival_s, (ended_s - first_s) / further if further else float("nan")

    def _run(
        self, worker_id: str, request: EngineRequest
    ) -> tuple[asyncio.Future[float], asyncio.Future[float]]:
        first = self.first[request.id] = self.loop.create_future()
        ended = self.ended[request.id] = self.loop.create_future()
        self._ranks[worker_id].add(request)
        self._barriers[worker_id].wake()
        return first, ended

    async def run(self, warmup: float) -> dict[str, float]:
        ticking = asyncio.create_task(self.dispatcher.run())
        turns = self._turns.values()
        found = await asyncio.gather(*map(self.serve, turns))
        ticking.cancel()
        ttft, tpot = np.array(found[int(warmup * len(found)) :]).T
        stats = self.dispatcher.deciders[STAGE].stats
        errors = sum(each.stats.policy_errors for each in self.dispatcher.deciders.values())
        assert not errors
        return {
            "ttft_mean_s": float(ttft.mean()),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "tpot_mean_s": float(np.nanmean(tpot)),
            "tpot_p99_s": float(np.nanpercentile(tpot, 99)),
            "passed_share": stats.passed / len(found),
            "decode_hit_share": self._hit_tokens / sum(turn.prompt_tokens for turn in turns),
        }


def turns(case: Case, seed: int, *, live: bool) -> list[Turn]:
    """The requests; with ``live`` those of a replay."""
    trace, arrivals = load_trace(case.trace), Arrivals("poisson", case.rate)
    rows = trace.sample(case.requests, seed)
    if live:
        rows = plan(trace, Arrivals("poisson", case.rate), case.requests, seed)
        arrivals = Arrivals("trace", 1.0)
    return turns_of(
        ServingConfig(
            policy="bfio",
            trace=Trace(trace.name, "drawn", rows),
            arrivals=arrivals,
            requests=case.requests,
            block_tokens=BLOCK,
            seed=seed,
        )
    )


def simulated(case: Case, arm: str, seed: int, *, live: bool = False) -> Row:
    async def whole() -> dict[str, float]:
        fleet = Fleet(arm, turns(case, seed, live=live), seed, case.token_s)
        return await fleet.run(0.0 if live else WARMUP)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return Row(arm, seed, **runner.run(whole()))


def served_live(
    case: Case, arm: str, seed: int, scale: float, folder: Path
) -> tuple[Row, float, Mapping[str, object]]:
    """One run, the 99th percentile of the client's lateness, and the engines' features."""
    fleet = Processes(
        *(DECODES, SLOTS, 0, str(DECODE)),
        prefill_workers=PREFILLS,
        more=(
            *("--kv-tokens", str(KV_TOKENS), "--block-tokens", str(BLOCK)),
            *("--batch-tokens", str(CHUNK), "--kv-transfer-time", f"1e-3,{case.token_s}"),
        ),
    )
    planned = RunPlan(
        *served_as(arm),
        requests=case.requests,
        cap_tokens=load_trace(case.trace).max_output_tokens,
        seed=seed,
        time_scale=scale,
        warmup=0.0,
        starvation_s=ServeSettings().starvation_s,
        trace=case.trace,
        arrivals=f"poisson:{case.rate:g}",
    )
    program = () if arm == "bfio" else (sys.executable, __file__, ROUTER)
    flags = ("--kv-expiry", f"{KEPT_S * scale:g}")
    files, report = folder / arm, folder / "report.json"
    report.unlink(missing_ok=True)
    with serving(planned, fleet, files, *flags, program=program) as (url, engines):
        with Child(replay_arguments(planned, fleet, url, report), folder / "replay.log") as client:
            client.finish(TIMEOUT_S)
        metrics = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S, trust_env=False).text
    found = json.loads(report.read_bytes())
    if found["completed"] != case.requests:
        raise SystemExit(f"{arm}: {found['completed']} completed, {found['errors']}")
    (past,) = re.findall(
        rf'^evenstep_prefills_passed_total{{group="{STAGE}"}} (\S+)$', metrics, re.M
    )
    times = {
        f"{name}_{part}_s": found[f"{part}_{name}_ms"] / 1e3
        for name, part in product(("ttft", "tpot"), ("mean", "p99"))
    }
    row = Row(arm, seed, **times, passed_share=float(past) / case.requests)
    return row, found["p99_lateness_ms"] / 1e3, engines


def beside_live(given: argparse.Namespace, name: str, arms: Sequence[str]) -> None:
    """Runs of a case whose order turns around with each seed."""
    case, scale = CASES[name], given.time_scale
    case = replace(case, requests=given.requests or case.requests)
    rows, physics = list[dict[str, object]](), dict[str, object]()
    with tempfile.TemporaryDirectory() as folder:
        for seed, arm in product(range(given.seeds), arms):
            arm = arm if seed % 2 == 0 else arms[-1 - arms.index(arm)]
            expected = simulated(case, arm, seed, live=True)
            row, lateness_s, engines = served_live(case, arm, seed, scale, Path(folder))
            print(f"live, client late by {lateness_s:.3f} s (p99): {told(name, row)}")
            print(f"simulated: {told(name, expected)}", flush=True)
            both = {"live": asdict(row), "simulated": asdict(expected)}
            rows.append({"arm": arm, "seed": seed, "lateness_p99_s": lateness_s, **both})
            physics = dict(engines)
    if given.json:
        part = {**asdict(case), "time_scale": scale, "rows": rows}
        write_part(given.json, name, part, origin(Engines.EMULATED, LIVE_CODE, physics))


def told(name: str, row: Row) -> str:
    hits = row.decode_hit_share
    return (
        f"{name}, {row.arm}, seed {row.seed}: TTFT {row.ttft_mean_s:.3f} s (p99 "
        f"{row.ttft_p99_s:.2f}), TPOT {1e3 * row.tpot_mean_s:.2f} ms (p99 "
        f"{1e3 * row.tpot_p99_s:.1f}), past {row.passed_share:.1%}"
        + ("" if hits is None else f", not fetched {hits:.1%}")
    )


def route(arguments: Sequence[str]) -> None:
    """``evenstep`` with an arm's dispatcher."""
    vars(served)["Dispatcher"] = AllThrough
    sys.argv = ["evenstep", *arguments]
    cli.main()


def main() -> None:
    if sys.argv[1:2] == [ROUTER]:
        route(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--time-scale", type=float, default=4.0)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    arms = given.arms.split(",")
    for name in given.cases.split(","):
        if given.live:
            beside_live(given, name, arms)
            continue
        rows = list[Row]()
        for seed, arm in product(range(given.seeds), arms):
            row = simulated(CASES[name], arm, seed)
            rows.append(row)
            print(told(name, row), flush=True)
        if given.json:
            part = {**asdict(CASES[name]), "rows": [asdict(row) for row in rows]}
            write_part(given.json, name, part, origin(Engines.SIMULATED, CODE))


if __name__ == "__main__":
    main()
