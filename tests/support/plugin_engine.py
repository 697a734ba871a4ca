"""A scheduler with vLLM's attributes and vLLM's ways, as far as the plug-in looks at them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

VERSION = "0.32.0"


class SamplingParams:
    """Of one request."""

    extra_args: Any = None
    temperature = 1.0
    ignore_eos = False
    eos_token_id: int | None = None
    stop_token_ids: Collection[int] | None = None

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class BatchUpdate:
    """Who came into the batch, moved in it and left it."""

    removed = added = moved = ()


class Status(Enum):
    """Whether a request was withdrawn."""

    RUNNING = 0
    WAITING_FOR_REMOTE_KVS = 3
    WAITING_FOR_STREAMING_REQ = 4
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 5
    FINISHED_STOPPED = 1
    FINISHED_ABORTED = 2


class Queue(list[Any]):
    """Requests that wait, as far as the plug-in changes their order."""

    def add_request(self, request: Any) -> None:
        self.append(request)

    def pop_request(self) -> Any:
        return self.pop(0)

    def prepend_request(self, request: Any) -> None:
        self.insert(0, request)

    def remove_requests(self, requests: Collection[Any]) -> None:
        self[:] = [one for one in self if one not in requests]


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int = 1


@dataclass
class PlaceholderRange:
    offset: int


@dataclass
class MultiModalFeatureSpec:
    identifier: str
    mm_position: PlaceholderRange


@dataclass
class KVCacheBlock:
    """``block_hash`` has the KV group's number at its end."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


class BlockHashToBlockMap:
    """Blocks by content."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[KVCacheBlock]] = {}

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        return next(iter(self.blocks.get(key, ())), None)


class BlockPool:
    """Blocks of a prefix cache; the test plays the managers that use it."""

    hash_block_size = 16

    def __init__(self, blocks: int = 64) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(blocks)]
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.resets = True

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: object = None,
    ) -> None:
        for position in range(num_cached_blocks, num_full_blocks):
            if not blocks[position].is_null:
                number = (position + 1) * block_size // self.hash_block_size - 1
                key = request.block_hashes[number] + kv_cache_group_id.to_bytes(4, "big")
                blocks[position].block_hash = key
                same = self.cached_block_hash_to_block.blocks.setdefault(key, [])
                same.append(blocks[position])

    def evict(self, block: KVCacheBlock) -> None:
        self._remove_cached_block_hashes(block)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[bytes]:
        key, block.block_hash = block.block_hash, None
        if key is None:
            return []
        same = self.cached_block_hash_to_block.blocks[key]
        same.remove(block)
        if not same:
            del self.cached_block_hash_to_block.blocks[key]
        return [key]

    def reset_prefix_cache(self) -> bool:
        if self.resets:
            self.cached_block_hash_to_block = BlockHashToBlockMap()
            for block in self.blocks:
                block.block_hash = None
        return self.resets


class Request:
    """An engine's request; ``computed_tokens`` are those of steps whose results are in."""

    def __init__(self, request_id: str, num_prompt_tokens: int, cached_tokens: int = 0) -> None:
        self.request_id = request_id
        self.sampling_params = SamplingParams()
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.cached_tokens = min(cached_tokens, num_prompt_tokens - 1)
        self.placeholders = 0
        self.next_decode_eligible_step = 0
        self.max_tokens = 100
        self.priority = 0
        self.arrival_time = 0.0
        self.num_preemptions = 0
        self.status = Status.RUNNING
        self.computed_tokens = 0
        self.decoding = False
        self.in_flight = 0
        self.stale = 0
        self.drop_stale_output = False
        self.structured_output_request: Any = None
        self.block_hashes: list[Any] = []
        self.num_in_flight_tokens = 0
        self.skip_reading_prefix_cache = False
        self.all_token_ids: list[int] = []
        self.cache_salt: str | None = None
        self.lora_request: LoRARequest | None = None
        self.mm_features: list[MultiModalFeatureSpec] = []
        self.prompt_embeds: object | None = None

    @property
    def num_stale_output_tokens(self) -> int:
        return self.stale

    @property
    def num_output_placeholders(self) -> int:
        return self.placeholders

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens

    @property
    def is_prefill_chunk(self) -> bool:
        return self.num_computed_tokens < self.num_tokens + self.placeholders - 1

    @property
    def prefill_left(self) -> int:
        """What a snapshot is to say; the last token of a prefill after a preemption is left out."""
        left = 0 if self.decoding else self.num_tokens - self.computed_tokens
        return 0 if left == 1 and self.num_output_tokens else left


