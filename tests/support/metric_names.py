"""Names of metrics: those that exist, and those that a PromQL expression asks for."""

import re

from router.metrics import groups, other, workers
from router.metrics.rows import HistogramRow, Row

# The router's process, and what of vLLM's own metrics is drawn.
OTHERS = {
    *("process_cpu_seconds_total", "process_resident_memory_bytes"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:num_preemptions_total", "vllm:generation_tokens_total"),
}


def own_metrics() -> set[str]:
    """Everything that the router's tables name."""
    tables = [value for module in (groups, workers, other) for value in vars(module).values()]
    listed = [pair for table in tables if isinstance(table, dict) for pair in table.items()]
    return {name for name, row in listed if isinstance(row, Row | HistogramRow)}


def asked(expression: str) -> set[str]:
    """Names of the metrics in a PromQL expression, a histogram's without their endings."""
    names = re.findall(r"\b(?:evenstep_|process_|vllm:|up\b)\w*", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
