"""Envoy and a picker as one target of the router bench: the command of the picker comes last.

    python -m tests.support.router_bench.gateway --port 8000 --form http --http 8001 --grpc 9002 \\
        --engines 8101,8102 --folder /tmp/bench -- evenstep pick ...
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from deploy.envoy.config import command, manager_of, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("port", "http", "grpc"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--form", choices=("http", "ext_proc", "minimal"))
    parser.add_argument("--engines", help="ports, with commas")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("picker", nargs="+")
    given = parser.parse_args()
    engines = list(map(int, given.engines.split(",")))
    ext_proc = given.form != "http"
    config = plain(given.port, given.http, given.grpc, engines, ext_proc=ext_proc)
    if given.form == "minimal":
        mode = manager_of(config)["http_filters"][0]["typed_config"]["processing_mode"]
        mode["response_header_mode"] = "SEND"
    envoy = Path(sys.executable).parent / "envoy"
    started = command(envoy, config, given.folder / f"{given.port}.json")
    running = [subprocess.Popen(each) for each in (given.picker, started)]

    def end(*_: object) -> None:
        for each in running:
            each.terminate()

    signal.signal(signal.SIGTERM, end)
    for each in running:
        each.wait()


if __name__ == "__main__":
    main()
