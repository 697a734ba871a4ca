"""Energy of an emulated fleet as a router beside it accounts for it, and as clients are told it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from router.core.energy.levels import LEAST_S
from tests.support.engine import metric
from tests.support.fleet import Fleet, running_fleet, worker_flags
from tests.support.server import Server, running_router, wait_until

# Steps that are nearly all load: the paper's model of power is then nearly a line in the waiting.
FLEET = ("--workers", "2", "--slots", "8", "--step-time", "5e-4,1e-5", "--time-waits")
ASKED = {"x-evenstep-energy": "1"}
WAIT_S = 60.0
ENERGY = r"^evenstep_(?:useful|waiting|idle|undivided)_energy_joules_total\{.*\} (\S+)$"
# Far less than a step's, or than the heartbeats of resting workers differ by; above rounding.
SAME_J = 1e-6
# Of the emulated GPUs at rest and at work, as nearly as they are to be found; how often is looked.
TRUE_W, LOOKS = pytest.approx([100, 400], rel=0.15), 5


@dataclass(frozen=True)
class Site:
    """A fleet and its router, which has missed what the fleet had counted before."""

    fleet: Fleet
    router: Server
    http: httpx.Client  # one for all readings: to make one takes a loaded machine long
    missed_j: float = 0.0

    def ask(
        self, prompt: int = 300, *, stream: bool = False, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """An answer of 40 tokens."""
        body = {"model": "emulated", "prompt": [1] * prompt, "max_tokens": 40, "stream": stream}
        body["ignore_eos"] = True
        url = f"{self.router.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers or {}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer

    def unaccounted_j(self) -> float:
        """What the fleet has counted and the router never read.

        The rest has arrived once the difference is the same at two readings of the meters: these go
        on at rest, each time by another amount, so a late or an early reading has no equal.
        """
        found: list[tuple[float, float]] = []

        def stands_still() -> bool:
            counted_j = self.counted_j()
            left_j = counted_j - self.accounted_j()
            before = [other_j for at_j, other_j in found if at_j < counted_j]
            found.append((counted_j, left_j))
            return any(abs(left_j - other_j) < SAME_J for other_j in before)

        wait_until(stands_still, WAIT_S, "all that is counted is accounted for")
        return found[-1][1]

    def accounted_j(self) -> float:
        """Of one page, so at one moment."""
        page = self.http.get(f"{self.router.url}/metrics").text
        told = re.findall(ENERGY, page, re.MULTILINE)
        assert len(told) == 4
        return sum(map(float, told))

    def counted_j(self) -> float:
        return float(self.http.get(f"{self.fleet.control_url}/fleet").json()["energy_j"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("energy")
    flags = ("--power-levels", "100,100,400", "--policy", "jsq")
    with (
        running_fleet(folder, *FLEET) as fleet,
        running_router(folder, *flags, *worker_flags(fleet)) as router,
        httpx.Client(timeout=WAIT_S) as http,
    ):
        site = Site(fleet, router, http)
        for _ in range(2):  # until the meters have been read
            site.ask()
        yield replace(site, missed_j=site.unaccounted_j())


def test_a_whole_answer_says_what_it_took_when_asked(site: Site) -> None:
    before = site.counted_j()
    told = float(site.ask(headers=ASKED).headers["x-evenstep-energy-joules"])
    assert 0 < told < site.counted_j() - before
    assert "x-evenstep-energy-joules" not in site.ask().headers


def test_a_stream_says_it_in_a_comment_before_its_end(site: Site) -> None:
    text = site.ask(stream=True, headers=ASKED).text
    (told,) = re.findall(r"\n\n: x-evenstep-energy-joules: (\S+)\n\ndata: \[DONE\]\n\n$", text)
    assert float(told) > 0
    assert "\n: " not in site.ask(stream=True).text


def test_all_that_the_workers_meters_have_counted_is_accounted_for(site: Site) -> None:
    for _ in range(3):
        site.ask()
    assert site.unaccounted_j() == pytest.approx(site.missed_j, abs=2 * SAME_J)


def test_waits_are_those_that_the_workers_have_timed(site: Site) -> None:

    def told() -> bool:
        measured, timed, waited = (
            metric(site.router, f"evenstep_{name}_seconds_total")
            for name in ("measured_worker", "timed_worker", "waiting")
        )
        # A worker that rests in a step times no wait; once the cost of steps is known, its is
        # modelled.
        return timed > waited > 0 and measured == pytest.approx(timed, rel=0.01)

    wait_until(told, WAIT_S, "measured and timed are the same")


def calibrated(url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli", "calibrate", "--url", url, "--json", "-"]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_levels_are_those_that_the_workers_have_shown(site: Site) -> None:
    """Where the machine stands still between two steps, the emulated meters do not go on.

    A rank that has nothing to do seems to rest without power for so long, which further work and
    rest outweigh.
    """
    levels_w: list[float] = []
    for _ in range(LOOKS):
        with ThreadPoolExecutor(5) as clients:
            list(clients.map(site.ask, [100, 2000, 100, 900, 100, 100, 1500] * 6))
        time.sleep(LEAST_S)  # they rest; the emulated meters show it as they go on
        site.ask()
        done = calibrated(site.router.url)
        levels_w = json.loads(done.stdout)["power_levels_w"] if done.returncode == 0 else []
        if [*levels_w[:1], *levels_w[2:]] == TRUE_W:
            break
    assert done.returncode == 0, done.stderr
    idle_w, spin_w, busy_w = levels_w
    assert [idle_w, busy_w] == TRUE_W
    assert idle_w < spin_w < busy_w


def test_calibration_says_what_is_lacking(site: Site, tmp_path: Path) -> None:
    with running_router(tmp_path, *worker_flags(site.fleet)) as router:
        done = calibrated(router.url)
    assert done.returncode == 2
    assert "no worker has a meter yet" in done.stderr or "not enough is known" in done.stderr
    done = calibrated("http://127.0.0.1:9")
    assert done.returncode == 2
    assert "nothing answers at http://127.0.0.1:9/metrics" in done.stderr


def test_without_meters_it_is_unknown(site: Site, tmp_path: Path) -> None:
    plain = [re.sub(",snapshots=[^,]+", "", spec) for spec in worker_flags(site.fleet)]
    with running_router(tmp_path, *plain) as router:
        plain_site = replace(site, router=router)
        answer = plain_site.ask(headers=ASKED)
        assert answer.headers["x-evenstep-energy-joules"] == "unknown"
        text = plain_site.ask(stream=True, headers=ASKED).text
        assert ": x-evenstep-energy-joules: unknown\n\ndata: [DONE]" in text
