"""By which path a client's request goes through the router."""

from __future__ import annotations

from enum import StrEnum


class DataPlane(StrEnum):
    """Who takes requests for answers of models; all others are FastAPI's."""

    SPLICE = "splice"
    """The connection's own protocol, which passes an engine's bytes on as they came."""

    ASGI = "asgi"
    """FastAPI, as for all others."""
