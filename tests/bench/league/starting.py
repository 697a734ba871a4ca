"""What the start of every entrant needs: its process, its readiness, its figures."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.league.entrant import Engines, Running
from tests.support.router_bench.targets import processes
from tests.support.server import Server, starting, wait_until

# At its very first start evenstep compiles its search, where others compute too.
READY_S = 600.0
# Of answers about a router's own state.
_CALL_S = 10.0

Sample = tuple[str, Mapping[str, str], float]


@contextlib.contextmanager
def router(
    command: Sequence[str],
    port: int,
    log: Path,
    ready: Callable[[], bool],
    evidence: Callable[[], Mapping[str, float]],
) -> Iterator[Running]:
    """Run a router until the block ends; the block begins once ``ready`` is true.

    Raises:
        RuntimeError: it has ended by itself.
        TimeoutError: it does not get ready.
    """
    with starting(list(command), port, log) as server:
        wait_until(lambda: _alive(server) and ready(), READY_S, f"{command[0]} routes to all")
        yield Running(server.url, lambda: processes(server.process.pid), evidence)


def _alive(server: Server) -> bool:
    if not server.alive:
        raise RuntimeError(f"{server.process.args!s:.200} ended\n{server.log_tail()}")
    return True


def answer(url: str) -> httpx.Response | None:
    """What a router says of itself; None: not that, or not yet."""
    try:
        got = httpx.get(url, timeout=_CALL_S, trust_env=False)
    except httpx.TransportError:
        return None
    return got if got.is_success else None


def samples(url: str) -> list[Sample]:
    """All samples of a page of metrics, but for lines that the format does not allow."""
    got, found = answer(url), list[Sample]()
    for line in got.text.splitlines() if got is not None else ():
        # Line by line: vllm-router has metrics with a label twice.
        with contextlib.suppress(ValueError):
            for family in text_string_to_metric_families(line):
                found += [(each.name, each.labels, each.value) for each in family.samples]
    return found


def told(
    found: Sequence[Sample], wanted: Mapping[str, Sequence[str]], engines: Engines
) -> dict[str, float]:
    """The sums of metrics, by the labels that count; an engine's URL becomes its number.

    Args:
        found: the samples.
        wanted: labels by the metric's name.
        engines: whose URLs labels may hold.
    """
    numbers = {url: str(number) for number, url in enumerate(engines.urls)}
    sums: dict[str, float] = {}
    for name, labels, value in found:
        if name in wanted:
            parts = [
                numbers.get(labels.get(label, ""), labels.get(label, "")) for label in wanted[name]
            ]
            key = " ".join((name, *parts))
            sums[key] = sums.get(key, 0.0) + value
    return sums


def kv_tokens(engines: Engines) -> int:
    """KV memory of an engine, as it tells itself."""
    for name, labels, _ in samples(f"{engines.urls[0]}/metrics"):
        if name == "vllm:cache_config_info":
            return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    raise RuntimeError(f"{engines.urls[0]} does not tell its KV memory")