@dataclass
class NewRequestData:
    req_id: str
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    samples: dict[str, bool] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)


class FullAttentionManager:
    """Of a KV group; ``most`` bounds what a request enters with, ``state`` is beside its tokens."""

    kv_cache_group_id = 0
    block_pool = BlockPool()

    def __init__(self, block_size: int, most: int = 1 << 40, state: int = 0, **more: Any) -> None:
        self.block_size = block_size
        self.most, self.state = most, state
        self.req_to_blocks: dict[str, object] = {}
        vars(self).update(more)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Collection[bool],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """``new_computed_blocks`` says of each found block whether a request holds it."""
        self.req_to_blocks[request_id] = ()
        needed = -(-num_tokens // self.block_size) + self.state
        return min(needed, self.most) - sum(new_computed_blocks)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0


class SlidingWindowManager(FullAttentionManager):
    """Whose requests keep the last tokens."""

    sliding_window = 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)


class ChunkedLocalAttentionManager(FullAttentionManager):
    """Whose requests keep the tokens of their last chunk."""


class MambaManager(FullAttentionManager):
    """Whose requests keep a state."""


class Coordinator:
    """All KV groups; ``held`` says of each of the leading blocks found whether a request has it."""

    def __init__(self, *managers: FullAttentionManager) -> None:
        self.single_type_managers = managers
        self.held: list[bool] = []

    def find_longest_cache_hit(
        self, block_hashes: Collection[object], max_cache_hit_length: int
    ) -> tuple[Collection[bool], int, int]:
        return self.held, 4 * len(self.held), 0

    def get_num_blocks_to_allocate(self, *args: Any, apply_admission_cap: bool) -> int:
        asked = (one.get_num_blocks_to_allocate(*args) for one in self.single_type_managers)
        return sum(asked)


@dataclass
class KVCacheTensor:
    size: int
    block_stride: int = 0


class Store:
    """Of a group in which these ranks have written."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.written = {f"evenstep/prompt_budget/{rank + 1}" for rank, _ in enumerate(ranks)}
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.written.add(key)

    def wait(self, keys: Collection[str], timeout: timedelta) -> None:
        if not self.written.issuperset(keys):
            raise RuntimeError("wait timeout")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


class DPEngineCoreProc:
    """An engine whose steps are a group's."""

    step_counter = current_wave = dp_rank = 0
    dp_size = 3

    def __init__(self, *others: int) -> None:
        self.dp_group = others
        self.dp_store = Store(others)

    def run_busy_loop(self, *turns: Callable[[], object]) -> None:
        for turn in turns:
            turn()
            self._has_global_unfinished_reqs(True)
        self.current_wave, self.step_counter = self.current_wave + 1, 0

    def execute_dummy_batch(self) -> str:
        return "computed for the others"

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        self.step_counter += 1
        return local_unfinished


class ParallelConfig:
    """A group whose other ranks give numbers, too."""

    @staticmethod
    def sync_kv_cache_memory_size(dp_group: Collection[int], kv_cache_memory: int) -> int:
        return min(kv_cache_memory, *dp_group)


