"""vLLM's own schedulers without a model; run by the engine's interpreter, in the engine's venv.

PYTHONPATH=. VENV/bin/python -m tests.support.real_schedulers MODEL TASK=STEPS …
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from deploy.engine.serve import write_metadata
from engine_patches.plugin.compat_admission import PREDICTED_KEY
from router.core.prefix.ids import block_ids, chain, seed
from router.core.state.feed import Feed
from router.core.wire import decode, full_endpoint
from tests.support.kv_models import KvModel
from tests.support.prefix_view import PrefixView

BLOCK_TOKENS = 32
NGRAM = {"method": "ngram", "prompt_lookup_max": 4}


class Schedulers:
    """Makes schedulers for one model.

    Args:
        model: folder of the checkpoint, for its configuration.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._names = iter(range(1_000_000))
        self._folder = tempfile.mkdtemp(prefix="evenstep-")

    def make(
        self,
        flavour: str,
        *,
        slots: int = 256,
        blocks: int = 20_000,
        step_tokens: int = 8192,
        caching: bool = False,
        remote: bool = False,
        drafts: int = 0,
        watermark: float = 0.0,
        model: KvModel | None = None,
        block_tokens: int = BLOCK_TOKENS,
        longest: int = 4096,
        scheduling_policy: str = "fcfs",
        ahead: int = 1,
        ranks: int = 1,
        piece: int = 0,
        **settings: Any,
    ) -> Any:
        """``Scheduler`` and ``AsyncScheduler`` are vLLM's, with ``Evenstep`` before it ours.

        ``ahead``: steps that an asynchronous one schedules before the results of one are in.
        ``remote`` has prompts' KV fetched from elsewhere, by ``remote_kv.RemoteKv``; ``drafts`` is
        the number of tokens proposed in a step; ``model`` has other KV groups; of ``ranks`` this is
        the first; ``piece``: most prompt tokens of one request in a step, 0: no bound; ``settings``
        are the plug-in's.
        """
        import torch
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        connector = KVTransferConfig(
            kv_connector="RemoteKv",
            kv_connector_module_path="tests.support.remote_kv",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )
        config = EngineArgs(
            model=self._model,
            enforce_eager=True,
            block_size=block_tokens,
            max_num_seqs=slots,
            max_num_batched_tokens=step_tokens,
            max_model_len=longest,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=piece,
            enable_prefix_caching=caching,
            kv_transfer_config=connector if remote else None,
            speculative_config={**NGRAM, "num_speculative_tokens": drafts} if drafts else None,
            additional_config={
                "evenstep": {"snapshots": f"ipc://{self._folder}/{next(self._names)}", **settings}
            },
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.watermark = watermark
        config.parallel_config.data_parallel_size = ranks
        spec = FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        # On a CPU vLLM does not, but its blocks depend on it.
        config.scheduler_config.async_scheduling = "Async" in flavour
        if ahead > 1:
            # As with pipeline stages, which a CPU's configuration does not take.
            batches = {"max_concurrent_batches": 1 + ahead}
            config.__class__ = type("Pipelined", (type(config),), batches)
        if model is not None:
            model.adjust(config)
            groups = model.groups(config)
        cache = KVCacheConfig(blocks, [], groups)
        size, hashed_tokens = resolve_kv_cache_block_sizes(cache, config)
        return _classes()[flavour](
            config,
            cache,
            StructuredOutputManager(config),
            block_size=size,
            hash_block_size=hashed_tokens,
            log_stats=True,
        )


def _classes() -> dict[str, Any]:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine_patches import scheduler as ours

    return {
        "Scheduler": Scheduler,
        "AsyncScheduler": AsyncScheduler,
        "EvenstepScheduler": ours.EvenstepScheduler,
        "EvenstepAsyncScheduler": ours.EvenstepAsyncScheduler,
    }


class Driver:
    """Plays the engine: steps in order, ``ahead`` of them scheduled before the results are in.

    Args:
        scheduler: any of vLLM's, or ours.
        ahead: 0; 1 as vLLM does with an asynchronous scheduler; more with pipeline stages too.
        hasher: what prefix caching needs of a request.
        kept: draws how many drafts of a request are accepted in a step.
    """

    def __init__(
        self,
        scheduler: Any,
        ahead: int = 0,
        hasher: Any = None,
        kept: Callable[[], int] = lambda: 0,
    ) -> None:
        self.scheduler = scheduler
        self._kept = kept
        self._ahead = ahead
        self._hasher = hasher
        self._queue: deque[Any] = deque()
        self._connector = scheduler.connector
        self._requests = 0
        self.submitted: list[Any] = []
        self.scheduled: Any = None

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        predicted: int | None = None,
        *,
        session: bool = False,
        priority: int = 0,
        lora: int = 0,
        grammar: Future[Any] | None = None,
        image: int = 0,
    ) -> str:
        """A request; as a ``session`` it gets other inputs later.

        ``lora``: number of its adapter; ``grammar``: that it waits for; ``image``: tokens of its
        prompt that an encoder computes.
        """
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        self._requests += 1
        id_ = f"cmpl-es-{self._requests:020x}-0-1a2b3c4d"
        more: dict[str, Any] = {"priority": priority}
        if lora:
            more["lora_request"] = LoRARequest(f"adapter-{lora}", lora, "/adapters")
        if image:
            more["mm_features"] = [_image(f"image-{self._requests}", image)]
        structured = None if grammar is None else StructuredOutputsParams(regex="7*")
        self._add(id_, prompt, max_tokens, predicted, session, structured, **more)
        if grammar is not None:
            self.submitted[-1].structured_output_request.grammar = grammar
        return id_

    def extend(self, id_: str, prompt: list[int], max_tokens: int, *, session: bool) -> None:
        """The next input of a session, or, if it is none any more, its end."""
        self._add(id_, prompt, max_tokens, None, session)

    def _add(
        self,
        id_: str,
        prompt: list[int],
        max_tokens: int,
        predicted: int | None,
        session: bool,
        structured: Any = None,
        **more: Any,
    ) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, structured_outputs=structured
        )
        if predicted is not None:
            parameters.extra_args = {PREDICTED_KEY: predicted}
        one = Request(
            id_, prompt, parameters, None, block_hasher=self._hasher, resumable=session, **more
        )
        self.submitted.append(one)
        self.scheduler.add_request(one)

    def abort(self, id_: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(id_, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[int, Any] | None:
        """Schedule, and take in the oldest results if enough is under way."""
        output = self.scheduled = self.scheduler.schedule()
        self._queue.append((output, self._sampling(output)))
        if len(self._queue) <= self._ahead:
            return None
        return self._update(*self._queue.popleft())

    def drain(self) -> Iterable[dict[int, Any]]:
        while self._queue:
            yield self._update(*self._queue.popleft())

    def _sampling(self, output: Any) -> list[bool]:
        """Which of the requests get a token: those that end their prompt's last chunk or decode."""
        requests = self.scheduler.requests
        return [not requests[id_].is_prefill_chunk for id_ in output.num_scheduled_tokens]

    def _update(self, output: Any, sampling: list[bool]) -> dict[int, Any]:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        made = [1 + min(self._kept(), len(drafts.get(id_, ()))) for id_ in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id_: index for index, id_ in enumerate(ids)},
            sampled_token_ids=[[7] * n * some for n, some in zip(made, sampling, strict=True)],
            kv_connector_output=self._connector and self._connector.transfers(self.scheduler),
        )
        done: dict[int, Any] = self.scheduler.update_from_output(output, result)
        if (proposed := self.scheduler.num_spec_tokens) and not self._ahead:
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[7] * proposed] * len(ids)))
        return done


