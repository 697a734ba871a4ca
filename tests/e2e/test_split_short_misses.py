"""A prompt that the decode worker has almost cached goes past a busy prefill worker."""

import http.client
import json
from pathlib import Path

import httpx

from tests.e2e.test_split_faults import all_up, metric
from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

# A millisecond for each token of a prompt.
FLEET = ("--workers", "1", "--prefill-workers", "1", "--prefill-step-time", "1e-3,1e-3")
PATH = "/v1/completions"
STAGE = "default/prefill"


def body(prompt: list[int]) -> bytes:
    return json.dumps({"model": "emulated", "prompt": prompt, "max_tokens": 3}).encode()


def ask(router: Server, prompt: list[int]) -> int:
    """The tokens of a prompt, by the engine that answered."""
    answer = httpx.post(router.url + PATH, content=body(prompt), timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def test_a_short_miss_is_computed_on_the_worker_that_has_the_rest(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, *FLEET) as fleet,
        running_router(tmp_path, *worker_flags(fleet)) as router,
    ):
        wait_until(lambda: all_up(router), 60, "all workers are up")
        prompt = list(range(320))
        assert ask(router, prompt) == 320
        assert metric(router, "prefills_passed_total", STAGE) == 0
        wait_until(
            lambda: metric(router, "worker_prefix_blocks", "default") > 0, 60, "its KV is cached"
        )
        busy = http.client.HTTPConnection("127.0.0.1", router.port, timeout=60)
        busy.request("POST", PATH, body([7] * 60_000), {"content-type": "application/json"})
        wait_until(
            lambda: metric(router, "worker_in_flight", STAGE) == 1, 60, "the prefill worker is busy"
        )
        assert ask(router, [*prompt, 5]) == 321
        assert metric(router, "prefills_passed_total", STAGE) == 1
        assert metric(router, "worker_in_flight", STAGE) == 1, "it was sooner"
        busy.close()
