"""An engine that fails every request at once, and so looks idle, before an emulated fleet."""

import asyncio
import re
from pathlib import Path

from router.engines.http_client import HttpClient
from tests.support.chaos import (
    SLOTS,
    WORKERS,
    Seen,
    ask,
    assert_idle,
    body,
    cluster,
    generated_tokens,
    live,
    workers_of,
)
from tests.support.server import Server, wait_until

REQUESTS = 150
FAST = ("--breaker-open", "0.2", "--slow-start", "0.5")


async def serve(client: HttpClient, router: Server, requests: int) -> list[Seen]:
    """As many requests in a closed loop of as many clients as there are slots, and some more."""
    seen = [Seen() for _ in range(requests)]
    waiting = iter(seen)

    async def one() -> None:
        for mine in waiting:
            await ask(client, router, mine, body(20))

    async with asyncio.timeout(60):
        await asyncio.gather(*(one() for _ in range(SLOTS * WORKERS + 4)))
    return seen


def counted(router: Server, name: str) -> int:
    (value,) = re.findall(rf"^evenstep_{name}\S* (\S+)$", router.get("/metrics").text, re.MULTILINE)
    return int(float(value))


async def test_it_does_not_draw_the_traffic(tmp_path: Path) -> None:
    with cluster(tmp_path, router_flags=FAST) as (fleet, router):
        client = HttpClient()
        await asyncio.to_thread(fleet.fault, 0, "error")

        seen = await serve(client, router, REQUESTS)

        assert all(one.complete for one in seen)
        assert counted(router, "requests_unreturned_total") == 0
        # It fails some before it is out, and one trial or two each time that it might be back.
        ejections = counted(router, "worker_ejections_total")
        assert 0 < counted(router, "requests_returned_total") <= 2 * SLOTS + 2 * ejections
        up = list(range(WORKERS))
        await asyncio.to_thread(
            wait_until, lambda: live(router) == up, 60, "its health checks succeed"
        )
        assert workers_of(router)[0]["breaker"] != "closed"

        await asyncio.to_thread(fleet.restore, 0)
        while workers_of(router)[0]["breaker"] != "closed":
            assert all(one.complete for one in await serve(client, router, SLOTS * WORKERS))
        assert all(one.complete for one in await serve(client, router, REQUESTS))
        assert generated_tokens(fleet, 0) > REQUESTS * 20 / WORKERS / 2
        await asyncio.to_thread(assert_idle, fleet, router)
        await client.aclose()
