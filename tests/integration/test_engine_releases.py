"""Whole engines of other releases of vLLM: the plug-in tells what they count, and they serve.

The oldest that can be had for this machine's torch, and the newest, which has the CPU engine's
compiled parts; ``make test-releases`` tests those between, too.
"""

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engine import MODEL, Installation
from tests.support.engine_sources import serving
from tests.support.engine_watch import counted, told, watching
from tests.support.server import running_router

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ALL = "EVENSTEP_ALL_RELEASES"
BETWEEN = ("0.28.0", "0.29.0", "0.30.0", "0.31.0")
RELEASES = ("0.27.1", *(BETWEEN if os.environ.get(ALL) else ()), "0.33.0")
BLOCKS, SLOTS, TOKENS = 24, 8, 60
FLAGS = (
    *("--scheduler-cls", "engine_patches.scheduler.EvenstepScheduler"),
    *("--num-gpu-blocks-override", str(BLOCKS + 1), "--max-num-seqs", str(SLOTS)),
    *("--max-model-len", "512", "--max-num-batched-tokens", "128", "--enable-prefix-caching"),
    *("--logits-processors", "engine_patches.end_signal:EndSignal"),
    "engine_patches.hidden_length:HiddenLength",
)


@pytest.mark.parametrize("release", RELEASES)
def test_a_whole_engine(engine_installation: Installation, tmp_path: Path, release: str) -> None:
    vllm = serving(release, engine_installation.python)
    settings: dict[str, Any] = {"end_signal": True, "admission": {"policy": "headroom"}}
    with watching(engine_installation, tmp_path, *FLAGS, vllm=vllm, **settings) as engine:
        assert engine.server.get("/version").json() == {"version": release}
        assert engine.complete(0, range(1, 13), TOKENS) == 12 * TOKENS
        engine.rest()
        snapshots, counts = told(engine.stream.snapshots), counted(engine.counts, BLOCKS)
        assert [moment for moment, *_ in snapshots] == [moment for moment, _ in counts]
        assert max(moment.running for moment, _ in counts) > 3
        ends = [one.end_probability for each in engine.stream.snapshots for one in each.running]
        assert any(chance is not None for chance in ends)
        worker = f"{engine.server.url},slots={SLOTS},group=g,id=w,snapshots={engine.endpoint}"
        with running_router(tmp_path, "--worker", worker) as router:
            request = {
                "model": MODEL,
                "prompt": "even",
                "max_tokens": 50,
                "vllm_xargs": {"evenstep_output_tokens": 7},
            }
            answer = httpx.post(f"{router.url}/v1/completions", json=request, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 7
            (group,) = router.get("/health").json()["groups"].values()
            (seen,) = group["workers"]
            assert (seen["state_source"], seen["unreported"]) == ("snapshots", [])
