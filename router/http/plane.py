from __future__ import annotations

from enum import StrEnum


class DataPlane(StrEnum):
    """Path of requests that generate; FastAPI serves all others."""

    SPLICE = "splice"
    """The connection's own protocol, which passes an engine's bytes on as they came."""

    ASGI = "asgi"
    """FastAPI, as for all others."""
