"""The league on engines that run already, such as vLLM's on GPUs.

The workloads are those of emulated engines, with as many more or fewer requests as there are
engines, and all times stretched by what the cluster serves: an open load of 80 % is 80 % of that
cluster's. What it serves is measured first, through evenstep, and kept.
"""

import contextlib
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from loadgen.emulator.generation import HIDDEN_LENGTH
from loadgen.emulator.text import CHARS_PER_TOKEN
from router.config.worker_notation import parse_workers
from router.core.errors import ConfigError
from tests.bench.league.entrant import Engines, Entrant
from tests.bench.league.parts import EnginesOf, measured
from tests.bench.league.starting import samples
from tests.bench.league.workloads import (
    CAP_TOKENS,
    CAPACITY,
    SIMULATED,
    WORKLOADS,
    Session,
    Workload,
    closed,
    piece,
)

FILE = "cluster.json"
# Why a workload, or a peer, is left out.
CANNOT_PEERS: Mapping[str, str] = {
    "dynamo": "the bench's relay numbers its tokens as emulated engines do"
}
CANNOT: Mapping[str, str] = {
    "faults": "the league breaks no engine that it has not started",
    "unequal": "these engines are as equal as they are",
    "chat-scale-1": "the same as chat, before fewer ranks: these are as many as they are",
}
_RANKS, _DECODE_SLOTS = 8, 8 * 32  # that the workloads are written for
_CLIENTS, _EACH = 1.25, 6  # clients and requests per slot of the capacity's measurement
_SEEDS = 1000  # apart: requests of several seeds make a larger cluster's
_OWN_KEYS, _OWN_TOKENS = 1 << 23, 5
_PROBE_TOKENS, _PROBE_MOST = 3, 16
_TOKENIZER = 1.1  # tokens of a trained tokenizer for four characters, at most
_CALL_S = 120.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Engines, each as ``evenstep serve --worker`` takes it.

    Attributes:
        workers: their texts.
        told: what the engines tell of themselves, the same for all.
        engines: what every entrant is told.
        requests_per_s: of Azure's lengths, that they serve at saturation; 0: not yet known.
    """

    workers: Sequence[str]
    told: Mapping[str, Any]
    engines: Engines
    requests_per_s: float = 0.0

    @property
    def stretch(self) -> float:
        """Its seconds for one of the emulated engines that workloads are written for."""
        return CAPACITY * len(self.workers) / _RANKS / self.requests_per_s

    @contextlib.contextmanager
    def of(self, _: Workload, seed: int, folder: Path) -> Iterator[tuple[Engines, Any]]:
        """The engines as they are, for any workload."""
        yield self.engines, None


def cluster(text: str) -> Cluster:
    """Read workers, and ask their engines for what entrants are told.

    Args:
        text: workers, apart by spaces.

    Raises:
        ConfigError: a worker is none, lacks its slots, or its engine does not answer as vLLM's.
    """
    workers = text.split()
    if not workers:
        raise ConfigError("name the engines: URLS='http://HOST:8000,slots=64 …'")
    specs = parse_workers(workers)
    if len({spec.url for spec in specs}) < len(specs):
        raise ConfigError("each engine needs a URL of its own, as other routers know no ranks")
    slots = {spec.slots for spec in specs}
    if len(slots) > 1 or None in slots:
        raise ConfigError(
            "each worker needs its slots, the same for all: ,slots=N as in --max-num-seqs N"
        )
    try:
        told = [_told(spec.url) for spec in specs]
        if any(one != told[0] for one in told):
            raise ConfigError(f"engines differ in what they tell of themselves: {told}")
        hidden = _ends_at_hidden_lengths(specs[0].url, told[0]["model"])
    except (httpx.HTTPError, LookupError, StopIteration, ValueError) as error:
        raise ConfigError(f"{specs[0].url} does not answer as vLLM does: {error!r}") from error
    return Cluster(
        workers,
        told[0] | {"hidden_lengths": hidden},
        Engines(
            urls=[spec.url for spec in specs],
            workers=workers,
            kv_events=(),  # where engines publish some, their workers' texts say so
            slots=slots.pop() or 0,
            block_tokens=told[0]["block_tokens"],
            model=told[0]["model"],
            time_scale=1.0,
            hidden_lengths=hidden,
            used=True,
        ),
    )


def _told(url: str) -> dict[str, Any]:
    """What figures depend on."""
    model = httpx.get(f"{url}/v1/models", timeout=_CALL_S).json()["data"][0]
    cache = next(
        labels for name, labels, _ in samples(f"{url}/metrics") if name == "vllm:cache_config_info"
    )
    return {
        "vllm": httpx.get(f"{url}/version", timeout=_CALL_S).json()["version"],
        "model": model["id"],
        "max_model_len": model.get("max_model_len"),
        "block_tokens": int(cache["block_size"]),
        "kv_blocks": int(cache["num_gpu_blocks"]),
    }


def _ends_at_hidden_lengths(url: str, model: str) -> bool:
    """Whether its vLLM runs ``engine_patches.hidden_length``."""
    body = {
        "model": model,
        "prompt": "the",
        "max_tokens": _PROBE_MOST,
        "temperature": 0,
        "vllm_xargs": {HIDDEN_LENGTH: _PROBE_TOKENS},
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_CALL_S).raise_for_status()
    return bool(answer.json()["usage"]["completion_tokens"] == _PROBE_TOKENS)


# --- workloads ------------------------------------------------------------------------------------


def workloads(of: Cluster) -> dict[str, Workload]:
    """Those that can run before a cluster whose capacity is known, as it serves them."""
    left_out = cannot(of)
    return {name: _on(of, each) for name, each in WORKLOADS.items() if name not in left_out}


def cannot(of: Cluster) -> Mapping[str, str]:
    """Workloads that are left out, with the reason."""
    most = of.told["max_model_len"]
    longest = {name: _longest(each) for name, each in WORKLOADS.items() if name not in CANNOT}
    return {
        **CANNOT,
        **{
            name: f"its requests need {tokens:,} tokens, and --max-model-len is {most:,}"
            for name, tokens in longest.items()
            if most is not None and tokens > most
        },
    }


def _longest(workload: Workload) -> int:
    """Tokens of the longest prompt, with some for the tokenizer, and of the longest answer."""
    asks = [ask for session in workload.sessions(0) for ask in session]
    prompt = max(len(ask.prompt) for ask in asks) / CHARS_PER_TOKEN
    return math.ceil(prompt * _TOKENIZER) + max(ask.output_tokens for ask in asks)


def _on(of: Cluster, workload: Workload) -> Workload:
    slots = len(of.workers) * of.engines.slots
    share = slots / _DECODE_SLOTS if workload.clients else len(of.workers) / workload.ranks
    return replace(
        workload,
        what=workload.what.replace(SIMULATED, "under evenstep, as measured"),
        sessions=partial(scaled, workload.sessions, share, of.stretch),
        ranks=len(of.workers),
        slots=of.engines.slots,
        time_scale=1.0,
        fleet=(),
        engine_s=workload.engine_s * of.stretch,
        targets_ms={name: value * of.stretch for name, value in workload.targets_ms.items()},
        clients=math.ceil(workload.clients * slots / _DECODE_SLOTS),
    )


def scaled(
    sessions: Callable[[int], Sequence[Session]], share: float, stretch: float, seed: int
) -> list[Session]:
    """``share`` times as many sessions, with all times ``stretch`` times as long."""
    rng, found = random.Random(f"{seed} scaled"), list[Session]()
    for copy in range(math.ceil(share)):
        left = min(1.0, share - copy)
        # Conversations of a trace come again in other seeds: each copy's begin with other words.
        own = piece(_OWN_KEYS - copy, _OWN_TOKENS) if copy else ""
        found += [
            [replace(ask, prompt=own + ask.prompt) for ask in each]
            for each in sessions(seed + _SEEDS * copy)
            if rng.random() < left
        ]
    slower = [[replace(ask, wait_s=ask.wait_s * stretch) for ask in each] for each in found]
    return sorted(slower, key=lambda session: session[0].wait_s)


# --- capacity -------------------------------------------------------------------------------------


def with_capacity(of: Cluster, evenstep: Entrant, folder: Path) -> Cluster:
    """The cluster with what it serves, measured once.

    Raises:
        ConfigError: the folder holds figures of another cluster, or nothing was answered.
    """
    file = folder / FILE
    if file.exists():
        kept = json.loads(file.read_bytes())
        if kept["cluster"] != _identity(of):
            raise ConfigError(
                f"{folder} holds figures of another cluster, {kept['cluster']}: name another "
                "folder with --out"
            )
    else:
        found = _saturated(of.of, evenstep, len(of.workers) * of.engines.slots)
        kept = {
            "cluster": _identity(of),
            "requests_per_s": found["goodput_per_s"],
            "step_time": step_time(found["evidence"]),
        }
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    engines = replace(of.engines, step_time=kept["step_time"])
    return replace(of, engines=engines, requests_per_s=kept["requests_per_s"])


def _identity(of: Cluster) -> dict[str, Any]:
    return {"workers": [*of.workers], **of.told}


def step_time(evidence: Mapping[str, float]) -> Sequence[float]:
    """C, t_l, t_r and t_p as evenstep has learned them; empty: it has not."""
    terms = ("step", "kv_token", "request", "prompt_token")
    cost = [evidence.get(f"evenstep_step_cost_seconds {term}", 0.0) for term in terms]
    return cost if cost[0] else ()


def _saturated(engines_of: EnginesOf, evenstep: Entrant, slots: int) -> Mapping[str, Any]:
    """Figures of Azure's lengths in a closed loop."""
    workload = Workload(
        name="capacity",
        what="clients that wait for their answers",
        sessions=partial(closed, math.ceil(_EACH * slots), CAP_TOKENS, trace="azure-conv"),
        ranks=0,
        slots=0,
        time_scale=1.0,
        fleet=(),
        engine_s=_CALL_S,
        targets_ms={"e2el": 1e9},
        clients=math.ceil(_CLIENTS * slots),
    )
    with tempfile.TemporaryDirectory(prefix="evenstep-league-") as scratch:
        found, _ = measured(evenstep, workload, 0, Path(scratch), engines_of)
    if found["failed"]:
        raise ConfigError(
            f"{found['failed']} requests failed, so nothing is known of the engines: "
            f"{found['errors']}"
        )
    return found