def _image(name: str, tokens: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(0, tokens)
    )


# --- check ----------------------------------------------------------------------------------------


class Reader:
    """A router's view of one scheduler, message by message."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.stream = self._connect(zmq.SUB, endpoint)
        self.stream.setsockopt(zmq.SUBSCRIBE, b"")
        self.dealer = self._connect(zmq.DEALER, full_endpoint(endpoint))
        self.feed = Feed()
        self.prefixes = PrefixView()
        self.finished: list[str] = []
        self.bytes = self.growths = 0
        self.last = self._take(self.stream.recv())
        self.dealer.send(b"")
        self._take(self.dealer.recv())

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        return socket

    def _take(self, message: bytes) -> Any:
        self.bytes += len(message)
        self.last = decode(message)
        self.feed.apply(self.last, 0.0)
        self.prefixes.apply(self.last)
        self.growths += self.last.kind == "growth"
        self.finished.extend(self.last.finished)
        return self.last

    def ask(self) -> Any:
        """A full snapshot, aside."""
        self.dealer.send(b"")
        return decode(self.dealer.recv())

    def until(self, sequence: int) -> Any:
        """The snapshot with this sequence number, all before it taken in."""
        while self.last.sequence < sequence:
            self._take(self.stream.recv())
        return self.last

    def close(self) -> None:
        self.stream.close()
        self.dealer.close()
        self.context.term()


def check(
    make: Schedulers,
    flavour: str,
    ahead: int,
    seed: int,
    steps: int,
    *,
    remote: bool = False,
    drafts: int = 0,
) -> dict[str, int]:
    """Random requests under memory pressure; what is read must be what the scheduler has."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    rng = random.Random(seed)
    sizes: dict[str, Any] = {"slots": 8, "blocks": 21, "step_tokens": 64}
    scheduler = make.make(flavour, **sizes, caching=True, remote=remote, drafts=drafts, ahead=ahead)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    driver = Driver(scheduler, ahead, hasher, lambda: rng.randint(0, drafts))
    reader = Reader(scheduler.evenstep.endpoint)
    seen = {"steps": 0, "prefills_cut": 0, "cached": 0, "preempted": 0, "aborted": 0}
    seen |= {"most_blocks": 0, "chains": 0, "answer_blocks": 0}
    submitted: list[str] = []
    shared = [rng.randrange(10, 200) for _ in range(160)]
    for step in range(steps):
        if rng.random() < 0.15:
            prompt = [*shared[: rng.randrange(1, 161)], rng.randrange(10, 200)]
            submitted.append(driver.submit(prompt, rng.randrange(1, 120)))
        # One at least, whatever is drawn.
        if submitted and (rng.random() < 0.02 or step == steps // 2):
            seen["aborted"] += 1
            driver.abort(rng.choice(submitted))
        if driver.step() is not None:
            compare(scheduler, reader, seen)
            compare_cache(driver, reader, seen)
    end(driver, reader, submitted, seen)
    compare_chains(driver, reader, seen)
    seen["preempted"] = reader.last.preemptions_total
    if drafts:
        seen["growths"] = reader.growths
    if remote:
        seen |= {"found": scheduler.connector.found, "failed": scheduler.connector.failed}
    assert not scheduler.evenstep.failed
    scheduler.shutdown()
    reader.close()
    return seen


def end(driver: Driver, reader: Reader, submitted: list[str], seen: dict[str, int]) -> None:
    """Abort all, and wait for blocks that may be held still."""
    scheduler = driver.scheduler
    for id_ in submitted:
        driver.abort(id_)
    for _ in driver.drain():
        compare(scheduler, reader, seen)
    for _ in range(50):
        if driver.step() is not None:
            compare(scheduler, reader, dict(seen))
    list(driver.drain())
    reader.until(scheduler.evenstep._publisher.sequence)
    assert reader.last.kv_groups[0].blocks_used == 0
    assert sorted(reader.finished) == sorted(submitted)


def compare(scheduler: Any, reader: Reader, seen: dict[str, int]) -> None:
    """One step: the router's view beside vLLM's own statistics and requests."""
    told = reader.until(scheduler.evenstep._publisher.sequence)
    stats = scheduler.make_stats()
    (group,) = told.kv_groups
    assert not reader.feed.full_wanted
    assert reader.feed.running == stats.num_running_reqs
    assert told.waiting == stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    assert group.blocks_used == round(stats.kv_cache_usage * group.blocks_total)
    assert reader.feed.load_tokens == sum(one.num_tokens for one in scheduler.running)
    computed = sum(resident(one) for one in scheduler.running)
    assert reader.feed.resident_tokens == computed, (reader.feed.resident_tokens, computed)
    seen["steps"] += told.step_s > 0
    seen["prefills_cut"] += any(one.prefill_left for one in told.running)
    seen["cached"] += any(one.cached_tokens for one in told.running)


def compare_cache(driver: Driver, reader: Reader, seen: dict[str, int]) -> None:
    """The blocks told beside those of vLLM's block pool, by content."""
    ids_of: dict[bytes, int] = {}
    for one in driver.submitted:
        told = array("Q", own_ids(one))
        ids_of.update(zip(one.block_hashes, told, strict=False))
    cached = driver.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    held = {ids_of[key[:-4]] for key in cached}
    assert reader.prefixes.held == held
    seen["most_blocks"] = max(seen["most_blocks"], len(held))
    if not seen["steps"] % 10:
        full = reader.ask()
        assert {*array("Q", full.blocks_stored)} == reader.prefixes.held
        assert full.sequence == reader.last.sequence


def compare_chains(driver: Driver, reader: Reader, seen: dict[str, int]) -> None:
    """Of each request that got a slot: its prompt's blocks, and those that its answer filled."""
    for one in driver.submitted:
        told, own = reader.prefixes.chain(one.request_id), own_ids(one)
        prompt = one.num_prompt_tokens // BLOCK_TOKENS * 8
        assert told == own[: len(told)]
        if told:
            assert prompt <= len(told)
            seen["answer_blocks"] += (len(told) - prompt) // 8
            seen["chains"] += 1
    assert len({one.request_id for one in driver.submitted}) == len(driver.submitted)


def own_ids(request: Any) -> bytes:
    return block_ids(chain(request.all_token_ids, seed()), BLOCK_TOKENS)


def resident(one: Any) -> int:
    """Tokens of a request in KV, the newest one counted in."""
    done = one.num_computed_tokens - one.num_in_flight_tokens
    decoding = one.num_output_tokens > 0 and done >= one.num_tokens - 1
    return int(one.num_tokens if decoding else done)


# --- names ----------------------------------------------------------------------------------------


def names(make: Schedulers) -> dict[str, Any]:
    """What the plug-in reads and this vLLM has not."""
    from engine_patches.plugin import compat
    from engine_patches.plugin.compat_names import FEATURES, missing

    absent: dict[str, list[str]] = {feature: [] for feature in FEATURES}
    for flavour in ("EvenstepScheduler", "EvenstepAsyncScheduler"):
        scheduler = make.make(flavour)
        for feature in FEATURES:
            absent[feature] += missing(scheduler, feature)
        scheduler.shutdown()
    version = ".".join(compat.version().split(".")[:2])
    ends = absent.pop("end_signal")
    others = [name for some in absent.values() for name in some]
    return {"version": version, "missing": others, "end_signal": ends}


FLAVOURS = (("EvenstepScheduler", 0), ("EvenstepAsyncScheduler", 1))
# With three pipeline stages four batches are in flight.
PIPELINED = "EvenstepAsyncScheduler", 3


def _check(make: Schedulers, steps: int) -> dict[str, Any]:
    plain = {name: check(make, name, ahead, 1, steps) for name, ahead in FLAVOURS}
    return {**plain, "pipelined": check(make, *PIPELINED, 1, steps)}


def _remote(make: Schedulers, steps: int) -> dict[str, Any]:
    return {name: check(make, name, ahead, 1, steps, remote=True) for name, ahead in FLAVOURS}


def _drafts(make: Schedulers, steps: int) -> dict[str, Any]:
    return {name: check(make, name, ahead, 1, steps, drafts=3) for name, ahead in FLAVOURS}


def _admission(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.admission_schedulers import admission

    return {name: admission(make, name, ahead) for name, ahead in FLAVOURS}


def _decided(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.decided_schedulers import decided

    plain = {name: decided(make, name, ahead, steps) for name, ahead in FLAVOURS}
    return {**plain, "pipelined": decided(make, *PIPELINED, steps)}


def _sessions(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.session_schedulers import Sessions

    return {name: Sessions(make, name, ahead).run(steps) for name, ahead in FLAVOURS}


def _bounded(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.bounded_schedulers import bounded

    plain = {name: bounded(make, name, ahead, steps) for name, ahead in FLAVOURS}
    admission: dict[str, Any] = {"admission": {"policy": "memory_checked"}}
    return {
        **plain,
        "drafts": bounded(make, "EvenstepAsyncScheduler", 1, steps, drafts=3),
        "pieces": bounded(make, "EvenstepAsyncScheduler", 1, steps, piece=30),
        "admission": bounded(make, "EvenstepAsyncScheduler", 1, steps, **admission),
    }


def _capacity(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.kv_capacity import capacity

    return capacity(make, steps)


def _agents(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.kv_capacity import agents

    return {name: agents(make, name, ahead) for name, ahead in FLAVOURS}


def _names(make: Schedulers, steps: int) -> dict[str, Any]:
    return names(make)


def _hidden(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.hidden_names import hidden

    return hidden(make, steps)


def _bench(make: Schedulers, steps: int, sizes: Iterable[int] = (32, 256)) -> dict[str, Any]:
    from tests.support.scheduler_bench import KEPT, bench

    return {
        f"{kind} {running}, {way}": bench(make, f"Evenstep{kind}", kind, running, steps, kept)
        for kind in ("Scheduler", "AsyncScheduler")
        for running in sizes
        for way, kept in KEPT.items()
    }


def _bench_large(make: Schedulers, steps: int) -> dict[str, Any]:
    return _bench(make, steps, (1024,))


def _bench_cache(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.cache_bench import bench_cache

    return bench_cache(make, steps)


def _model(make: Schedulers, steps: int) -> dict[str, Any]:
    from tests.support.model_beside_vllm import beside

    return beside(make, steps)


TASKS = {
    "admission": _admission,
    "agents": _agents,
    "bench": _bench,
    "bounded": _bounded,
    "bench_cache": _bench_cache,
    "bench_large": _bench_large,
    "capacity": _capacity,
    "check": _check,
    "decided": _decided,
    "drafts": _drafts,
    "hidden": _hidden,
    "model": _model,
    "names": _names,
    "remote": _remote,
    "sessions": _sessions,
}


def main() -> None:
    """Print one line of JSON, by task: to import vLLM takes longer than most of them."""
    folder = Path(sys.prefix) / "vllm-name"
    write_metadata(folder)
    sys.path.insert(0, str(folder))
    gc.freeze()
    make, wanted = Schedulers(sys.argv[1]), [each.split("=") for each in sys.argv[2:]]
    report = {task: TASKS[task](make, int(steps)) for task, steps in wanted}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
