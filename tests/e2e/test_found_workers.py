"""Workers of a file that is watched come and go under load."""

import asyncio
import json
from pathlib import Path

from router.engines.http_client import HttpClient
from tests.support.chaos import Seen, ask, body, workers_of
from tests.support.fleet import running_fleet
from tests.support.server import running_router, wait_until

ASKED = 60


def write(path: Path, specs: tuple[str, ...]) -> None:
    tables = []
    for spec in specs:
        url, *items = spec.split(",")
        table = dict(item.split("=", 1) for item in items)
        tables.append({"url": url, **table, "rank": int(table["rank"])})
    path.with_suffix(".new").write_text(json.dumps({"workers": tables}))
    path.with_suffix(".new").replace(path)


async def test_no_request_is_lost_when_a_found_worker_goes(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    with running_fleet(tmp_path, "--workers", "3", "--slots", "4", "--no-barrier") as fleet:
        write(path, fleet.workers[:2])
        flags = ("--discover", f"file:{path}", "--policy", "jsq")
        with running_router(tmp_path, *flags) as router:
            client, seen = HttpClient(), [Seen() for _ in range(ASKED)]
            await asyncio.to_thread(
                wait_until, lambda: router.get("/ready").status_code == 200, 60, "it is ready"
            )
            tasks = [asyncio.create_task(ask(client, router, one, body(60))) for one in seen]
            await seen[0].first.wait()
            write(path, fleet.workers[1:])

            def moved() -> bool:
                urls = {worker["url"] for worker in workers_of(router) if worker["up"]}
                return urls == {spec.partition(",")[0] for spec in fleet.workers[1:]}

            await asyncio.to_thread(wait_until, moved, 60, "the third came, and the first went")
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert all(one.complete for one in seen)
            await client.aclose()
            gone = fleet.state()["workers"][0]
            assert gone["running"] == gone["waiting"] == 0
