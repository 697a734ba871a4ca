"""CPU time of a line in the log of requests: bench_request_log.py [--json FILE]."""

import argparse
import time
from pathlib import Path

from loadgen.report.origin import Engines, origin
from router.core.types import Request
from router.logs import start_logging
from router.proxy.request_log import RequestLog, follow
from tests.support.figure_files import write_figures

CODE = ("router/logs.py", "router/proxy/request_log.py", "tests/bench/bench_request_log.py")
REQUESTS, RUNS = 5000, 5


def main() -> None:
    """Print the least of some runs, without a log and with each form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for what was measured")
    given, found = parser.parse_args(), {}
    for level, form in (("warning", "text"), ("info", "text"), ("info", "json")):
        start_logging(level, form)
        least_s = min(_timed() for _ in range(RUNS))
        found[f"{level}, {form}"] = round(least_s / REQUESTS * 1e6, 2)
        print(f"{level}, {form}: {least_s / REQUESTS * 1e6:.1f} us a request")
    if given.json:
        write_figures(given.json, {"us_per_request": found}, origin(Engines.EMULATED, CODE))


def _timed() -> float:
    requests = RequestLog(time.monotonic)
    began_s = time.process_time()
    for number in range(REQUESTS):
        scope = {"method": "POST", "path": "/v1/completions"}
        request = Request(f"es-{number:020x}", "default", 50)
        line = requests.begin(scope)
        follow(scope, request, "model", request.id)
        requests.dispatched(request)
        requests.first_byte(request, 0.0)
        line.status, line.request_id = 200, request.id
        line.worker, line.outcome, line.output_tokens = "127.0.0.1:8001#0", "completed", 20
        requests.end(scope)
    return time.process_time() - began_s


if __name__ == "__main__":
    main()