class LoRAConfig:
    """Adapters whose requests may run in one step."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras


class FakeScheduler:
    """Chunked prefill, preemption by recomputation; its caller may schedule several steps ahead."""

    __module__ = "vllm.v1.core.sched.scheduler"
    lora_config: Any = None

    def __init__(
        self,
        slots: int = 4,
        chunk: int = 8,
        blocks: int = 100,
        rank: int = 0,
        ranks: int = 1,
        instance: str = "fake",
        drafts: int = 0,
        **config: Any,
    ) -> None:
        self.chunk = chunk
        self.drafts = drafts
        self.running: list[Request] = []
        self.waiting = Queue()
        self.kv_holding_waiting = Queue()
        self.num_waiting_for_streaming_input = 0
        self.connector: object | None = None
        self.num_spec_tokens = drafts
        self.policy = SimpleNamespace(value="fcfs")
        self.requests: dict[str, Request] = {}
        self.finished_req_ids: set[str] = set()
        self.max_num_scheduled_tokens = 8192
        self.current_step = 0
        self.prefill_capacity_bound = False
        self.scheduler_config = SimpleNamespace(
            long_prefill_token_threshold=0, enable_chunked_prefill=True
        )
        self.max_num_running_reqs = slots
        self.kv_cache_manager = SimpleNamespace(
            block_pool=SimpleNamespace(
                num_gpu_blocks=blocks + 1,
                hash_block_size=4,
                get_num_free_blocks=lambda: blocks - self.blocks_used,
            ),
            watermark_blocks=0,
            enable_caching=True,
            coordinator=Coordinator(FullAttentionManager(4)),
        )
        self.max_model_len = 4096
        self.num_lookahead_tokens = 0
        self.kv_cache_config = SimpleNamespace(kv_cache_tensors=[KVCacheTensor(blocks * 4096)])
        self.vllm_config = SimpleNamespace(
            additional_config=config,
            instance_id=instance,
            max_concurrent_batches=1,
            parallel_config=SimpleNamespace(
                data_parallel_index=rank,
                data_parallel_rank_local=None,
                data_parallel_size=ranks,
                distributed_executor_backend="uni",
                world_size=1,
                nnodes_within_dp=1,
                assigned_physical_gpu_ids=None,
                tensor_parallel_size=1,
            ),
        )
        self._preempted: set[str] = set()
        self.unready: Collection[str] = ()  # ids that it passes over, as it does with stale ones

    @property
    def blocks_used(self) -> int:
        holders = [*self.running, *self.kv_holding_waiting]
        return sum(-(-one.num_computed_tokens // 4) for one in holders)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            one = self.requests.pop(id_)
            self.finished_req_ids.add(id_)
            self.running = [other for other in self.running if other is not one]
            self.waiting = Queue(other for other in self.waiting if other is not one)
            if one.status is Status.RUNNING:
                one.status = Status.FINISHED_ABORTED

    def schedule(
        self, throttle_prefills: bool = False, preempt: Collection[str] = ()
    ) -> SchedulerOutput:
        for one in [one for one in self.running if one.request_id in preempt]:
            self._preempt(one)
        output = SchedulerOutput(
            finished_req_ids=self.finished_req_ids, preempted_req_ids=self._preempted
        )
        self.finished_req_ids, self._preempted = set(), set()
        for one in self.running:
            self._schedule_one(one, output)
            output.scheduled_cached_reqs.req_ids.append(one.request_id)
            output.scheduled_cached_reqs.num_computed_tokens.append(0)
        self._admit(output, preempt)
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        return output

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: Collection[str] = (),
        accepted: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step's tokens; the requests named in ``model_runner_output`` end with it.

        ``accepted`` has the drafts that are kept, by request; others keep none.
        """
        results = EngineCoreOutputs()
        for id_, tokens in scheduler_output.num_scheduled_tokens.items():
            one = self.requests.get(id_)
            if one is None:
                continue
            one.in_flight -= 1
            if stale := one.stale > 0:
                one.stale -= 1
            else:
                one.computed_tokens += tokens
            if scheduler_output.samples[id_]:
                drafts = scheduler_output.drafts.get(id_, 0)
                kept = min(accepted.get(id_, 0), drafts)
                one.num_output_tokens += 1 + kept
                results.outputs.append(EngineCoreOutput(id_, [7] * (1 + kept)))
                if not stale:
                    one.placeholders -= 1 + drafts
                    one.num_computed_tokens -= drafts - kept
                    one.computed_tokens -= drafts - kept
                one.decoding = one.decoding or not stale
                if id_ in model_runner_output:
                    one.status = Status.FINISHED_STOPPED
                    self.finish_requests([id_])
        return {0: results}

    def shutdown(self) -> None:
        """Nothing is held."""

    def _preempt(self, one: Request) -> None:
        self.running.remove(one)
        self.waiting.insert(0, one)
        one.num_computed_tokens = one.computed_tokens = one.placeholders = 0
        one.stale = one.in_flight
        one.decoding = False
        self._preempted.add(one.request_id)

    def _admit(self, output: SchedulerOutput, preempt: Collection[str]) -> None:
        for one in list(self.waiting):
            if one.stale or one.request_id in {*preempt, *self.unready}:
                continue
            if len(self.running) == self.max_num_running_reqs:
                break
            self.waiting.remove(one)
            self.running.append(one)
            one.num_computed_tokens = one.computed_tokens = one.cached_tokens
            if one.num_output_tokens:
                output.scheduled_cached_reqs.resumed_req_ids.add(one.request_id)
                output.scheduled_cached_reqs.req_ids.append(one.request_id)
                output.scheduled_cached_reqs.num_computed_tokens.append(one.cached_tokens)
            else:
                new = NewRequestData(one.request_id, one.cached_tokens)
                output.scheduled_new_reqs.append(new)
            self._schedule_one(one, output)

    def _schedule_one(self, one: Request, output: SchedulerOutput) -> None:
        tokens = min(self.chunk, one.num_tokens + one.placeholders - one.num_computed_tokens)
        if tokens > 0:
            one.num_computed_tokens += tokens
            one.in_flight += 1
            samples = one.num_computed_tokens == one.num_tokens + one.placeholders
            one.placeholders += samples
            if self.drafts and one.decoding and samples:
                tokens += self.drafts
                one.num_computed_tokens += self.drafts
                one.placeholders += self.drafts
                output.drafts[one.request_id] = self.drafts
            output.num_scheduled_tokens[one.request_id] = tokens
            output.samples[one.request_id] = samples


