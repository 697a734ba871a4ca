"""The data planes on which a test file runs: what a client may rely on holds on each."""

from typing import Any

import pytest

from router.http.port import DataPlane

VARIABLE = "EVENSTEP_DATA_PLANE"

# Seconds each, or their engine serves the routers of both: on both planes wherever they run.
BOTH = frozenset(
    {
        *("test_access", "test_app", "test_aside", "test_malformed_http", "test_slow_clients"),
        *("test_relay", "test_relay_clients", "test_relay_deadlines", "test_relay_dialects"),
        *("test_relay_failures", "test_relay_recall", "test_relay_retries"),
        *("test_split_relay", "test_split_relay_faults", "test_split_relay_outages"),
        *("test_engine_client", "test_target_verdicts"),
    }
)
# Their routers are processes: FastAPI's plane is left to `make soak`.
SOAKED = frozenset(
    {
        *("test_black_hole", "test_chaos", "test_ending", "test_faults", "test_generated_http"),
        *("test_internal_ranks", "test_reload", "test_rolling_restart", "test_schemathesis"),
        *("test_serve_command", "test_serve_keys", "test_split_faults", "test_split_relay_chaos"),
    }
)


def planes_of(module: str, *, slow: bool) -> list[Any]:
    """Parameters for a test of this module: planes, the second one of a soaked file marked slow.

    None at all where a test does not say: its routers have the plane that the environment names.
    So has a soaked file's test that is slow itself.
    """
    if module in BOTH:
        return list(DataPlane)
    if module in SOAKED and not slow:
        return [DataPlane.SPLICE, pytest.param(DataPlane.ASGI, marks=pytest.mark.slow)]
    return []
