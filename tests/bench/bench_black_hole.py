"""One of four emulated workers answers 500 at once: what clients see, with the breaker and without.

python tests/bench/bench_black_hole.py [--requests 600] [--json FILE]
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from loadgen.report.origin import EMULATION, SERVING, Engines, origin
from router.engines.http_client import HttpClient
from tests.support.chaos import SLOTS, Seen, ask, body, cluster
from tests.support.figure_files import write_figures
from tests.support.server import Server

CODE = (*SERVING, *EMULATION, "tests/support/chaos.py", "tests/bench/bench_black_hole.py")
WORKERS = 4
WAYS = {
    "no retries, no breaker": ("--max-attempts", "1", "--max-ejected", "0"),
    "retries, no breaker": ("--max-ejected", "0"),
    "as it is": (),
}


async def serve(router: Server, requests: int) -> tuple[Counter[str], float]:
    """Send requests in a closed loop; count their ends."""
    client, seen = HttpClient(), [Seen() for _ in range(requests)]
    waiting = iter(seen)

    async def one() -> None:
        for mine in waiting:
            await ask(client, router, mine, body(20))

    began_s = time.monotonic()
    await asyncio.gather(*(one() for _ in range(SLOTS * WORKERS + 4)))
    await client.aclose()
    return Counter(str(one.status) for one in seen), time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--json", type=Path, help="file for what was measured")
    given = parser.parse_args()
    requests, found = given.requests, {}
    for name, flags in WAYS.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            cluster(Path(folder), workers=WORKERS, router_flags=flags) as (fleet, router),
        ):
            fleet.fault(0, "error")
            statuses, seconds = asyncio.run(serve(router, requests))
            text = router.get("/metrics").text
            returned = text.partition('evenstep_requests_returned_total{group="default"} ')[2]
            print(
                f"{name}: {dict(statuses)}, {returned.split()[0]} asked for anew, "
                f"{statuses['200'] / seconds:.0f} answered/s",
                flush=True,
            )
            found[name] = {
                "failed": requests - statuses["200"],
                "asked_anew": int(float(returned.split()[0])),
                "answered_per_s": round(statuses["200"] / seconds, 1),
            }
    if given.json:
        figures = {"requests": requests, "workers": WORKERS, "ways": found}
        write_figures(given.json, figures, origin(Engines.EMULATED, CODE))


if __name__ == "__main__":
    main()
