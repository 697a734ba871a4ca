"""vLLM's gauges, polled over HTTP for workers without snapshots."""

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from router.core.errors import UpstreamError
from router.core.events import GaugesReceived
from router.core.state.foreign_load import Gauges
from router.core.types import WorkerSpec
from router.engines.polling import PolledEngine, Poller

log = logging.getLogger(__name__)

_SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|cache_config_info)"
    r"\{(.*)\} (\S+)$",
    re.MULTILINE,
)
# Larger counts are errors, as are negative ones.
_LARGEST = 1 << 32
_LABEL = re.compile(r'(?:^|,)(engine|block_size|num_gpu_blocks)="(\d+)"')


def read_gauges(text: str) -> Mapping[int, Gauges]:
    """By data-parallel rank, from vLLM's Prometheus text; ValueError: a sample is no count."""
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for name, labels, value in _SAMPLE.findall(text):
        told = {key: int(number) for key, number in _LABEL.findall(labels)}
        engine = values[told.get("engine", 0)]
        engine[name] = float(value)
        if not 0 <= engine[name] <= _LARGEST:
            raise ValueError(f"vllm:{name} is {value[:40]}")
        if name == "cache_config_info":
            engine["kv_tokens"] = told.get("block_size", 0) * told.get("num_gpu_blocks", 0)
            engine["caches_prefixes"] = 'enable_prefix_caching="False"' not in labels
    ranks = {rank: engine for rank, engine in values.items() if "num_requests_running" in engine}
    return {
        rank: Gauges(
            running=int(engine["num_requests_running"]),
            waiting=int(engine.get("num_requests_waiting", 0)),
            kv_usage=min(1.0, engine.get("kv_cache_usage_perc", 0.0)),
            # vLLM reports the blocks of all ranks together.
            kv_tokens=min(int(engine.get("kv_tokens", 0)), _LARGEST) // len(ranks),
            caches_prefixes=bool(engine.get("caches_prefixes", True)),
        )
        for rank, engine in ranks.items()
    }


def of_rank(ranks: Mapping[int, Gauges], rank: int | None) -> Gauges | None:
    """Gauges of a rank, or of all together if one worker stands for all."""
    if rank is not None and (rank in ranks or len(ranks) > 1):
        return ranks.get(rank)
    if not ranks:
        return None
    return Gauges(
        running=sum(one.running for one in ranks.values()),
        waiting=sum(one.waiting for one in ranks.values()),
        kv_usage=sum(one.kv_usage for one in ranks.values()) / len(ranks),
        kv_tokens=sum(one.kv_tokens for one in ranks.values()),
        caches_prefixes=all(one.caches_prefixes for one in ranks.values()),
    )


@dataclass(slots=True)
class _Engine(PolledEngine):
    complained: bool = False


class GaugeReader(Poller[_Engine]):
    """Polls ``/metrics`` of engines with a worker whose state has no better source (``wanted``)."""

    make = _Engine

    def __init__(
        self,
        specs: Iterable[WorkerSpec],
        apply: Callable[[GaugesReceived], None],
        wanted: Callable[[str], bool],
        clock: Callable[[], float],
        timeout_s: float,
        interval_s: float,
    ) -> None:
        self.reads = 0
        self.failed_reads = 0
        self._apply = apply
        self._wanted = wanted
        self._clock = clock
        self.interval_s = interval_s
        super().__init__(specs, timeout_s)

    async def _watch(self, engine: _Engine) -> None:
        while True:
            try:
                if any(self._wanted(worker.id) for worker in engine.workers):
                    await self._read(engine)
            except Exception:
                log.exception("%s: reading the gauges broke", engine.url)
            await asyncio.sleep(self.interval_s)

    async def _read(self, engine: _Engine) -> None:
        self.reads += 1
        ranks: Mapping[int, Gauges] = {}
        reason = "they do not tell vllm:num_requests_running"
        try:
            ranks = read_gauges((await self._ask(engine.url, "/metrics")).decode())
        except (UpstreamError, ValueError) as error:
            reason = str(error)
        if not ranks:
            self.failed_reads += 1
            if not engine.complained:
                log.warning("%s/metrics: %s; own counts hold", engine.url, reason)
        engine.complained = not ranks
        for worker in engine.workers:
            if self._wanted(worker.id):
                gauges = of_rank(ranks, worker.rank)
                self._apply(GaugesReceived(worker.id, gauges, self._clock()))
