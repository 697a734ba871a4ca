"""Every query of every panel, asked of a real Prometheus that scrapes a live router and fleet."""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dashboards.generate import BOARDS
from dashboards.panel import Query
from loadgen.demo.run import EMULATED_POWER
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.prometheus import ask, program, scraping
from tests.support.replays import run_replay
from tests.support.server import Server, running_router, wait_until

# Decode workers whose memory admission guards, and one that computes their prompts.
FLEET = (
    *("--workers", "2", "--slots", "4", "--kv-tokens", "8000", "--step-time", "1e-3,5e-6"),
    *("--prefill-workers", "1", "--prefill-step-time", "1e-3,1e-6", "--admission", "headroom"),
)
# Of another model, and without the plug-in: its own metrics tell of it.
UNPLUGGED = ("--model", "other", "--group", "other", "--no-snapshots")
# Enough steps in which requests wait for the bubble of a slot to be looked at.
REQUESTS = 240
TRAFFIC = (
    *("--model", "emulated", "--arrivals", "closed:16"),
    *("--requests", f"{REQUESTS}", "--max-tokens", "24"),
)
WAIT_S = 60.0
KEY = "a-key-of-twenty-bytes"
CHOSEN = {"$__rate_interval": "5s", "$__range": "30s", "$group": ".*", "$worker": ".*"}
QUERIES = [
    pytest.param(query, id=f"{board.name}: {panel.title} {number}")
    for board in BOARDS
    for row in board.rows
    for panel in row.panels
    for number, query in enumerate(panel.queries)
]


@dataclass(frozen=True, slots=True)
class Watched:
    """A Prometheus, and the time of day since which it has seen traffic."""

    prometheus: Server
    start_s: float

    def series(self, expression: str) -> list[dict[str, Any]]:
        """What Grafana would draw, a point per second."""
        for variable, value in CHOSEN.items():
            expression = expression.replace(variable, value)
        found: list[dict[str, Any]] = ask(
            self.prometheus,
            "query_range",
            query=expression,
            start=self.start_s,
            end=time.time(),
            step=1,
        )["result"]
        return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    program("prometheus")
    folder = tmp_path_factory.mktemp("dashboards")
    key, keys = folder / "key", folder / "keys"
    key.write_text(KEY)
    keys.write_text(f"alice {KEY}\n")
    keyed = ("--api-key-file", str(keys))
    with (
        running_fleet(folder, *FLEET) as fleet,
        running_fleet(folder, *UNPLUGGED) as other,
        running_router(
            folder, *EMULATED_POWER, *keyed, *worker_flags(fleet), *worker_flags(other)
        ) as router,
        scraping(folder, _targets(fleet, router)) as prometheus,
    ):
        watched = Watched(prometheus, time.time())
        wait_until(lambda: _value(watched, "sum(up)") == 4, WAIT_S, "all targets are scraped")
        shown = ("--api-key-file", str(key))
        run_replay(router.url, folder / "replay.json", *TRAFFIC, *shown, limit_s=4 * WAIT_S)
        done = 'evenstep_requests_total{group="default",outcome="completed"}'
        wait_until(lambda: _value(watched, done) == REQUESTS, WAIT_S, "the traffic is scraped")
        yield watched


@pytest.mark.parametrize("query", QUERIES)
def test_every_panel_has_data(watched: Watched, query: Query) -> None:
    series = watched.series(query.expression)

    values = [float(value) for one in series for _, value in one["values"]]
    assert any(map(math.isfinite, values))
    for label in re.findall(r"{{(\w+)}}", query.legend):
        assert all(label in one["metric"] for one in series), f"no label {label}"


def test_panels_tell_one_worker_from_another(watched: Watched) -> None:
    ranks = {one["metric"]["rank"] for one in watched.series("evenstep_worker_load_tokens")}

    assert ranks == {"0", "1", "2", "3"}


def test_energy_is_divided(watched: Watched) -> None:
    for use in ("useful", "waiting"):
        assert _value(watched, f"sum(evenstep_{use}_energy_joules_total)") > 0, use


def _targets(fleet: Fleet, router: Server) -> dict[str, list[str]]:
    engines = [spec.partition(",")[0].removeprefix("http://") for spec in fleet.workers]
    return {"evenstep": [router.url.removeprefix("http://")], "engines": engines}


def _value(watched: Watched, expression: str) -> float:
    """A single value as it is now; not a number where there is none."""
    found = ask(watched.prometheus, "query", query=expression)["result"]
    return float(found[0]["value"][1]) if found else math.nan
