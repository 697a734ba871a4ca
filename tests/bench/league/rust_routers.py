"""vllm-router, sglang-router and smg: one family, whose flags and metrics differ.

vllm-router's ``kv_aware`` is left out: it takes no prefix for cached in a request with
``vllm_xargs``, by which the bench tells engines an answer's length. Its program scheduling reads
the metrics of number 0 alone from a URL; of ranks with other numbers it goes by its own counts. smg
reads KV events from gRPC engines alone.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.pins import PEERS
from tests.bench.league.starting import answer, kv_tokens, router, samples, told
from tests.support.server import free_port

# Seconds between looks at the engines' load, where the product's own default is 10 or 30.
LOOK_S = 1
# A dead engine is found, and one that is back is tried, as soon as by the other products: by
# default these three look once a minute.
HEALTH = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"),
    *("--health-success-threshold", "1", "--cb-timeout-duration-secs", "5"),
)

_VLLM = {
    "vllm_router_processed_requests_total": ("worker",),
    "vllm_router_cb_outcomes_total": ("worker", "outcome"),
    "vllm_router_prefix_routing_decisions_total": ("outcome",),
    "vllm_router_kv_routing_inputs_total": ("result",),
    "vllm_router_agent_aware_transitions_total": ("reason",),
    "vllm_router_agent_aware_capacity_observation_fresh": ("target",),
    "vllm_router_retries_total": (),
    "vllm_router_request_errors_total": (),
}
_SMG = {
    "smg_worker_requests_total": ("worker",),
    "smg_worker_cb_outcomes_total": ("worker", "outcome"),
    "smg_worker_selection_total": ("policy",),
    "smg_cache_aware_policy_branch_total": ("branch",),
    "smg_cache_aware_match_ratio_sum": (),
    "smg_cache_aware_match_ratio_count": (),
    "smg_engine_load_polls_total": ("worker", "mode"),
    "smg_worker_retries_total": (),
    "smg_worker_overload_fallback_total": (),
    "smg_consistent_hashing_policy_branch_total": ("branch",),
    "smg_manual_policy_branch_total": ("branch",),
    "smg_prefix_hash_policy_branch_total": ("branch",),
}


@contextlib.contextmanager
def _started(
    program: Sequence[str],
    flags: Sequence[str],
    wanted: Mapping[str, Sequence[str]],
    engines: Engines,
    folder: Path,
) -> Iterator[Running]:
    port, metrics = free_port(), free_port()
    command = [
        *program,
        *("--worker-urls", *engines.urls),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
        *flags,
    ]
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        got = answer(f"{url}/workers")
        workers = [] if got is None else got.json()["workers"]
        healthy = {worker["url"] for worker in workers if worker["is_healthy"]}
        return healthy == set(engines.urls) and answer(f"{url}/health") is not None

    def evidence() -> dict[str, float]:
        return told(samples(f"http://127.0.0.1:{metrics}/metrics"), wanted, engines)

    with router(command, port, folder / "router.log", ready, evidence) as running:
        yield running


def _entrant(
    peer: str,
    policy: str,
    what: str,
    program: Callable[[Path], Sequence[str]],
    wanted: Mapping[str, Sequence[str]],
    flags: Sequence[str],
    more: Callable[[Engines], Sequence[str]] = lambda _: (),
    of_engines: str = "",
) -> Entrant:
    """``of_engines``: how ``more`` is written, whose values are those of the engines."""

    @contextlib.contextmanager
    def start(engines: Engines, folder: Path) -> Iterator[Running]:
        given = [*flags, *HEALTH, *more(engines)]
        started = program(PEERS[peer].install() / "bin")
        with _started(started, given, wanted, engines, folder) as one:
            yield one

    written = " ".join((*flags, *HEALTH, of_engines)).strip()
    code = ("tests/bench/league/rust_routers.py",)
    return Entrant(f"{peer} {policy}", peer, written, what, start, code=code)


def _vllm_program(binaries: Path) -> Sequence[str]:
    # It takes "warning" for a level that it does not know, and logs each request.
    return (str(binaries / "vllm-router"), "--log-level", "error")


def _vllm(
    name: str,
    what: str,
    *flags: str,
    more: Callable[[Engines], Sequence[str]] = lambda _: (),
    of_engines: str = "",
) -> Entrant:
    return _entrant("vllm-router", name, what, _vllm_program, _VLLM, flags, more, of_engines)


def program_settings(engines: Engines, tokens: int) -> dict[str, object]:
    """vllm-router's program scheduling, as its documentation has it for a deployment.

    That is the global queue, the KV memory of an engine, and costs as measured there: here those of
    the emulated steps. Sessions are told by the header that the others use too.
    """
    settings: dict[str, object] = {
        "program_scheduling_enable_key": "auto",
        "global_queue": True,
        "token_capacity_per_dp_rank": tokens,
        "max_active_programs_per_target": max(64, engines.slots),
    }
    if engines.step_time:
        fixed, token, request, prompt = (*engines.step_time, 0.0, 0.0)[:4]
        scale = engines.time_scale
        settings["prefill_cost_model"] = {
            "intercept_seconds": fixed * scale,
            "linear_seconds_per_1k_tokens": 1000 * prompt * scale,
            "quadratic_seconds_per_1k_tokens_squared": 0.0,
        }
        settings["decode_throughput_model"] = {
            "fixed_step_seconds": fixed * scale,
            "batch_step_seconds_per_request": request * scale,
            "context_step_seconds_per_token": token * scale,
        }
    return settings


def _programs(engines: Engines) -> Sequence[str]:
    settings = program_settings(engines, kv_tokens(engines))
    return ("--program-scheduling-config-json", json.dumps(settings))


VLLM_ROUTER = (
    _vllm("round_robin", "each engine in turn", "--policy", "round_robin"),
    _vllm(
        "power_of_two",
        "of two engines drawn at random the one with fewer requests",
        *("--policy", "power_of_two", "--worker-startup-check-interval", str(LOOK_S)),
    ),
    _vllm(
        "cache_aware",
        "its own tree of the token ids that it has sent to each engine: the longest match, unless "
        "requests are out of balance",
        *("--policy", "cache_aware"),
    ),
    _vllm(
        "sticky_least_loaded",
        "sessions keep the engine that had the fewest requests when they began",
        *("--policy", "sticky_least_loaded"),
    ),
    _vllm(
        "consistent_hash",
        "by hash of the session",
        *("--policy", "consistent_hash"),
    ),
    _vllm(
        "programs",
        "sessions keep their engine, and wait in the router while it lacks KV memory for them",
        *("--policy", "consistent_hash", "--enable-program-scheduling"),
        more=_programs,
        of_engines="--program-scheduling-config-json with global_queue, sessions by header, and "
        "the engines' KV memory, slots and step costs",
    ),
)


def _sglang_program(binaries: Path) -> Sequence[str]:
    launch = ("-m", "sglang_router.launch_router")
    return (str(binaries / "python"), *launch, "--log-level", "warn")


def _sglang(name: str, what: str, *flags: str) -> Entrant:
    return _entrant("sglang-router", name, what, _sglang_program, _SMG, flags)


SGLANG_ROUTER = (
    _sglang("round_robin", "each engine in turn", "--policy", "round_robin"),
    _sglang(
        "power_of_two",
        "of two engines drawn at random the one with less load",
        *("--policy", "power_of_two", "--worker-startup-check-interval", str(LOOK_S)),
    ),
    _sglang(
        "cache_aware",
        "its own tree of the texts that it has sent to each engine: the longest match, unless "
        "requests are out of balance",
        *("--policy", "cache_aware"),
    ),
    _sglang(
        "manual",
        "sessions keep the engine that had the fewest requests when they began",
        *("--policy", "manual", "--assignment-mode", "min_load"),
    ),
)


def _smg_program(binaries: Path) -> Sequence[str]:
    return (str(binaries / "smg"), "launch", "--log-level", "warn")


def _slower(engines: Engines) -> Sequence[str]:
    """What it allows an engine to be silent, stretched as the engines' time is."""
    scale = max(1.0, engines.time_scale)
    stall, wedge = math.ceil(2 * scale), math.ceil(3 * scale)
    return ("--worker-stall-secs", str(stall), "--worker-wedge-secs", str(wedge))


