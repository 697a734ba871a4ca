"""A KV connector that only pretends: what is fetched and handed over follows from chance.

Loaded by vLLM, as any connector is, from this module's path.
"""

from __future__ import annotations

import random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput


class RemoteKv(KVConnectorBase_V1):  # type: ignore[misc]
    """Prompts are found elsewhere at once, later or never; blocks are held until they are fetched.

    Attributes:
        found: prompts that were.
        failed: those of them whose KV came in part only.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._rng = random.Random(1)
        self._later: dict[str, bool] = {}
        self._loading: set[str] = set()
        self._sending: set[str] = set()
        self.found = self.failed = 0

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """A prompt is found once: after a preemption or a failure it is computed here."""
        id_ = request.request_id
        tokens = request.num_prompt_tokens - num_computed_tokens
        if tokens < 2 or (id_ in self._later and not self._later[id_]):
            return 0, False
        kind = self._rng.random()
        if kind < 0.1:
            return None, False  # not known yet
        self._later[id_] = kind < 0.5
        whole_blocks = (tokens - 1) // self._block_tokens * self._block_tokens
        return (tokens, True) if kind < 0.5 else (whole_blocks if kind < 0.8 else 0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""
        self.found += num_external_tokens > 0
        if num_external_tokens and self._later[request.request_id]:
            self._loading.add(request.request_id)
        self._later[request.request_id] = False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Whether its blocks are held."""
        held = request.request_id not in self._loading and self._rng.random() < 0.5
        if held:
            self._sending.add(request.request_id)
        return held, None

    def transfers(self, scheduler: Any) -> KVConnectorOutput:
        """What the workers of an engine would tell after a step."""
        loaded = {id_ for id_ in sorted(self._loading) if self._rng.random() < 0.3}
        sent = {id_ for id_ in sorted(self._sending) if self._rng.random() < 0.2}
        self._loading -= loaded
        self._sending -= sent
        lost = set()
        for id_ in sorted(loaded):
            if self._rng.random() < 0.3 and not scheduler.requests[id_].is_finished():
                self.failed += 1
                (blocks,) = scheduler.kv_cache_manager.get_block_ids(id_)
                lost.add(blocks[-1])  # one that no other request shares
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=loaded, invalid_block_ids=lost
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing for the workers, of which there are none."""
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Of a worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Of a worker."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Of a worker."""

    def wait_for_save(self) -> None:
        """Of a worker."""
