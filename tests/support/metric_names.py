"""Names of metrics: those that exist, and those that a PromQL expression asks for."""

from __future__ import annotations

import re

from router.metrics import groups as metric_table
from router.metrics import http as metric_http
from router.metrics import keys as metric_keys
from router.metrics import processes as metric_processes
from router.metrics import workers as metric_workers

# The router's process, and what of vLLM's own metrics is drawn.
OTHERS = {
    *("process_cpu_seconds_total", "process_resident_memory_bytes"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:num_preemptions_total", "vllm:generation_tokens_total"),
}


def own_metrics() -> set[str]:
    """Everything that the router's tables name."""
    tables_of = (metric_table, metric_workers, metric_keys, metric_http, metric_processes)
    named = [value for module in tables_of for value in vars(module).values()]
    tables = [table for table in named if isinstance(table, tuple)]
    rows = {row.name for table in tables for row in table if hasattr(row, "help")}
    histograms = {name for name, *_ in metric_table.HISTOGRAMS}
    return rows | histograms | {name for name, *_ in tables if isinstance(name, str)}


def asked(expression: str) -> set[str]:
    """Names of the metrics in a PromQL expression, a histogram's without their endings."""
    names = re.findall(r"\b(?:evenstep_|process_|vllm:|up\b)\w*", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