_SLOWER = "--worker-stall-secs 2 --worker-wedge-secs 3, times the engines' time scale"
# Emulated engines have no tokenizer to load, and nobody asks for a history.
_SMG_WITHOUT = ("--history-backend", "none", "--disable-tokenizer-autoload")


def _smg(name: str, what: str, *flags: str) -> Entrant:
    given = ("--policy", name, "--load-monitor-interval", str(LOOK_S), *flags, *_SMG_WITHOUT)
    return _entrant("smg", name, what, _smg_program, _SMG, given, _slower, _SLOWER)


_SESSION = ("--routing-key-headers", "x-session-id")

SMG = (
    _smg(
        "cache_aware",
        "its own tree of the texts that it has sent to each engine: the longest match, unless that "
        "engine has far more requests; else the least wait that it expects by the engines' metrics",
    ),
    _smg("power_of_two", "of two engines drawn at random the one with the least expected wait"),
    _smg("least_load", "least expected wait, by the engines' metrics"),
    _smg("round_robin", "each engine in turn"),
    _smg(
        "prefix_hash", "by hash of a prompt's beginning, unless that engine has too many requests"
    ),
    _smg("consistent_hashing", "by hash of the session", *_SESSION),
    _smg(
        "manual",
        "sessions keep the engine that had the fewest requests when they began",
        *(*_SESSION, "--assignment-mode", "min_load"),
    ),
)
