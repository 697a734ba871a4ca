"""A plug-in of vLLM's own kind that writes down what vLLM counts, step by step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

FILE_VARIABLE = "STAT_LOG_FILE"


class StatLog(StatLoggerBase):  # type: ignore[misc]
    """One line of JSON for every set of scheduler statistics."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._file = Path(os.environ[FILE_VARIABLE]).open("a", buffering=1)  # noqa: SIM115

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
        line = {
            "running": scheduler_stats.num_running_reqs,
            "waiting": scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            "kv_usage": scheduler_stats.kv_cache_usage,
            "preempted": getattr(iteration_stats, "num_preempted_reqs", 0),
            "generated": getattr(iteration_stats, "num_generation_tokens", 0),
            "kept": getattr(drafts, "num_accepted_tokens", 0),
        }
        self._file.write(json.dumps(line) + "\n")

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
