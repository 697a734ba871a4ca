"""The table of all metrics, from the router's own tables."""

from collections.abc import Iterator
from typing import Any

from router.metrics import groups, other, workers
from router.metrics.rows import Table

_GROUP, _WORKER = ("group",), ("group", "worker", "rank")
# Labels of a table's subjects, and its rows.
_TABLES: tuple[tuple[tuple[str, ...], Table[Any]], ...] = (
    (_GROUP, groups.DECIDER_ROWS),
    (_GROUP, groups.GROUP_ROWS),
    (_GROUP, groups.PREFILL_ROWS),
    (_GROUP, groups.LOOK_AHEAD_ROWS),
    (("group", "pool"), groups.STEP_ROWS),
    (_WORKER, workers.WORKER_ROWS),
    (_WORKER, workers.LIVE_WORKER_ROWS),
    (_WORKER, workers.READING_ROWS),
    ((), workers.SNAPSHOT_ROWS),
    ((), workers.AGENT_ROWS),
    ((), workers.HEALTH_ROWS),
    ((), workers.GAUGE_ROWS),
    ((), workers.KV_EVENT_ROWS),
    (("key",), other.KEY_ROWS),
    ((), other.ACCESS_ROWS),
    ((), other.BUILD_ROWS),
    ((), other.HTTP_ROWS),
    ((), other.PICK_ROWS),
    ((), other.REPLICA_ROWS),
)
_HEAD = """# Metrics

What `/metrics` tells, generated from the tables that the router reads them by
(`router/metrics`): change them there, then
`python -m docs.generate`. Units are Prometheus's base units. A worker has eleven
series at most; its gauges end while it is down, and totals of groups never fall. The process's
own (`process_…`) come on top.
API keys are told by their names, 64 at most and the rest together as `other`.

Joules per output token: `group:evenstep_energy_joules_per_output_token:rate5m`, a recording rule of
[rules.yml](../deploy/prometheus/rules.yml).

| metric | type | labels | |
|---|---|---|---|
"""


def metrics_text() -> str:
    """The document."""
    lines = (
        f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in sorted(_all())
    )
    return _HEAD + "\n".join(lines) + "\n"


def _all() -> Iterator[tuple[str, str, str, str]]:
    for names, rows in _TABLES:
        for name, row in rows.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            labels = names if row.label is None else (*names, row.label)
            yield name, kind, ", ".join(labels), row.help
    for name, each in groups.HISTOGRAMS.items():
        yield name, "histogram", ", ".join(_GROUP), each.help
