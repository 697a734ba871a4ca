"""The demo's last pictures: the status page during one more run."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.demo.run import Fleet, RunPlan, replay_arguments, serving
from loadgen.report.browser import ADVICE, BrowserError, browsing, find
from loadgen.run.child_processes import Child, free_ports

# Visible history of the page; the first seconds, in which the fleet fills, are left out.
SEEN_S = 20.0
FILLING_S = 4.0
# The same with start and end of the processes.
LASTS_S = 35.0
# Levels of the emulator's power model: its workers draw the least while they wait, too.
EMULATED_POWER = ("--power-levels", "100,100,400")
# More than the run can serve: the replay must outlast the pictures.
_REQUESTS = 20_000
_WIDTH, _HEIGHT = 1360, 900


def photograph(plan: RunPlan, fleet: Fleet, folder: Path) -> Sequence[Path]:
    """Take pictures of the page, light and dark.

    They need a run of their own, since a browser takes CPU time from measured runs. BrowserError:
    there is no Chromium, or it does not show the page. EvenstepError: a process did not start.
    """
    program = find()
    if program is None:
        raise BrowserError(ADVICE)
    port = free_ports(1)
    files = folder / "page"
    lasting = replace(plan, requests=_REQUESTS)
    with (
        browsing(program) as page,
        serving(plan, fleet, files, "--admin-port", str(port), *EMULATED_POWER) as (url, _),
    ):
        page.size(_WIDTH, _HEIGHT)
        page.prefer(prefers_color_scheme="light")
        replay = replay_arguments(lasting, fleet, url, folder / "page.json")
        with Child(replay, folder / "page.replay.log"):
            time.sleep(FILLING_S)
            page.open(f"http://127.0.0.1:{port}/")
            page.wait_for("document.getElementById('status').dataset.state === 'live'")
            time.sleep(SEEN_S)
            pictures = (folder / "page.png", folder / "page-dark.png")
            page.picture(pictures[0])
            page.prefer(prefers_color_scheme="dark")
            page.wait_for("document.documentElement.dataset.theme === 'dark'")
            page.picture(pictures[1])
    return pictures
