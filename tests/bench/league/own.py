"""``evenstep serve``: as it comes, and with the rules of other routers in its place."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from types import MappingProxyType

from loadgen.demo.run import all_up
from loadgen.report.origin import SERVING
from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.starting import router, samples, told
from tests.support.server import free_port

# As long as the other routers let a request wait; requests that may wait.
PATIENCE_S, POOL = 600.0, 16_384
STARVATION_S = 5.0

_ON_ARRIVAL = ("--dispatch", "instant")

_FIGURES = {
    "evenstep_requests_assigned_total": (),
    "evenstep_requests_total": ("outcome",),
    "evenstep_snapshots_received_total": (),
    "evenstep_engine_metrics_reads_total": (),
    "evenstep_kv_event_messages_received_total": (),
    "evenstep_prefix_prompt_tokens_total": (),
    "evenstep_prefix_foretold_tokens_total": (),
    "evenstep_prefix_found_tokens_total": (),
    "evenstep_prefix_guessed_tokens_total": (),
    "evenstep_step_cost_seconds": ("term",),
    "evenstep_policy_errors_total": (),
}

# What tests/bench/tune_peer_rules.py found, by the seconds of a prompt token that it was tuned for.
TUNED: Mapping[str, Mapping[float, str]] = MappingProxyType(
    {
        "kv_cost": MappingProxyType({5e-5: "64", 5e-6: "8"}),
        "prefix_score": MappingProxyType({5e-5: "1,0.5,2", 5e-6: "1,2,2"}),
    }
)


def weights(rule: str, engines: Engines) -> str:
    """Those for the nearest cost of a prompt token; the costliest where none is told."""
    by_cost = TUNED[rule]
    cost = (*engines.step_time, 0.0, 0.0, 0.0, 0.0)[3] or max(by_cost)
    return by_cost[min(by_cost, key=lambda each: abs(log(each / cost)))]


_CODE = (*SERVING, "router/config", "router/serve", "tests/bench/league/own.py")


def _without_plug_in(engines: Engines) -> list[str]:
    """Workers whose engines have no plug-in; metrics and KV events are vLLM's own."""
    specs = [
        ",".join(part for part in spec.split(",") if not part.startswith("snapshots="))
        for spec in engines.workers
    ]
    if not engines.kv_events:
        return specs
    streams = [f"tcp://127.0.0.1:{port}" for port in engines.kv_events]
    return [f"{spec},kv_events={url}" for spec, url in zip(specs, streams, strict=True)]


def _command(port: int, workers: Sequence[str], scale: float, tuned: str | None) -> list[str]:
    program = ["tests.bench.league.tuned", tuned] if tuned else ["router.cli"]
    return [
        *(sys.executable, "-m", *program),
        *("serve", "--port", str(port), "--log-level", "warning"),
        *(part for spec in workers for part in ("--worker", spec)),
        *("--queue-timeout", f"{PATIENCE_S * scale:g}", "--pool-size", str(POOL)),
        *("--starvation", f"{STARVATION_S * scale:g}"),
    ]


def _evenstep(name: str, what: str, *flags: str, tuned: str = "", plug_in: bool = True) -> Entrant:
    @contextlib.contextmanager
    def start(engines: Engines, folder: Path) -> Iterator[Running]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        workers = engines.workers if plug_in else _without_plug_in(engines)
        own = f"{tuned}={weights(tuned, engines)}" if tuned else None
        with router(
            [*_command(port, workers, engines.time_scale, own), *flags],
            port,
            folder / "router.log",
            lambda: bool(all_up(url, len(engines.workers))),
            lambda: told(samples(f"{url}/metrics"), _FIGURES, engines),
        ) as running:
            yield running

    patience = f"--queue-timeout {PATIENCE_S:g} --pool-size {POOL}"
    streams = "--worker …,snapshots=…" if plug_in else "--worker …,kv_events=…"
    written = " ".join((*flags, patience, streams))
    code = (*_CODE, "tests/bench/league/tuned.py") if tuned else _CODE
    return Entrant(f"evenstep {name}".strip(), "evenstep", written, what, start, code=code)


def _rule(policy: str, what: str, *, tuned: bool = False) -> Entrant:
    """A per-request rule, on arrival, as the routers that it is from have it."""
    flags = ("--policy", policy, *_ON_ARRIVAL)
    name = f"{policy} tuned" if tuned else policy
    return _evenstep(name, what, *flags, tuned=policy if tuned else "")


EVENSTEP = (
    _evenstep("", "bfio: the whole pool at once, so that the fullest engine delays least"),
    _evenstep(
        "without plug-in",
        "the same, before engines that report no steps: it reads their metrics and KV events",
        plug_in=False,
    ),
    _evenstep(
        "without prompt budgets",
        "the same, each engine's steps as long as vLLM makes them",
        *("--prompt-budget", "off"),
    ),
    _evenstep("on arrival", "the same costs, each request sent as it comes", *_ON_ARRIVAL),
    _rule("round_robin", "each engine in turn"),
    _rule("least_tokens", "fewest KV tokens"),
    _rule("prefix_score", "llm-d's score of cached prefix, queue and free KV memory"),
    _rule("prefix_score", "the same, its weights tuned on conversations", tuned=True),
    _rule("kv_cost", "NVIDIA Dynamo's cost: prompt tokens to compute plus resident tokens"),
    _rule("kv_cost", "the same, its weight tuned on conversations", tuned=True),
    _rule("least_prefill", "fewest prompt tokens to compute, as vLLM on TPU"),
    _rule("lmetric", "least product of prompt tokens to compute and batch size"),
    _rule("barrier_time", "least time added at the barrier, by the learned cost of a step"),
)
