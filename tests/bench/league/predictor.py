"""A latency predictor that learns online, in the manner of llm-d's; it stands inside the relay.

llm-d's own picker (llm-d-router, commit ebab6879) cannot run here: it needs Kubernetes and Envoy's
gateway. This follows its chart with ``latencyPredictor`` on, for clients that stream and name no
target: ``predicted-latency-producer`` with ``streamingMode``, both ``prefix-cache-affinity-filter``
(0.99, then 0.80), ``latency-scorer`` and ``weighted-random-picker``, before them
``approx-prefix-cache-producer`` and ``inflight-load-producer``. Engines' metrics are read every
50 ms, its least interval. Until 100 requests have been measured it draws among the engines that
the filters leave, idle ones first.

What differs. Models are trained in this process, every second as in the predictor's own
manifests, yet no more than a tenth of the time, and predict at once: there, separate servers train
(its chart: every 10 s) and fetch models (every 30 s). All samples train; there, a tenth only
tests. Features of prefill and decode roles and of images are left out, and so are those that are
always zero. Times are engines' seconds: with a time scale, intervals and the penalty are scaled.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from router.core.errors import UpstreamError
from router.engines.http_client import HttpClient
from tests.bench.league.entrant import Engines, Entrant, Running
from tests.bench.league.latency_models import (
    FEWEST_TO_TRAIN,
    Features,
    Fit,
    Model,
    Samples,
    boosted,
    ridge,
)
from tests.bench.league.pins import PEERS
from tests.bench.league.prompts import Reader, token_ids
from tests.bench.league.relay import Asked, figures_of, relaying
from tests.support.router_bench.targets import processes

SCRAPE_S, TRAIN_S, TRAINING_SHARE = 0.05, 1.0, 0.1
LEAST_BLOCK_TOKENS = 64
STRICT, LOOSE, PENALTY_MS = 0.99, 0.80, 5000.0
TTFT_WEIGHT, TPOT_WEIGHT = 0.8, 0.2
_GAUGES = re.compile(
    rb"^vllm:(num_requests_waiting|kv_cache_usage_perc)\{[^}]*\} ([0-9.e+-]+)", re.MULTILINE
)
_BLOCKS = re.compile(rb'num_gpu_blocks="(\d+)"')


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine for one request, with what is predicted there."""

    worker: int
    prefix: float
    requests: int
    ttft_ms: float
    tpot_ms: float


def sticky(candidates: Sequence[Candidate], prefix: float, penalty_ms: float) -> list[Candidate]:
    """Those that were sent so much of the prompt, unless the others are that much faster."""
    kept = [each for each in candidates if each.prefix >= prefix]
    others = [each for each in candidates if each.prefix < prefix]
    if kept and others:
        late_ms = min(each.ttft_ms for each in kept) - min(each.ttft_ms for each in others)
        if late_ms > penalty_ms:
            return list(candidates)
    return kept or list(candidates)


def scores(candidates: Sequence[Candidate]) -> list[float]:
    """Least predicted latency first; without targets every engine misses them."""
    ttft, tpot = ([each.ttft_ms for each in candidates], [each.tpot_ms for each in candidates])
    spans = [max(values) - min(values) for values in (ttft, tpot)]
    weights = [TTFT_WEIGHT, TPOT_WEIGHT]
    if min(spans) <= 1e-9 < max(spans):
        weights = [float(span > 1e-9) for span in spans]
    scored = []
    for pair in zip(ttft, tpot, strict=True):
        combined = sum(
            weight * ((value - min(values)) / span if span > 1e-9 else 0.5)
            for weight, value, values, span in zip(weights, pair, (ttft, tpot), spans, strict=True)
        )
        scored.append((int((1 - combined) * 100) + 1) / 100)
    return scored


def pick(candidates: Sequence[Candidate], penalty_ms: float | None, draw: random.Random) -> int:
    """The worker: filters, unless None, idle engines before others, and a draw by score."""
    left = list(candidates)
    if penalty_ms is not None:
        left = sticky(sticky(left, STRICT, penalty_ms), LOOSE, penalty_ms)
    left = [each for each in left if not each.requests] or left
    keys = [(draw.random() or 1e-10) ** (1 / score) for score in scores(left)]
    return left[keys.index(max(keys))].worker