def vllm_modules() -> Mapping[str, ModuleType]:
    """What ``sys.modules`` has of vLLM inside an engine, as far as the plug-in looks."""
    modules = {name: ModuleType(name) for name in _CONTENTS}
    for name, contents in _CONTENTS.items():
        for key, value in contents.items():
            setattr(modules[name], key, value)
    return modules


_CONTENTS: Mapping[str, Mapping[str, object]] = {
    "vllm": {"__version__": VERSION},
    "vllm.v1.request": {"Request": Request},
    "vllm.v1.engine": {
        "EngineCoreOutput": EngineCoreOutput,
        "EngineCoreOutputs": EngineCoreOutputs,
    },
    "vllm.config": {"ParallelConfig": ParallelConfig, "LoRAConfig": LoRAConfig},
    "vllm.v1.engine.core": {"DPEngineCoreProc": DPEngineCoreProc},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.multimodal.inputs": {
        "MultiModalFeatureSpec": MultiModalFeatureSpec,
        "PlaceholderRange": PlaceholderRange,
    },
    "vllm.v1.core.kv_cache_utils": {"KVCacheBlock": KVCacheBlock},
    "vllm.sampling_params": {"SamplingParams": SamplingParams},
    "vllm.v1.sample.logits_processor.interface": {"BatchUpdate": BatchUpdate},
    "vllm.v1.kv_cache_interface": {"KVCacheTensor": KVCacheTensor},
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": SchedulerOutput,
        "NewRequestData": NewRequestData,
        "CachedRequestData": CachedRequestData,
    },
}
