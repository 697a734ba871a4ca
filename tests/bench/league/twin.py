"""How far emulated engines are from a real one, workload by workload.

    python -m tests.bench.league.twin [--workloads NAME,…] [--seeds 1]

One vLLM on the CPU (``make engine``) with two layers of random weights and a trained tokenizer
serves the workloads as ``real`` scales them, through evenstep's defaults. Its snapshots tell what
each of its steps held and took; then an emulated engine whose steps cost what fits these best gets
the same requests. Which steps there are, what is cached and how long requests wait is the
emulator's own.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from router.config.worker_notation import parse_workers
from tests.bench.league import real
from tests.bench.league.own import EVENSTEP
from tests.bench.league.page import REAL
from tests.bench.league.parts import CLIENT, DATA, EnginesOf, emulated, measured
from tests.bench.league.workloads import Workload
from tests.gpu.serving import LLAMA, SHAPES
from tests.support.engine import Installation, installation, running_engine
from tests.support.figure_files import write_part
from tests.support.rank_steps import RankStep, reading
from tests.support.server import free_port

SLOTS, BLOCK, KV_TOKENS, BATCH_TOKENS = 64, 32, 200_000, 2048
CODE = (
    *(*SERVING, *EMULATION, *CLIENT, "engine_patches/plugin", "engine_patches/scheduler.py"),
    *("tests/bench/league/twin.py", "tests/bench/league/real.py"),
)
FIGURES = (
    *("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "tokens_per_s", "hit_share"),
    *("completed", "failed", "requests", "busy"),
)


def model(where: Installation, folder: Path) -> Path:
    """Two layers' shape with the trained model's tokenizer."""
    made = folder / "two-layers"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (made / name).symlink_to(where.trained / name)
    trained = json.loads((where.trained / "config.json").read_text(encoding="utf-8"))
    shared = {key: trained[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    shape = {**LLAMA, **SHAPES["tiny"], **shared}
    (made / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return made


@contextlib.contextmanager
def engine(where: Installation, folder: Path) -> Iterator[str]:
    """A real one, as ``evenstep serve --worker`` takes it."""
    snapshots = f"tcp://127.0.0.1:{free_port(2)}"
    flags = (
        *("--load-format", "dummy", "--enable-prefix-caching", "--max-model-len", "32768"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(KV_TOKENS // BLOCK)),
        *("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(BATCH_TOKENS)),
        *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
        *("--additional-config", json.dumps({"evenstep": {"snapshots": snapshots}})),
        *("--logits-processors", "engine_patches.hidden_length:HiddenLength"),
    )
    of_two_layers = replace(where, model=model(where, folder))
    with running_engine(of_two_layers, folder, *flags, environment=_FIRST_RUNNER) as server:
        yield f"{server.url},slots={SLOTS},snapshots={snapshots}"


# Hidden lengths are a logits processor of vLLM's first model runner.
_FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def twin(workload: Workload, step_time: Sequence[float]) -> Workload:
    """The same requests for an emulated engine of these costs."""
    cost = ",".join(f"{term:.6g}" for term in step_time)
    flags = ("--step-time", cost, "--batch-tokens", str(BATCH_TOKENS))
    memory = ("--kv-tokens", str(KV_TOKENS), "--block-tokens", str(BLOCK))
    return replace(workload, fleet=(*flags, *memory))


def fitted(steps: Sequence[RankStep]) -> tuple[list[float], float]:
    """C, t_l, t_r and t_p, none below 0, by least squares; what share of variance they explain."""
    held = np.array([(1.0, s.load_tokens, s.running, s.prompt_tokens) for s in steps])
    took_s = np.array([step.step_s for step in steps])
    cost, used = np.zeros(held.shape[1]), np.ones(held.shape[1], bool)
    while used.any():
        scale = held[:, used].max(axis=0)
        found = np.linalg.lstsq(held[:, used] / scale, took_s, rcond=None)[0] / scale
        if found.min() >= 0:
            cost[used] = found
            break
        used[np.flatnonzero(used)[found.argmin()]] = False
    left = took_s - held @ cost
    return cost.tolist(), float(1 - left.var() / took_s.var())


def compared(of: real.Cluster, workload: Workload, seed: int) -> dict[str, Any]:
    """Figures of the real engine and of its emulation."""
    (spec,) = parse_workers(of.workers)
    assert spec.snapshots is not None
    with reading([spec.snapshots]) as log:
        figures = _run(workload, seed, of.of)
        (steps,) = log.ranks()
    cost, explained = fitted([*steps.values()])
    return {
        "step_time": cost,
        "explained": explained,
        "steps": len(steps),
        "real": figures,
        "emulated": _run(twin(workload, cost), seed, emulated),
    }


def _run(workload: Workload, seed: int, engines_of: EnginesOf) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="evenstep-league-") as scratch:
        found, _ = measured(EVENSTEP[0], workload, seed, Path(scratch), engines_of)
    return {key: found[key] for key in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.league.twin")
    parser.add_argument("--workloads", type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    if (where := installation()) is None:
        parser.error("there is no vLLM for CPUs here: make engine")
    with tempfile.TemporaryDirectory(prefix="evenstep-twin-") as scratch:
        folder = Path(scratch)
        with engine(where, folder) as worker:
            of = real.with_capacity(real.cluster(worker), EVENSTEP[0], folder)
            print(f"{of.requests_per_s:.3g} requests/s, stretch {of.stretch:.3g}", flush=True)
            known = real.workloads(of)
            for name in given.workloads or known:
                for seed in range(given.seeds):
                    found = compared(of, known[name], seed)
                    told = {"stretch": of.stretch, "vllm": where.vllm}
                    header = origin(Engines.REAL, CODE)
                    write_part(DATA / REAL, f"{name}, seed {seed}", found | told, header)
                    print(name, seed, found, flush=True)


if __name__ == "__main__":
    main()