class Prefixes:
    """Blocks of prompts that were sent to each engine; each engine's oldest are forgotten."""

    def __init__(self, block_tokens: int, capacities: Sequence[int]) -> None:
        self._block_tokens = block_tokens
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
        self._capacities = capacities

    def blocks(self, ids: Sequence[Hashable], salt: str) -> list[int]:
        """Chained hashes; the last block may be short."""
        parent, size, blocks = hash(salt), self._block_tokens, []
        for start in range(0, len(ids), size):
            parent = hash((tuple(ids[start : start + size]), parent))
            blocks.append(parent)
        return blocks

    def matches(self, blocks: Sequence[int]) -> list[float]:
        """Of each engine, the share of the blocks that it was sent, from the first on."""
        shares = []
        for sent in self._sent:
            missing = (index for index, block in enumerate(blocks) if block not in sent)
            shares.append(next(missing, len(blocks)) / max(1, len(blocks)))
        return shares

    def add(self, worker: int, blocks: Sequence[int]) -> None:
        sent = self._sent[worker]
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._capacities[worker]:
            sent.popitem(last=False)


@dataclass
class _Sent:
    """A request under way."""

    features: Features
    ttft_ms: float  # as predicted
    prefill_tokens: float
    streams: bool


@dataclass
class _Engine:
    url: str
    waiting: float = 0.0
    kv_share: float = 0.0
    scrapes: int = 0
    requests: int = 0
    prefill_tokens: float = 0.0


class Predictor:
    """The chooser; ``fit`` makes its models; ``penalty_ms``: see ``pick``."""

    def __init__(
        self,
        urls: Sequence[str],
        fit: Fit,
        model: str,
        prefixes: Prefixes,
        penalty_ms: float | None,
    ) -> None:
        self.engines = [_Engine(url) for url in urls]
        self._reader, self._prefixes = Reader(model), prefixes
        self._penalty_ms = penalty_ms
        self._draw = random.Random(0)
        self.ttft, self.tpot = Model(fit), Model(fit)
        self._samples = {self.ttft: Samples(), self.tpot: Samples()}
        self._sums = dict.fromkeys(
            ("trainings", "foretold", "foretold_error_s", "foretold_ttft_s", "matched", "prompts"),
            0.0,
        )

    async def choose(self, asked: Asked) -> int:
        parsed = self._reader.parsed(asked)
        if parsed is None:
            return 0  # the engine says what is wrong with it
        ids = token_ids(parsed)
        blocks = self._prefixes.blocks(ids, str(asked.fields.get("cache_salt") or ""))
        features = [
            Features(
                engine.kv_share,
                engine.waiting,
                engine.requests,
                engine.prefill_tokens,
                len(ids),
                prefix,
            )
            for engine, prefix in zip(self.engines, self._prefixes.matches(blocks), strict=True)
        ]
        ttft_ms = self.ttft.predict([each.ttft_row() for each in features])
        tpot_ms = self.tpot.predict([each.tpot_row() for each in features])
        worker = pick(
            [
                Candidate(index, each.prefix, each.running, ttft_ms[index], tpot_ms[index])
                for index, each in enumerate(features)
            ],
            self._penalty_ms,
            self._draw,
        )
        chosen, engine = features[worker], self.engines[worker]
        uncached = (1 - chosen.prefix) * len(ids)
        asked.own = _Sent(chosen, ttft_ms[worker], uncached, parsed.stream)
        self._prefixes.add(worker, blocks)
        self._sums["matched"] += chosen.prefix
        self._sums["prompts"] += 1
        engine.requests += 1
        engine.prefill_tokens += uncached
        return worker

    def on_first_token(self, asked: Asked) -> None:
        sent = asked.own
        if isinstance(sent, _Sent) and sent.streams:
            self._prompt_ends(asked.worker, sent)
            ttft_ms = (asked.first_s - asked.sent_s) * 1e3
            self._samples[self.ttft].add(sent.features, sent.features.ttft_row(), ttft_ms)
            if self._sums["trainings"]:
                self._sums["foretold"] += 1
                self._sums["foretold_error_s"] += abs(sent.ttft_ms - ttft_ms) / 1e3
                self._sums["foretold_ttft_s"] += ttft_ms / 1e3

    def on_end(self, asked: Asked, whole: bool) -> None:
        sent = asked.own
        if not isinstance(sent, _Sent):
            return
        self._prompt_ends(asked.worker, sent)
        self.engines[asked.worker].requests -= 1
        tokens = asked.usage.get("completion_tokens", asked.events)
        if whole and sent.streams and tokens > 1:
            tpot_ms = (asked.last_s - asked.first_s) * 1e3 / (tokens - 1)
            self._samples[self.tpot].add(sent.features, sent.features.tpot_row(), tpot_ms)

    def evidence(self) -> Mapping[str, float]:
        prompts = self._sums["prompts"] or 1.0
        return {
            **self._sums,
            "matched_share": self._sums["matched"] / prompts,
            "scrapes": float(sum(engine.scrapes for engine in self.engines)),
            "ttft_samples": float(len(self._samples[self.ttft])),
            "tpot_samples": float(len(self._samples[self.tpot])),
        }

    def _prompt_ends(self, worker: int, sent: _Sent) -> None:
        self.engines[worker].prefill_tokens -= sent.prefill_tokens
        sent.prefill_tokens = 0.0

    async def train(self) -> None:
        """Once, if there are samples enough; beside the loop."""
        for model, samples in self._samples.items():
            if len(samples) >= FEWEST_TO_TRAIN:
                taken = {queued: samples.taken(queued) for queued in (None, False, True)}
                await asyncio.to_thread(model.train, taken)
                self._sums["trainings"] += 1

    def told(self, worker: int, metrics: bytes) -> None:
        """An engine's metrics have been read."""
        engine = self.engines[worker]
        engine.scrapes += 1
        for name, value in _GAUGES.findall(metrics):
            if name == b"num_requests_waiting":
                engine.waiting = float(value)
            else:
                engine.kv_share = float(value)


