"""Real engines whose KV memory is too small for what comes: who enters decides who is evicted."""

from pathlib import Path

import pytest

from tests.support.admission_engines import VLLM, engines, press
from tests.support.engine import Installation

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

TOLD = "memory_checked, true lengths"
REQUESTS = 500


def test_admission_spares_evictions(engine_installation: Installation, tmp_path: Path) -> None:
    """Every request ends at its hidden length; the engines' own counters tell the rest."""
    ways = (VLLM, "headroom", TOLD)
    with engines(engine_installation, tmp_path, ways) as servers:
        found = {way: press(servers[way], REQUESTS, seed=0) for way in ways}
    assert found[VLLM].preemptions > 50, "the memory is under pressure"
    assert found["headroom"].preemptions <= found[VLLM].preemptions / 5
    assert found[TOLD].preemptions == 0
    assert len({each.output_tokens for each in found.values()}) == 1
