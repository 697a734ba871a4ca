"""The league's latency predictor before emulated engines: what it reads and learns."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.bench.league import predictor
from tests.bench.league.entrant import Engines, Entrant
from tests.bench.league.latency_models import FEWEST_TO_TRAIN
from tests.bench.league.pins import PEERS
from tests.support.fleet import running_fleet
from tests.support.server import wait_until

WORKERS, BLOCK, CLIENTS = 2, 16, 8
BUILT = pytest.mark.skipif(
    not PEERS["predictor"].installed, reason="XGBoost has not been installed"
)


@pytest.mark.parametrize(
    "entrant",
    [
        pytest.param(entrant, marks=[BUILT] if "XGBoost" in entrant.name else [], id=entrant.name)
        for entrant in predictor.ENTRANTS
    ],
)
def test_it_learns_from_what_it_relays(entrant: Entrant, tmp_path: Path) -> None:
    flags = ["--workers", str(WORKERS), "--no-barrier", "--slots", "3"]
    flags += ["--block-tokens", str(BLOCK), "--step-time", "2e-3,0,0,2e-5"]
    prompts = ["".join(random.Random(seed).choices("abc ", k=2000)) for seed in range(4)]
    with running_fleet(tmp_path, *flags) as fleet:
        urls = [f"http://127.0.0.1:{fleet.server.port + rank}" for rank in range(WORKERS)]
        engines = Engines(urls, fleet.workers, (), 3, BLOCK, "emulated", 1.0)
        with (
            entrant.start(engines, tmp_path) as running,
            httpx.Client(timeout=60) as http,
            ThreadPoolExecutor(CLIENTS) as clients,
        ):

            def ask(number: int) -> None:
                body = {"prompt": prompts[number % 4], "max_tokens": 4, "stream": True}
                body["stream_options"] = {"include_usage": True}
                http.post(f"{running.url}/v1/completions", json=body).raise_for_status()

            list(clients.map(ask, range(FEWEST_TO_TRAIN)))
            wait_until(lambda: running.evidence()["trainings"] >= 2, 60, "both models are trained")
            list(clients.map(ask, range(FEWEST_TO_TRAIN)))
            told = running.evidence()
            assert len(running.pids()) == 1
        requests = 2 * FEWEST_TO_TRAIN
        assert told["relay_requests"] == told["ttft_samples"] == told["tpot_samples"] == requests
        # How well it foretells is shown where engines take a known time; here they share CPUs.
        assert told["foretold"] >= FEWEST_TO_TRAIN
        assert told["foretold_error_s"] > 0
        assert told["matched_share"] > 0.8
        assert told["scrapes"] > 0