async def _read(client: HttpClient, url: str) -> bytes:
    response = await client.request("GET", url, "/metrics")
    try:
        return await response.read()
    finally:
        response.close()


async def _scrape(client: HttpClient, predictor: Predictor, worker: int, every_s: float) -> None:
    while True:
        began_s = time.perf_counter()
        with contextlib.suppress(UpstreamError):  # what it said last stays
            predictor.told(worker, await _read(client, predictor.engines[worker].url))
        await asyncio.sleep(max(0.0, began_s + every_s - time.perf_counter()))


async def _train(predictor: Predictor, every_s: float) -> None:
    took_s = 0.0
    while True:
        await asyncio.sleep(max(every_s, took_s / TRAINING_SHARE))
        began_s = time.perf_counter()
        await predictor.train()
        took_s = time.perf_counter() - began_s


@contextlib.asynccontextmanager
async def chooser(urls: Sequence[str], settings: Mapping[str, Any]) -> AsyncIterator[Predictor]:
    """A ``MakeChooser``; settings: what ``_start`` gives it."""
    client, scale = HttpClient(), float(settings["time_scale"])
    found = [_BLOCKS.search(await _read(client, url)) for url in urls]
    capacities = [int(blocks[1]) if blocks else 31_250 for blocks in found]
    prefixes = Prefixes(max(LEAST_BLOCK_TOKENS, settings["block_tokens"]), capacities)
    fit = boosted(settings["packages"]) if settings["packages"] else ridge
    penalty_ms = PENALTY_MS * scale if settings["filters"] else None
    predictor = Predictor(urls, fit, settings["model"], prefixes, penalty_ms)
    async with asyncio.TaskGroup() as beside:
        tasks = [
            beside.create_task(_scrape(client, predictor, worker, SCRAPE_S * scale))
            for worker in range(len(urls))
        ]
        tasks.append(beside.create_task(_train(predictor, TRAIN_S * scale)))
        yield predictor
        for task in tasks:
            task.cancel()
    await client.aclose()


@contextlib.contextmanager
def _start(boosts: bool, filters: bool, engines: Engines, folder: Path) -> Iterator[Running]:
    settings = {
        "model": engines.model,
        "block_tokens": engines.block_tokens,
        "time_scale": engines.time_scale,
        "filters": filters,
        "packages": str(PEERS["predictor"].libraries) if boosts else "",
    }
    if boosts:
        PEERS["predictor"].install()
    with relaying(engines.urls, folder, f"{__name__}:chooser", settings) as relay:
        yield Running(
            relay.url, lambda: processes(relay.process.pid), lambda: figures_of(relay.url)
        )


_CODE = tuple(
    f"tests/bench/league/{name}.py"
    for name in ("predictor", "latency_models", "relay", "prompts", "numbering")
)
_CANNOT = {
    "chat-scale-1": "it draws at random until it has measured 100 requests, most of this workload",
    "faults": "which engines live llm-d hears from Kubernetes, which does not run here",
}
_WHAT = (
    "least predicted latency, drawn by score{}; in the manner of llm-d's latency predictor, whose "
    "picker cannot run here; the predictor is inside the bench's relay, so that CPU and memory are "
    "those of both"
)
_STICKY = (
    " among engines that were sent most of the prompt before, unless their first token is "
    "predicted 5 s later than others'"
)


def _entrant(name: str, model: str, boosts: bool, filters: bool) -> Entrant:
    without = "" if filters else ", without prefix-cache-affinity-filter"
    return Entrant(
        f"predictor {name}",
        "predictor",
        f"latencyPredictor of llm-d's chart, streamingMode, {model}{without}",
        _WHAT.format(_STICKY if filters else ""),
        partial(_start, boosts, filters),
        _CANNOT,
        _CODE,
    )


ENTRANTS = (
    _entrant("XGBoost", "XGBoost", True, True),
    _entrant("XGBoost latency alone", "XGBoost", True, False),
    _entrant("ridge", "Bayesian ridge", False, True),
)
