"""A live router tells what engines had cached of its prompts, and how right it was."""

import re
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.fleet import running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

FLEET = ("--workers", "2", "--slots", "4", "--block-tokens", "16", "--model", "m")


def told(router: Server, name: str) -> float:
    """A value of all groups and workers together; 0 where there is none."""
    text = router.get("/metrics").text
    values = re.findall(rf"^evenstep_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def heard_of(router: Server, requests: int) -> bool:
    return told(router, "prefix_requests_total") == requests


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("completions", {"prompt": [7] * 330}),
        ("completions", {"prompt": "even steps " * 200}),
        ("chat/completions", {"messages": [{"role": "user", "content": "even steps " * 200}]}),
    ],
    ids=["ids", "text", "chat"],
)
def test_what_comes_four_times_is_found_three_times_as_it_was_foretold(
    tmp_path: Path, path: str, what: dict[str, object]
) -> None:
    with (
        running_fleet(tmp_path, *FLEET) as fleet,
        running_router(tmp_path, *worker_flags(fleet)) as router,
    ):
        body = {"model": "m", "max_tokens": 4, **what}
        wait_until(
            lambda: router.get("/health").text.replace(" ", "").count('"snapshots":"fresh"') == 2,
            60.0,
            "both engines tell their state",
        )
        for number in range(1, 5):
            answer = httpx.post(f"{router.url}/v1/{path}", json=body, timeout=30.0)
            answer.raise_for_status()
            wait_until(
                partial(heard_of, router, number),
                60.0,
                "the engine has told what it found",
            )
        tokens = answer.json()["usage"]["prompt_tokens"]
        blocks = (tokens - 1) // 16
        assert told(router, "prefix_prompt_tokens_total") == 4 * tokens
        assert told(router, "prefix_found_tokens_total") == 3 * 16 * blocks, "where it was"
        assert told(router, "prefix_right_requests_total") == 4
        assert told(router, "prefix_error_tokens_total") == 0
        assert told(router, "prefix_blocks") == told(router, "worker_prefix_blocks") >= blocks
        assert told(router, "prefix_memory_bytes") > 0
        assert told(router, "prompt_tokens_total") == 4 * tokens - 3 * 16 * blocks
