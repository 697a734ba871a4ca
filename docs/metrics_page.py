"""The table of all metrics, from the router's own tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from router.metrics import groups as metric_table
from router.metrics import http as metric_http
from router.metrics import keys as metric_keys
from router.metrics import processes as metric_processes
from router.metrics import workers as metric_workers

_GROUP, _WORKER = "group", "group, worker, rank"
_TABLES = (
    (_GROUP, metric_table.GROUP_ROWS),
    (_GROUP, metric_table.FEED_ROWS),
    (_GROUP, metric_table.ENERGY_ROWS),
    (_GROUP, metric_table.PREFILL_ROWS),
    (_GROUP, metric_table.LOOK_AHEAD_ROWS),
    ("group, pool", metric_table.STEP_ROWS),
    (_WORKER, metric_workers.WORKER_ROWS),
    (_WORKER, metric_workers.LIVE_WORKER_ROWS),
    ("key", metric_keys.KEY_ROWS),
    ("", metric_workers.SNAPSHOT_ROWS),
    ("", metric_workers.AGENT_ROWS),
    ("", metric_workers.HEALTH_ROWS),
    ("", metric_workers.GAUGE_ROWS),
)
_LABELED = (
    ("version", metric_table.BUILD),
    ("group, state", metric_table.METERED_SECONDS),
    ("group, state", metric_table.FITTED_POWER),
    ("group, outcome", metric_table.REQUESTS),
    ("group, source", metric_table.WORKERS),
    ("group, admission", metric_table.ADMISSION_WORKERS),
    (f"{_WORKER}, source", metric_workers.STATE_SOURCE),
    ("key, limit", metric_keys.KEY_LIMITED),
    ("", metric_keys.UNAUTHORIZED),
    ("", metric_http.CONNECTIONS),
    ("status", metric_http.REFUSED),
    ("role", metric_processes.PROCESSES),
    ("role", metric_processes.RESTARTS),
    ("", metric_processes.BROKEN),
)
_HEAD = """# Metrics

What `/metrics` tells, generated from the tables that the router reads them by
(`groups.py`, `workers.py`, `keys.py`, `http.py` and `processes.py` in `router/metrics`): change
them there, then `python -m docs.generate`. Units are Prometheus's base units. A worker has
ten series at most; its gauges end while it is down, and totals of groups never fall. The process's
own (`process_…`) come on top; with `--processes` above 1 they are those of the one that decides.
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
    for labels, rows in _TABLES:
        yield from _rows(labels, ((row.name, row.help) for row in rows))
    for labels, named in _LABELED:
        yield from _rows(labels, [named])
    for name, text, _ in metric_table.HISTOGRAMS:
        yield name, "histogram", _GROUP, text


def _rows(labels: str, named: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str, str]]:
    for name, text in named:
        yield name, "counter" if name.endswith("_total") else "gauge", labels, text
