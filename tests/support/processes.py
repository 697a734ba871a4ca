"""A router of several processes: who is who, and what each of them has."""

import os
import re
import signal
from pathlib import Path

from tests.support.server import Server, wait_until

PROXY, DECIDER = "proxy_process", "decider_process"


def pids(router: Server, module: str) -> list[int]:
    """The processes of a router that run a module of ``router.processes``."""
    return [pid for pid in _group(router) if f"router.processes.{module}" in _command(pid)]


def kill(pid: int) -> None:
    """End a process as a crash would."""
    os.kill(pid, signal.SIGKILL)


def all_up(router: Server, proxies: int = 2) -> bool:
    """The deciding process answers, and knows so many proxies."""
    counted = samples(router, "evenstep_processes")
    return counted.get('role="proxy"') == proxies


def wait_all_up(router: Server, proxies: int = 2) -> None:
    wait_until(lambda: all_up(router, proxies), 60, "all processes are up")


def samples(router: Server, name: str) -> dict[str, float]:
    """A metric, by its labels as they are written; empty where the router cannot tell now."""
    try:
        answer = router.get("/metrics")
    except OSError:
        return {}
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", answer.text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def outcomes(router: Server) -> dict[str, int]:
    """How requests of the only group have ended; those ways alone in which some have."""
    counted = samples(router, "evenstep_requests_total").items()
    return {labels.split('"')[3]: int(value) for labels, value in counted if value}


def pss_mb(pid: int) -> float:
    """What a process takes of the memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)[0]) / 1024


def mapped(pid: int) -> str:
    """Files that a process has mapped: its compiled modules among them."""
    return Path(f"/proc/{pid}/maps").read_text()


def _group(router: Server) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == router.process.pid:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return sorted(found)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""
