"""Tests of what a client may rely on, whichever data plane the router has."""

from __future__ import annotations

import os

from router.http.plane import DataPlane

VARIABLE = "EVENSTEP_DATA_PLANE"

# In the test's own process, seconds each: on both planes at every run.
QUICK = frozenset(
    {
        *("test_access", "test_app", "test_aside", "test_malformed_http", "test_slow_clients"),
        *("test_relay", "test_relay_clients", "test_relay_deadlines", "test_relay_dialects"),
        *("test_relay_failures", "test_relay_recall", "test_relay_retries"),
        *("test_split_relay", "test_split_relay_faults", "test_split_relay_outages"),
    }
)
# Of routers that are processes, on the plane that the environment says.
LONG = frozenset(
    {
        *("test_black_hole", "test_chaos", "test_ending", "test_faults", "test_generated_http"),
        *("test_engine_client", "test_internal_ranks", "test_rolling_restart"),
        *("test_schemathesis", "test_serve_command", "test_serve_keys", "test_split_faults"),
        *("test_reload", "test_split_relay_chaos"),
    }
)


def planes_of(module: str) -> list[DataPlane]:
    """On which planes a test module runs; none: it does not say."""
    if module not in QUICK:
        return []
    asked = os.environ.get(VARIABLE)
    return [DataPlane(asked)] if asked else list(DataPlane)
