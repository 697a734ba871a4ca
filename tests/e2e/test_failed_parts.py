"""A part of the router that fails: whoever started the router learns of it."""

import subprocess
import sys

_FAILS = """
import sys
from router.engines.gauges import GaugeReader

async def run(self):
    raise RuntimeError("broken")

GaugeReader.run = run
sys.argv[1:] = ["serve", "--port", "0", "--policy", "jsq", "--worker", "http://127.0.0.1:9"]
from router.cli import main
main()
"""


def test_the_router_says_what_has_failed_and_ends_with_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FAILS], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 1
    assert "the router ends: GaugeReader has failed" in done.stderr
    assert "RuntimeError: broken" in done.stderr
    assert "ended; 0 requests in flight, 0 waiting" in done.stderr
