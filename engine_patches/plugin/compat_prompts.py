"""vLLM internals that a prompt budget needs; see ``compat``."""

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from operator import attrgetter
from typing import Any

from engine_patches.plugin.compat import LOCKSTEP_ENGINE
from engine_patches.plugin.compat_names import has
from engine_patches.plugin.settings import PlugInError

log = logging.getLogger("vllm.evenstep")

STEP_END = "_has_global_unfinished_reqs"
LEAST = "sync_kv_cache_memory_size"
# In the first step of a group, in which all ranks come at once.
_JOINING = timedelta(seconds=10)
_ALL = "all"
# Features that put a prompt off, or compute more of it, where a step has few tokens left for it;
# one that raises the bound of a prompt; and ranks that are added while the group runs, which would
# not agree with the others.
_WITHOUT = (
    ("need_mamba_block_aligned_split", "the Mamba cache mode align"),
    ("scheduler_config.disable_chunked_mm_input", "--disable-chunked-mm-input"),
    ("adaptive_long_prefill_threshold", "--long-prefill-token-threshold-adaptive"),
    ("vllm_config.parallel_config.enable_elastic_ep", "--enable-elastic-ep"),
)


class PromptTokens:
    """Bounds the prompt tokens of single steps; tokens of requests in decode always fit.

    Raises:
        PlugInError: this engine cannot cut prompts into pieces of any size, or its group grows.
    """

    def __init__(self, scheduler: Any) -> None:
        without = [
            why for path, why in _WITHOUT if has(scheduler, path) and attrgetter(path)(scheduler)
        ]
        if not scheduler.scheduler_config.enable_chunked_prefill:
            without.append("--no-enable-chunked-prefill")
        if without:
            raise PlugInError(f"evenstep.prompt_budget does not work with {', '.join(without)}")
        self._scheduler = scheduler
        self._step_tokens = scheduler.max_num_scheduled_tokens
        self._chunk = scheduler.scheduler_config.long_prefill_token_threshold

    def bound(self, tokens: int) -> None:
        """Let the next step compute so many prompt tokens at most, and those of a draft at least.

        vLLM lets no request enter that has no room for its draft. Prompts that are partly computed
        may stand ahead of requests in decode: each gets an equal part, so that these keep theirs.
        """
        scheduler = self._scheduler
        begun = max(1, sum(one.is_prefill_chunk for one in scheduler.running))
        tokens = max(tokens, begun * (1 + scheduler.num_spec_tokens))
        scheduler.max_num_scheduled_tokens = min(self._step_tokens, self._decoding + tokens)
        chunk = tokens // begun
        scheduler.scheduler_config.long_prefill_token_threshold = min(self._chunk or chunk, chunk)

    def hold(self) -> None:
        """Let the next step compute no prompts; ``schedule`` must be told to throttle them.

        By itself vLLM throttles none if it left requests waiting, or if none decodes here: then
        the step has no tokens. Else it has all of its own, so that KV from elsewhere can come.
        """
        scheduler = self._scheduler
        scheduler.prefill_capacity_bound = False
        if all(one.is_prefill_chunk for one in scheduler.running):
            scheduler.max_num_scheduled_tokens = 0

    @property
    def _decoding(self) -> int:
        scheduler = self._scheduler
        # With pipeline stages vLLM may leave out a request that still has a token on its way.
        step = getattr(scheduler, "current_step", 0) + 1
        return sum(
            decode_tokens(one)
            for one in scheduler.running
            if getattr(one, "next_decode_eligible_step", 0) <= step
        )

    def free(self) -> None:
        """Restore vLLM's own bounds."""
        self._scheduler.max_num_scheduled_tokens = self._step_tokens
        self._scheduler.scheduler_config.long_prefill_token_threshold = self._chunk


def watch_group_steps(ended: Callable[[int, Callable[[int], int]], None]) -> None:
    """Call ``ended`` after each step of a data-parallel group, on all ranks after the same ones.

    It gets the step's number, counted alike on all ranks from the last time that all were idle, and
    0 if all are now; and a function that returns the least of what the ranks give it. All must call
    it. If a rank of the group does not watch its steps, none is told of any.
    """
    module, name = LOCKSTEP_ENGINE
    engine = getattr(import_module(module), name)
    step_end = getattr(engine, STEP_END)
    least = getattr(import_module("vllm.config").ParallelConfig, LEAST)

    together: bool | None = None

    @wraps(step_end)
    def told(core: Any, *args: Any) -> Any:
        nonlocal together
        goes_on = step_end(core, *args)
        if together is None:
            together = _all_join(core)
        if together:
            ended(goes_on and core.step_counter, partial(least, core.dp_group))
        return goes_on

    setattr(engine, STEP_END, told)


def _all_join(core: Any) -> bool:
    """Whether all ranks of the group call this; the first time, after their first step.

    The first rank that knows decides for all: one that comes late would find that all are there,
    and wait for those that have given it up.
    """
    ranks = [f"evenstep/prompt_budget/{rank}" for rank in range(core.dp_size)]
    found = _ALL
    try:
        core.dp_store.set(ranks[core.dp_rank], "")
        try:
            core.dp_store.wait(ranks, _JOINING)
        except RuntimeError:
            found = "not all"
        decided: bytes = core.dp_store.compare_set("evenstep/prompt_budget", "", found)
    except Exception:
        log.exception("evenstep: no prompt budget here")
        return False
    if decided == _ALL.encode():
        return True
    log.warning("evenstep: no prompt budget here: not all ranks of the group take one")
    return False


def decode_tokens(request: Any) -> int:
    """Tokens that vLLM computes for a running request in the next step, if its prompt is done."""
    ahead = request.num_output_placeholders
    # Its last token is under way.
    last = ahead and (
        request.num_computed_tokens + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
    )
    if request.is_prefill_chunk or last:
        return 0
    return max(0, int(request.num_tokens_with_spec + ahead - request.num_computed_tokens))
